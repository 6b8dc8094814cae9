"""Frozen quantised heads: ``logitless.QuantizedWeight``, whose rows a loss dequantises a window at a time.

The loss of the whole vocabulary follows from those of its windows. Its lse is the log-sum-exp of theirs, and autograd
joins their gradients. The backward pass dequantises each window again, so that none outlives its use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UnsupportedError

__all__ = ["QuantizedWeight"]

PIECE = 1 << 22  # most elements that are dequantised at a time, as conversions need memory beside the window
BYTES = 16  # most bytes an element that the packages' conversions need


class QuantizedWeight:
    """The weight ``[V, D]`` of a frozen quantised head, in the place of a tensor in the loss's ``weight``.

        weight = logitless.QuantizedWeight(model.lm_head)
        loss = logitless.linear_cross_entropy(hidden, weight, targets)

    :func:`logitless.linear_cross_entropy` dequantises as many rows at a time as its budget allows, and multiplies in
    the dtype of the hidden states. The gradient of ``hidden`` is that of the dequantised weight, as in the packages'
    own backward passes. bitsandbytes also quantises the hidden states for 8 bits on CUDA, which the loss does not.

    Args:
        head: A ``bitsandbytes.nn.Linear8bitLt`` or ``Linear4bit``, or a ``torch.nn.Linear`` whose weight torchao has
            quantised to int8 or float8 (weight-only, a scale for each row or group of a row). The weight alone will do
            where it has its scales: that of torchao, or of ``Linear4bit``.

    Attributes:
        shape: ``[V, D]``.
        dtype: The dtype that was quantised; with bitsandbytes' 8 bits, which do not say it, float16.

    Raises:
        TypeError: ``head`` is no module and no tensor.
        UnsupportedError: The head is of another kind, is trained, or is not quantised yet.
    """

    requires_grad = False

    def __init__(self, head: nn.Module | Tensor) -> None:
        if not isinstance(head, (nn.Module, Tensor)):
            raise TypeError(f"head: expected a layer or its weight, got {type(head).__name__}")
        weight = head if isinstance(head, Tensor) else getattr(head, "weight", None)
        kind = kind_of(head)
        if kind is None or weight is None:
            raise UnsupportedError(
                "head: expected a Linear8bitLt or Linear4bit of bitsandbytes, or an int8 or float8 weight of torchao, "
                f"got {type(head).__name__}" + ("" if weight is head else f" with a {type(weight).__name__}")
            )
        if weight.requires_grad:
            raise UnsupportedError(f"head: expected a frozen quantised weight, got a trained {type(weight).__name__}")
        self.columns: tuple[Tensor, ...] = ()  # further columns, [V, r], which may be trained
        self._first_dtype: torch.dtype | None = None  # the dtype to which rows are dequantised before they get columns
        self.layer_dtype: torch.dtype | None = None  # the dtype to which the layer rounds hidden states, if it has one
        read = kind(head, weight)
        # Dequantisation begins at rows that are a multiple of the unit, where a block of scales begins.
        self.shape, self.dtype, self.parts, self.bytes_beside, self.unit, self._rows = read
        self.device = self.parts[0].device
        if isinstance(head, nn.Module) and getattr(head, "compute_type_is_set", False):
            self.layer_dtype = getattr(head, "compute_dtype")

    def __repr__(self) -> str:
        return f"QuantizedWeight(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def dim(self) -> int:
        return 2

    def rows(self, start: int, stop: int, dtype: torch.dtype, piece: int = PIECE) -> Tensor:
        """Returns rows [start, stop) in this dtype, of which about ``piece`` elements are dequantised at a time."""
        width = self.shape[1] - sum(part.shape[1] for part in self.columns)
        with torch.inference_mode(False), torch.no_grad():
            out = torch.empty(stop - start, self.shape[1], dtype=dtype, device=self.device)
            step = max(1, piece // (width * self.unit)) * self.unit
            for first in range(start // self.unit * self.unit, stop, step):
                made = self._rows(first, min(first + step, self.shape[0]), self._first_dtype or dtype)
                low, high = max(first, start), min(first + step, stop)
                out[low - start : high - start, :width] = made[low - first : high - first]
        if not self.columns:
            return out
        parts = [part[start:stop].to(dtype) for part in self.columns]
        if not any(part.requires_grad for part in parts):
            torch.cat(parts, dim=1, out=out[:, width:])
            return out
        return torch.cat([out[:, :width], *parts], dim=1)

    def reads(self) -> list[Tensor]:
        """Returns the tensors of which rows are made."""
        return [*self.parts, *self.columns]

    def blocks(self, count: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yields all rows, ``count`` at a time."""
        for start in range(0, self.shape[0], count):
            yield self.rows(start, min(start + count, self.shape[0]), dtype)

    def rounded(self, hidden: Tensor) -> Tensor:
        """Returns hidden states as the layer's product takes them."""
        return hidden if self.layer_dtype is None else hidden.to(self.layer_dtype)

    def dtype_for(self, hidden: Tensor) -> torch.dtype:
        """Returns the dtype of the product's operands."""
        dtype = hidden.dtype if self.layer_dtype is None else self.layer_dtype
        is_cast = torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64
        return torch.get_autocast_dtype(hidden.device.type) if is_cast else dtype

    def __getitem__(self, rows: slice) -> QuantizedWeight:
        """Returns the first rows, by ``weight[:count]``."""
        if not isinstance(rows, slice) or rows.start or rows.step:
            raise TypeError(f"QuantizedWeight: expected weight[:count], got weight[{rows}]")
        made = self._copy()
        made.shape = torch.Size((len(range(self.shape[0])[rows]), self.shape[1]))
        return made

    def joined(self, columns: list[Tensor], hidden: Tensor) -> QuantizedWeight:
        """Returns the weight with further columns, such as an adapter's, for rounded hidden states [h, further ones].

        Its own columns keep the values that they have in a product with ``hidden``.
        """
        made = self._copy()
        made.columns, made.layer_dtype, made._first_dtype = tuple(columns), None, self.dtype_for(hidden)
        made.shape = torch.Size((self.shape[0], self.shape[1] + sum(part.shape[1] for part in columns)))
        return made

    def in_float32(self) -> QuantizedWeight:
        """Returns the weight with float32 in place of 16-bit columns, whose gradients autograd then adds in float32."""
        made = self._copy()
        made.columns = tuple(part.float() if part.element_size() == 2 else part for part in self.columns)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("QuantizedWeight: expected a new one of the copied or loaded head, got a copy or a pickle")

    def _copy(self) -> QuantizedWeight:
        made = QuantizedWeight.__new__(QuantizedWeight)
        made.__dict__ |= self.__dict__
        return made


