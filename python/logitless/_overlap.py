"""Whether a buffer that gradients are added to has memory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ._torch import Inputs

_ARGUMENTS = {  # of Inputs whose names are others for the caller
    "hidden": "input",
    "weight": "linear_weight",
    "bias": "linear_bias",
    "class_weight": "weight",
    "row_temperature": "temperature",
}


class _Region(NamedTuple):
    """Pieces of memory of the same width, by addresses; exact: without gaps that are counted in."""

    start: int
    width: int
    stride: int
    pieces: int
    exact: bool

    def end(self) -> int:
        return self.start + self.stride * (self.pieces - 1) + self.width


def _region(tensor: Tensor) -> _Region | None:
    """None of a tensor without memory."""
    start, size = tensor.data_ptr(), tensor.element_size()
    if start == 0 or tensor.numel() == 0:
        return None
    width, apart = size, list[tuple[int, int]]()
    for stride, count in sorted((stride * size, count) for stride, count in zip(tensor.stride(), tensor.shape)):
        if count == 1 or stride == 0:
            continue
        if stride <= width and not apart:
            width += stride * (count - 1)
        else:
            apart.append((stride, count))
    for stride, count in apart[:-1]:
        width += stride * (count - 1)
    stride, count = apart[-1] if apart else (width, 1)
    return _Region(start, width, stride, count, len(apart) <= 1)


def _meet(a: _Region, b: _Region) -> bool:
    if a.end() <= b.start or b.end() <= a.start:
        return False
    few, many = (a, b) if a.pieces <= b.pieces else (b, a)
    # The first and the last piece of the many that each piece of the few could share bytes with.
    starts = few.start - many.start + few.stride * torch.arange(few.pieces, device="cpu")
    first = torch.div(starts - many.width, many.stride, rounding_mode="floor") + 1
    last = torch.div(starts + few.width - 1, many.stride, rounding_mode="floor")
    return bool((first.clamp(min=0) <= last.clamp(max=many.pieces - 1)).any())


def check_own_memory(
    main_grad: Tensor,
    inputs: Inputs,
    saved: Mapping[str, Tensor | None] = MappingProxyType({}),
    weight_name: str = "linear_weight",
) -> None:
    """Refuses a main_grad that shares bytes with what the backward pass reads. weight_name: of the weight."""
    own = _region(main_grad)
    if own is None:
        return
    for name, tensor in (inputs._asdict() | dict(saved)).items():
        other = None if tensor is None else _region(tensor)
        if other is not None and _meet(own, other):
            argument = weight_name if name == "weight" else _ARGUMENTS.get(name, name)
            where = "that shares memory with" if other.exact else "in or between the memory of"
            raise ValueError(f"main_grad: expected a buffer of its own, got one {where} {argument}")
