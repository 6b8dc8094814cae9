"""Runs a problem on tensors: tensors to Spec and pointers. No autograd, no dispatcher; _ops.py is above this.

Shapes, everywhere below the public functions: hidden [N, D], weight [V, D], bias [V], target of N elements in the
caller's shape.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _c, _numbers, _options, _plan
from ._flags import Wants
from .errors import InvalidTargetError

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
    target: Tensor  # [...], N elements
    bias: Tensor | None  # [V]
    class_weight: Tensor | None  # [V]
    token_weight: Tensor | None  # [N]
    num_items: Tensor | None  # scalar; takes the place of the option
    seed: Tensor | None  # scalar int64, of thinned gradients
    scale: Tensor | None  # scalar, where its gradient is wanted; its value is the option's
    numbers: Tensor | None  # [6] float64 on the CPU; they take the place of the options _numbers.NAMES


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
    """HEADROOM_CUDA_IMPLEMENTATION: ``sm90`` or ``portable`` in place of the library's choice."""
    name = os.environ.get("HEADROOM_CUDA_IMPLEMENTATION")
    return f"cuda:{name}" if name else None


def _fields(pass_: int, inputs: Inputs, options: dict[str, Any]) -> dict[str, Any]:
    """Of Spec: sizes, dtypes and which tensors there are."""
    hidden, weight, bias = inputs.hidden, inputs.weight, inputs.bias
    return {
        "pass_": pass_,
        "reduction": _c.REDUCTIONS[options["reduction"]],
        "gradient": _c.GRADIENTS[options["gradient"]],
        "tokens": hidden.shape[0],
        "vocab": weight.shape[0],
        "hidden": hidden.shape[1],
        "hidden_dtype": CODES[hidden.dtype],
        "classifier_dtype": CODES[weight.dtype],
        "bias_dtype": _c.F32 if bias is None else CODES[bias.dtype],
        "target_dtype": CODES[inputs.target.dtype],
        "has_bias": bias is not None,
        "has_class_weight": inputs.class_weight is not None,
        "has_token_weight": inputs.token_weight is not None,
    }


def draws_size(inputs: Inputs, options: dict[str, Any], entropy: bool, argmax: bool) -> int:
    """Bytes that a forward pass keeps of its draws, from sizes alone: the tensors may be fake ones."""
    options = _numbers.joined(options, None)
    fields = options | _fields(_c.FORWARD, inputs, options)
    fields |= {"keeps_draws": True, "want_entropy": entropy, "want_argmax": argmax}
    sizes = {name: int(fields[name]) for name in ("tokens", "vocab", "hidden", "shift", "sequence_length")}
    budget = int(fields["max_workspace_bytes"])
    fields |= sizes | {"max_workspace_bytes": budget, "ignore_index": int(fields["ignore_index"]), "num_items": 0.0}
    spec = _plan.Spec(**fields)
    return plan_on(spec, inputs.hidden.device).info.draws_bytes


def plan_on(spec: _plan.Spec, device: torch.device) -> _plan.Plan:
    """The plan for tensors on a device."""
    if device.type == "cpu":
        return _plan.plan_of(spec, torch.get_num_threads())
    with torch.cuda.device(device):
        return _plan.plan_of(spec, 1, _cuda_backend(), device.index)


