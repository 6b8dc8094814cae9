"""Targets in the shapes and dtypes that other libraries take, and the exceptions that they raise of others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..call import check_integers, check_tensor
from ..options import shape_text

_WIDENED = (torch.uint8, torch.int8, torch.int16)


def indices(
    name: str,
    target: Tensor,
    rows: Sequence[int],
    error: type[Exception],
    *,
    of_scalar: type[Exception] | None = None,
    any_shape: bool = False,
) -> Tensor:
    """One target for each of these rows, in their shape; small integers as int64.

    error: of other shapes; of_scalar: of no dimension, where that is another one; any_shape: only their number counts.
    """
    check_tensor(name, target)
    if any_shape and target.numel() == math.prod(rows):
        target = target.reshape(tuple(rows))
    if tuple(target.shape) != tuple(rows):
        raised = error if target.dim() > 0 or of_scalar is None else of_scalar
        raise raised(f"{name}: expected shape {shape_text(rows)}, one for each row, got {shape_text(target.shape)}")
    if target.dtype in _WIDENED:
        return target.long()
    check_integers(name, target)
    return target


def check_dtype(name: str, target: Tensor, dtypes: Sequence[torch.dtype], error: type[Exception]) -> None:
    """For a library that takes these dtypes alone."""
    if target.dtype not in dtypes:
        raise error(f"{name}: expected {' or '.join(map(str, dtypes))}, got {target.dtype}")


def check_as_cross_entropy(name: str, target: Tensor, rows: Sequence[int]) -> Tensor:
    """Class indices that ``F.cross_entropy`` takes, one for each row, as int64; refused with its types."""
    count = len(rows)
    if tuple(target.shape) != tuple(rows):
        error = ValueError if tuple(target.shape[:count]) != tuple(rows) else RuntimeError
        raise error(f"{name}: expected shape {shape_text(rows)}, one for each row, got {shape_text(target.shape)}")
    check_dtype(name, target, (torch.int64, torch.uint8), RuntimeError)
    return target.long() if target.dtype == torch.uint8 else target


def check_matrix(name: str, input: Tensor, error: type[Exception]) -> None:
    if input.dim() != 2:
        raise error(f"{name}: expected shape [N, D], got {shape_text(input.shape)}")