# ---- the packages


_Kind = Callable[[Any, Any], tuple[torch.Size, torch.dtype, list[Tensor], int, int, Callable[..., Tensor]]]


def kind_of(head: Any) -> _Kind | None:
    """Returns the function that reads a quantised layer or weight, or None for all others.

    It imports nothing: a package that made the head is imported.
    """
    weight = head if isinstance(head, Tensor) else getattr(head, "_parameters", {}).get("weight")
    kind = type(weight)
    return _KINDS.get(f"{kind.__module__.partition('.')[0]}.{kind.__name__}")


def _bits_8(head: Any, weight: Any) -> Any:
    state = getattr(head, "state", None)
    codes, scales = weight.CB, weight.SCB
    if codes is None and state is not None:  # the layer's first call moves them there
        codes, scales = state.CB, state.SCB
    if getattr(weight, "has_fp16_weights", False) or getattr(state, "has_fp16_weights", False):
        raise UnsupportedError("head: expected a frozen quantised weight, got has_fp16_weights=True, which trains it")
    if codes is None or scales is None:
        raise UnsupportedError(
            "head: expected a quantised Linear8bitLt, got one without codes or scales; pass the layer, "
            "not its weight, and move it to its device first"
        )

    if codes.device != weight.device and weight.dtype == torch.int8:
        codes = weight.data  # a layer that moves after it was quantised leaves the others behind
    scales = scales.to(codes.device)

    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        made: Tensor = codes[start:stop].to(dtype).mul_(scales[start:stop].unsqueeze(1).mul(1.0 / 127.0))
        return made

    return codes.shape, torch.float16, [codes, scales], 0, 1, rows


