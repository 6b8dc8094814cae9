"""Tensors of a problem, and what a pass over them returns. Runs are in _run.py.

Shapes, everywhere below the public functions: hidden [N, D], weight [V, D], bias [V], target of N elements in the
caller's shape, or of N x K with a target_weight [N, K].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _c, _dtypes, _numbers, _options, _stats
from ._flags import Flags

CODES: dict[torch.dtype, int] = {getattr(torch, dtype.name): dtype.code for dtype in _dtypes.ALL}
DTYPES = {code: dtype for dtype, code in CODES.items()}


def torch_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """torch.bfloat16 of "bf16" or "bfloat16"; what is no text as it is."""
    return DTYPES[_dtypes.float_code("dtype", dtype)] if isinstance(dtype, str) else dtype


class Inputs(NamedTuple):
    """The tensors of one problem; vectors of rows and classes have stats_dtype."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    target: Tensor  # [...], N elements, or with target_weight N x K
    bias: Tensor | None  # [V]
    class_weight: Tensor | None  # [V]
    token_weight: Tensor | None  # [N]
    row_temperature: Tensor | None  # [N]
    target_weight: Tensor | None  # [N, K], always where rows have several targets
    num_items: Tensor | None  # scalar; takes the place of the option
    seed: Tensor | None  # scalar int64, of thinned gradients
    # Scalars, where their gradients are wanted; their values are the options'.
    scale: Tensor | None
    temperature: Tensor | None
    numbers: Tensor | None  # [7] float64 on the CPU; they take the place of the options _numbers.NAMES


def stats_dtype(hidden: Tensor) -> torch.dtype:
    """dtype of losses, statistics and weights of rows and classes."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


class Result(NamedTuple):
    """A tensor that a pass returns; of shape [0] where it is not wanted."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wanted: bool = True


def _result(shape: tuple[int, ...], dtype: torch.dtype, wanted: bool) -> Result:
    return Result(shape if wanted else (0,), dtype, wanted)


LOSSES = ("loss", *_stats.OF_ROWS, "counts")
GRADIENTS = ("d_hidden", "d_classifier", "d_bias", "d_scale", "d_temperature")
RESULTS = {
    _c.FORWARD: (*LOSSES, "lse_low", "draws"),
    _c.BACKWARD: GRADIENTS,
    _c.FORWARD_BACKWARD: (*LOSSES, *_stats.DRAW_STATS, *GRADIENTS),
}


def _dtype(statistic: _stats.Statistic, stats: torch.dtype) -> torch.dtype:
    return getattr(torch, statistic.dtype) if statistic.dtype else stats


def results(pass_: int, inputs: Inputs, reduction: str, flags: Flags, draws_bytes: int) -> dict[str, Result]:
    """What a pass returns, in the order of RESULTS. counts holds correct and valid rows, the former 0 without argmax.

    The gradient of the weight is not wanted where it is added to main_grad, but that is not known here.
    """
    hidden, weight, bias = inputs[0], inputs[1], inputs[3]
    rows, stats = (hidden.shape[0],), stats_dtype(hidden)
    every = {
        "loss": Result(rows if reduction == "none" else (), stats),
        **{s.name: _result(rows, _dtype(s, stats), s.name in flags.stats) for s in _stats.ALL},
        "counts": _result((2,), torch.int64, flags.want_counts),
        "lse_low": _result(rows, stats, "lse" in flags.stats),
        "draws": _result((draws_bytes,), torch.uint8, flags.keeps_draws),
        "kept_count": _result(rows, torch.int32, flags.want_draw_stats),
        "draw_variance": _result(rows, stats, flags.want_draw_stats),
        "d_hidden": _result(hidden.shape, hidden.dtype, flags.want_d_hidden),
        "d_classifier": _result(weight.shape, weight.dtype, flags.want_d_weight),
        "d_bias": _result(weight.shape[:1], hidden.dtype if bias is None else bias.dtype, flags.want_d_bias),
        "d_scale": _result((), stats, flags.want_d_scale),
        "d_temperature": _result((), stats, flags.want_d_temperature),
    }
    return {name: every[name] for name in RESULTS[pass_]}


_READ = (  # by Inputs' order
    "hidden",
    "classifier",
    "targets",
    "bias",
    "class_weight",
    "token_weight",
    "temperature",
    "target_weight",
)


def read_as_they_are(inputs: Inputs, tensors: dict[str, Tensor]) -> tuple[str, ...] | None:
    """The names of tensors that readable() returned, if they are the first of inputs themselves."""
    names = tuple(tensors)
    same = names == _READ[: len(names)] and all(tensors[name] is given for name, given in zip(names, inputs))
    return names if same else None


def rows(matrix: Tensor) -> Tensor:
    """The matrix itself when its rows are contiguous and do not overlap, whatever their stride."""
    if matrix.is_contiguous():
        return matrix
    count, columns = matrix.shape
    contiguous_rows = columns == 1 or matrix.stride(1) == 1
    if contiguous_rows and (count <= 1 or matrix.stride(0) >= columns):
        return matrix
    return matrix.contiguous()


def row_stride(matrix: Tensor) -> int:
    return matrix.stride(0) if matrix.shape[0] > 1 else 0


def rows_are_aligned(matrix: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes, as far as rows are that long."""
    size = matrix.element_size()
    if matrix.shape[1] * size % 16 != 0:
        return True  # rows of such a length are copied anyway
    return matrix.data_ptr() % 16 == 0 and (matrix.shape[0] <= 1 or matrix.stride(0) * size % 16 == 0)


def are_unaligned(hidden: Tensor, weight: Tensor) -> bool:
    """logitless_problem.unaligned_rows"""
    return hidden.is_cuda and not (rows_are_aligned(hidden) and rows_are_aligned(weight))


def contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def resolved(inputs: Inputs, options: dict[str, Any]) -> dict[str, Any]:
    """The operators' options with their numbers by name: those that tensors on the CPU hold, too."""
    found = _numbers.joined(options, inputs.numbers)
    if inputs.num_items is not None and inputs.hidden.device.type == "cpu":
        found["num_items"] = _options.checked_num_items(inputs.num_items.item(), found["reduction"])
    if inputs.scale is not None:
        _numbers.check_learned_scale(found["scale"])
    if inputs.temperature is not None:
        _numbers.check_learned_temperature(found["softcap"])
    return found


def readable(inputs: Inputs, num_items: float | None) -> dict[str, Tensor]:
    """The tensors by the library's names, in layouts that it reads. num_items: the resolved option."""
    hidden = inputs.hidden
    found = {"hidden": rows(hidden), "classifier": rows(inputs.weight), "targets": contiguous(inputs.target)}
    if inputs.bias is not None:
        found["bias"] = contiguous(inputs.bias)
    if inputs.class_weight is not None:
        found["class_weight"] = contiguous(inputs.class_weight)
    if inputs.token_weight is not None:
        found["token_weight"] = contiguous(inputs.token_weight)
    if inputs.row_temperature is not None:
        found["temperature"] = contiguous(inputs.row_temperature)
    if inputs.target_weight is not None:
        found["target_weight"] = contiguous(inputs.target_weight)
    if inputs.seed is not None:
        found["seed"] = inputs.seed
    if num_items == 0:  # as an option, 0 is none
        found["num_items"] = torch.zeros((), dtype=stats_dtype(hidden), device=hidden.device)
    elif inputs.num_items is not None and num_items is None:  # which only the device knows
        found["num_items"] = inputs.num_items.to(hidden.device, stats_dtype(hidden))
    return found
