"""Runs a problem on CPU tensors: tensors to Spec and pointers. No autograd, no dispatcher; _ops.py is above this.

Shapes, everywhere below the public functions: hidden [N, D], weight [V, D], target [N], bias [V].
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _c, _options, _plan

CODES = {
    torch.float32: _c.F32,
    torch.bfloat16: _c.BF16,
    torch.float16: _c.F16,
    torch.float64: _c.F64,
    torch.int32: _c.I32,
    torch.int64: _c.I64,
}


class Inputs(NamedTuple):
    """The tensors of one problem; class_weight, token_weight and upstream gradients have stats_dtype."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    target: Tensor  # [N]
    bias: Tensor | None  # [V]
    class_weight: Tensor | None  # [V]
    token_weight: Tensor | None  # [N]
    num_items: Tensor | None  # scalar; takes the place of the option


class Wants(NamedTuple):
    """Which gradients."""

    hidden: bool
    weight: bool
    bias: bool


def stats_dtype(hidden: Tensor) -> torch.dtype:
    """dtype of losses, statistics and weights of rows and classes."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _rows(matrix: Tensor) -> Tensor:
    """The matrix itself when its rows are contiguous and do not overlap, whatever their stride."""
    rows, columns = matrix.shape
    contiguous_rows = columns == 1 or matrix.stride(1) == 1
    if contiguous_rows and (rows <= 1 or matrix.stride(0) >= columns):
        return matrix
    return matrix.contiguous()


def _row_stride(matrix: Tensor) -> int:
    return matrix.stride(0) if matrix.shape[0] > 1 else 0


def _rows_are_aligned(matrix: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes, as far as rows are that long."""
    size = matrix.element_size()
    if matrix.shape[1] * size % 16 != 0:
        return True  # rows of such a length are copied anyway
    return matrix.data_ptr() % 16 == 0 and (matrix.shape[0] <= 1 or matrix.stride(0) * size % 16 == 0)


def _cuda_backend() -> str | None:
    """HEADROOM_CUDA: ``sm90`` or ``portable`` in place of the library's choice."""
    name = os.environ.get("HEADROOM_CUDA")
    return f"cuda:{name}" if name else None