def _bits_4(head: Any, weight: Any) -> Any:
    from bitsandbytes import functional as bnb

    state = getattr(head, "quant_state", None) if weight.quant_state is None else weight.quant_state
    if state is None or getattr(state, "packing_format_for_cpu", False):
        got = "one that is not quantised" if state is None else "a CPU's layout for inference; state_dict() undoes it"
        raise UnsupportedError(f"head: expected a quantised Linear4bit, got {got}")
    shape, size = torch.Size(state.shape), state.blocksize
    scales = state.absmax
    if state.nested:
        scales = bnb.dequantize_blockwise(scales, state.state2) + state.offset
    scales = scales.float()
    code, quant_type, dtype = state.code, state.quant_type, state.dtype  # which a layout for inference would change
    packed = weight.data.view(torch.uint8).reshape(-1)
    # The kernel for CPUs of bitsandbytes 0.50.2 gives wrong numbers for rows that share a block, but not for one row.
    unit = size // math.gcd(size, shape[1])

    def rows(start: int, stop: int, wanted: torch.dtype) -> Tensor:
        first, last = start * shape[1], stop * shape[1]
        part: Any = bnb.QuantState(  # type: ignore[no-untyped-call]
            absmax=scales[first // size : -(-last // size)],
            shape=torch.Size((stop - start, shape[1]) if unit == 1 else (last - first,)),
            code=code,
            blocksize=size,
            quant_type=quant_type,
            dtype=dtype,
        )
        made: Tensor = bnb.dequantize_4bit(packed[first // 2 : -(-last // 2)].unsqueeze(1), part).to(wanted)
        return made.view(stop - start, shape[1])

    return shape, dtype, [weight, state.absmax], 4 * scales.numel(), unit, rows


def _of_torchao(head: Any, weight: Any) -> Any:
    further = ("act_quant_kwargs", "act_quant_scale", "act_quant_zero_point", "act_pre_scale", "mm_config")
    given = [name for name in further if getattr(weight, name, None) is not None]
    if given or weight.dim() != 2 or weight.block_size[0] != 1:
        got = f"one with {given[0]}" if given else f"{list(weight.shape)} in blocks of {list(weight.block_size)}"
        raise UnsupportedError(
            f"head: expected a weight-only {type(weight).__name__} [V, D] with scales for each row, got {got}"
        )

    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        made: Tensor = weight[start:stop].dequantize(torch.float32 if dtype == torch.float64 else dtype)
        return made.to(dtype)

    return weight.shape, weight.dtype, [weight.qdata, weight.scale], 0, 1, rows


_KINDS: dict[str, _Kind] = {  # by the weight's package and class
    "bitsandbytes.Int8Params": _bits_8,
    "bitsandbytes.Params4bit": _bits_4,
    "torchao.Int8Tensor": _of_torchao,
    "torchao.Float8Tensor": _of_torchao,
}


# ---- saved tensors


class Saved:
    """A tensor for the backward pass, kept or made again there. It raises an error if its sources have changed."""

    def __init__(self, sources: list[Tensor], make: Callable[[], Tensor] | None = None) -> None:
        self._make = make or (lambda: sources[0])
        self._sources = [(tensor, tensor._version) for tensor in sources if not tensor.is_inference()]

    def __call__(self) -> Tensor:
        for tensor, version in self._sources:
            if tensor._version != version:
                raise RuntimeError(
                    "logitless.linear_cross_entropy: hidden or another tensor of the call was changed in place before "
                    f"the backward pass: expected version {version}, got {tensor._version}"
                )
        with torch.no_grad():
            return self._make()


def made_again(*made: tuple[Tensor, Saved]) -> Any:
    """Makes autograd save none of these tensors inside the block, and keep and check all others as it does outside."""
    known = {(tensor.data_ptr(), tensor.shape): again for tensor, again in made}  # autograd keeps it, so no tensors

    def pack(tensor: Tensor) -> Saved:
        return known.get((tensor.data_ptr(), tensor.shape)) or Saved([tensor])

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved())