class Call:
    """One call of the library: collects pointers and keeps their tensors alive until it has run."""

    def __init__(self, pass_: int, inputs: Inputs, wants: Wants, options: dict[str, Any]) -> None:
        hidden, weight = _rows(inputs.hidden), _rows(inputs.weight)
        self.inputs, self.wants = inputs, wants
        self.device = hidden.device
        self.stats = stats_dtype(hidden)
        self.keep: list[Tensor] = []
        self.pointers: dict[str, Any] = {}
        self.spec: dict[str, Any] = _numbers.joined(options, inputs.numbers)
        self._give_num_items()
        if inputs.scale is not None:
            _numbers.check_learned_scale(self.spec["scale"])
        self.spec |= _fields(pass_, inputs, options) | {
            "want_d_hidden": wants.hidden or wants.scale,
            "want_d_classifier": wants.weight,
            "want_d_bias": wants.bias,
        }
        if self.device.type == "cuda":
            self.spec["unaligned_rows"] = not (_rows_are_aligned(hidden) and _rows_are_aligned(weight))
        self._give("hidden", hidden, _row_stride(hidden))
        self._give("classifier", weight, _row_stride(weight))
        self.give("targets", inputs.target)
        self.give("bias", inputs.bias)
        self.give("class_weight", inputs.class_weight)
        self.give("token_weight", inputs.token_weight)
        self.give("seed", inputs.seed)

    def _give_num_items(self) -> None:
        """An option, or a scalar to read: where only the device knows it, and of 0, which as an option is none."""
        items, given = self.spec["num_items"], self.inputs.num_items
        if given is not None and self.device.type == "cpu":
            items = _options.checked_num_items(given.item(), self.spec["reduction"])
        elif given is not None:
            self.give("num_items", given.to(self.device, self.stats))
        if items == 0:
            self.give("num_items", torch.zeros((), dtype=self.stats, device=self.device))
        self.spec["num_items"] = items or 0.0

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
        """d_hidden, d_weight, d_bias; d_weight is added to main_grad [V, D] when that is given.

        Where the gradient of scale is wanted, d_hidden is there in any case, and not rounded yet.
        """
        hidden, weight, bias = self.inputs.hidden, self.inputs.weight, self.inputs.bias
        dtype = self.stats if self.wants.scale else hidden.dtype
        self.spec["d_hidden_dtype"] = CODES[dtype]
        self.spec["d_classifier_dtype"] = CODES[weight.dtype]
        d_hidden = self.new("d_hidden", tuple(hidden.shape), dtype, self.spec["want_d_hidden"])
        into = main_grad if self.wants.weight else None
        d_weight = self.new("d_classifier", tuple(weight.shape), weight.dtype, self.wants.weight and into is None)
        if into is not None:
            if into.numel() > 0 and into.data_ptr() == weight.data_ptr():
                raise ValueError("main_grad: expected a buffer of its own, got the memory of linear_weight")
            self.spec |= {"d_classifier_dtype": CODES[into.dtype], "accumulate_d_classifier": True}
            self._give("d_classifier", into, _row_stride(into))
        if bias is None:
            return d_hidden, d_weight, hidden.new_empty((0,))
        self.spec["d_bias_dtype"] = CODES[bias.dtype]
        return d_hidden, d_weight, self.new("d_bias", tuple(bias.shape), bias.dtype, self.wants.bias)

    def new_draw_stats(self, wanted: bool) -> tuple[Tensor, Tensor]:
        """kept_count [N] int32 and draw_variance [N]."""
        shape = (self.spec["tokens"],)
        return (
            self.new("kept_count", shape, torch.int32, wanted),
            self.new("draw_variance", shape, self.stats, wanted),
        )

    def new_draws(self, kept: bool) -> Tensor:
        """What a forward pass keeps of its draws, if it does."""
        self.spec["keeps_draws"] = kept
        size = plan_on(_plan.Spec(**self.spec), self.device).info.draws_bytes if kept else 0
        return self.new("draws", (size,), torch.uint8, kept)

    def with_scale(self, gradients: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """After the run, d_hidden rounded, and the gradient of scale: a scalar, empty when it is not wanted."""
        d_hidden, d_weight, d_bias = gradients
        if not self.wants.scale:
            return *gradients, d_hidden.new_empty((0,), dtype=self.stats)
        hidden = self.inputs.hidden
        d_scale = _numbers.scale_gradient(hidden, d_hidden, self.spec["scale"])
        d_hidden = d_hidden.to(hidden.dtype) if self.wants.hidden else hidden.new_empty((0,))
        return d_hidden, d_weight, d_bias, d_scale

    def run(self) -> None:
        plan = plan_on(_plan.Spec(**self.spec), self.device)
        if self.device.type == "cpu":
            try:
                _plan.run_on_host(plan, self.pointers)
            except InvalidTargetError as error:
                message = _options.target_message(str(error), self.inputs.target.shape)
                raise InvalidTargetError(message) from None
            return
        # Workspace from PyTorch's caching allocator: freed when this returns, to be used again in stream order.
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            workspace = torch.empty(plan.info.workspace_bytes, dtype=torch.uint8, device=self.device)
            _plan.run(plan, self.pointers, workspace.data_ptr(), stream.cuda_stream)


def scale_in_place(gradient: Tensor, factor: Tensor) -> Tensor:
    """``gradient *= factor`` on a CUDA device, where only the device knows the factor; nothing is done if it is 1."""
    with torch.cuda.device(gradient.device):
        stream = torch.cuda.current_stream(gradient.device).cuda_stream
        factor = factor.to(stats_dtype(gradient))
        _plan.scale_gradient(
            gradient.data_ptr(),
            CODES[gradient.dtype],
            gradient.numel(),
            factor.data_ptr(),
            gradient.device.index,
            stream,
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