class Call:
    """One call of the library: collects pointers and keeps their tensors alive until it has run."""

    def __init__(self, pass_: int, inputs: Inputs, wants: Wants, options: dict[str, Any]) -> None:
        hidden, weight = _rows(inputs.hidden), _rows(inputs.weight)
        self.inputs, self.wants = inputs, wants
        self.device = hidden.device
        self.stats = stats_dtype(hidden)
        self.keep: list[Tensor] = []
        self.pointers: dict[str, Any] = {}
        self.spec: dict[str, Any] = dict(options)
        if inputs.num_items is not None and self.device.type != "cpu":
            self.give("num_items", inputs.num_items.to(self.device, self.stats))
        elif inputs.num_items is not None:
            self.spec["num_items"] = _options.checked_num_items(inputs.num_items.item(), options["reduction"])
        self.spec |= {
            "pass_": pass_,
            "reduction": _c.REDUCTIONS[options["reduction"]],
            "tokens": hidden.shape[0],
            "vocab": weight.shape[0],
            "hidden": hidden.shape[1],
            "hidden_dtype": CODES[hidden.dtype],
            "classifier_dtype": CODES[weight.dtype],
            "target_dtype": CODES[inputs.target.dtype],
            "has_bias": inputs.bias is not None,
            "has_class_weight": inputs.class_weight is not None,
            "has_token_weight": inputs.token_weight is not None,
            "want_d_hidden": wants.hidden,
            "want_d_classifier": wants.weight,
            "want_d_bias": wants.bias,
        }
        if self.device.type == "cuda":
            self.spec["unaligned_rows"] = not (_rows_are_aligned(hidden) and _rows_are_aligned(weight))
        self._give("hidden", hidden, _row_stride(hidden))
        self._give("classifier", weight, _row_stride(weight))
        self.give("targets", inputs.target)
        if inputs.bias is not None:
            self.spec["bias_dtype"] = CODES[inputs.bias.dtype]
            self.give("bias", inputs.bias)
        self.give("class_weight", inputs.class_weight)
        self.give("token_weight", inputs.token_weight)

    def _give(self, name: str, tensor: Tensor, stride: int | None = None) -> None:
        self.keep.append(tensor)
        self.pointers[name] = tensor.data_ptr()
        if stride is not None:
            self.pointers[f"{name}_stride"] = stride

    def give(self, name: str, tensor: Tensor | None) -> None:
        """A vector or scalar to read; None is null."""
        if tensor is not None:
            self._give(name, tensor.contiguous())

    def new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, wanted: bool = True) -> Tensor:
        """A tensor for the library to write, empty when it is not wanted."""
        tensor = torch.empty(shape if wanted else (0,), dtype=dtype, device=self.device)
        if wanted:
            self._give(name, tensor)
        return tensor

    def new_gradients(self, main_grad: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """d_hidden, d_weight, d_bias; d_weight is added to main_grad [V, D] when that is given."""
        hidden, weight, bias = self.inputs.hidden, self.inputs.weight, self.inputs.bias
        self.spec["d_hidden_dtype"] = CODES[hidden.dtype]
        self.spec["d_classifier_dtype"] = CODES[weight.dtype]
        d_hidden = self.new("d_hidden", tuple(hidden.shape), hidden.dtype, self.wants.hidden)
        into = main_grad if self.wants.weight else None
        d_weight = self.new("d_classifier", tuple(weight.shape), weight.dtype, self.wants.weight and into is None)
        if into is not None:
            self.spec |= {"d_classifier_dtype": CODES[into.dtype], "accumulate_d_classifier": True}
            self._give("d_classifier", into, _row_stride(into))
        if bias is None:
            return d_hidden, d_weight, hidden.new_empty((0,))
        self.spec["d_bias_dtype"] = CODES[bias.dtype]
        return d_hidden, d_weight, self.new("d_bias", tuple(bias.shape), bias.dtype, self.wants.bias)

    def run(self) -> None:
        spec = _plan.Spec(**self.spec)
        if self.device.type == "cpu":
            _plan.run_on_host(_plan.plan_of(spec, torch.get_num_threads()), self.pointers)
            return
        # Workspace from PyTorch's caching allocator: freed when this returns, to be used again in stream order.
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            plan = _plan.plan_of(spec, 1, _cuda_backend(), self.device.index)
            workspace = torch.empty(plan.info.workspace_bytes, dtype=torch.uint8, device=self.device)
            _plan.run(plan, self.pointers, workspace.data_ptr(), stream.cuda_stream)


def scale_in_place(gradient: Tensor, factor: Tensor) -> Tensor:
    """``gradient *= factor`` on a CUDA device, where only the device knows the factor; nothing is touched if it is 1."""
    with torch.cuda.device(gradient.device):
        stream = torch.cuda.current_stream(gradient.device).cuda_stream
        factor = factor.to(torch.float32)
        _plan.scale_gradient(
            gradient.data_ptr(), CODES[gradient.dtype], gradient.numel(), factor.data_ptr(), gradient.device.index, stream
        )
    return gradient


class Losses(NamedTuple):
    """What a forward pass returns; a statistic that is not wanted is empty. counts holds correct and valid rows."""

    loss: Tensor  # scalar, or [N] with reduction "none"
    nll: Tensor  # [N]
    lse: Tensor  # [N]
    entropy: Tensor  # [N]
    argmax: Tensor  # [N] int64
    counts: Tensor  # [2] int64


def new_losses(call: Call, per_token: bool, entropy: bool, argmax: bool) -> Losses:
    """Output tensors of a forward pass. The count of correct rows is 0 without argmax."""
    tokens = call.spec["tokens"]
    losses = Losses(
        loss=call.new("loss", (tokens,) if call.spec["reduction"] == 0 else (), call.stats),
        nll=call.new("nll", (tokens,), call.stats, per_token),
        lse=call.new("lse", (tokens,), call.stats, per_token),
        entropy=call.new("entropy", (tokens,), call.stats, entropy),
        argmax=call.new("argmax", (tokens,), torch.int64, argmax),
        counts=torch.zeros(2, dtype=torch.int64, device=call.device),
    )
    call.spec |= {"want_entropy": entropy, "want_argmax": argmax}
    counts = losses.counts.data_ptr()
    call.pointers["valid_count"] = counts + losses.counts.element_size()
    if argmax:
        call.pointers["correct_count"] = counts
    return losses
