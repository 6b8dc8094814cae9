"""Checks of targets: the shapes and dtypes that other libraries accept, and the exceptions that they raise."""

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
    """Checks that there is one target for each row, and returns the targets with 8- and 16-bit integers as int64.

    Args:
        name: The argument's name, for messages.
        target: The targets.
        rows: The shape of the rows, which the result has.
        error: The exception for another shape.
        of_scalar: The exception for a tensor without dimensions, where it is another one.
        any_shape: Whether only the number of targets counts.
    """
    check_tensor(name, target)
    if any_shape and target.numel() == math.prod(rows):
        target = target.reshape(tuple(rows))
    if tuple(target.shape) != tuple(rows):
        raised = error if target.dim() > 0 or of_scalar is None else of_scalar
        raise raised(f"{name}: expected shape {shape_text(rows)} (one for each row), got {shape_text(target.shape)}")
    if target.dtype in _WIDENED:
        return target.long()
    check_integers(name, target)
    return target


def lists_of_ids(
    name: str, ids: Tensor, rows: Sequence[int], error: type[Exception], *, any_shape: bool = False
) -> Tensor:
    """Checks that there is a list of ids for each row, and returns the lists as ``[*rows, K]``.

    Args:
        name: The argument's name, for messages.
        ids: The lists, int32 or int64, all of one length.
        rows: The shape of the rows.
        error: The exception for another shape.
        any_shape: Whether only the number of lists counts.
    """
    check_tensor(name, ids)
    check_integers(name, ids)
    shape = (*rows, ids.shape[-1]) if ids.dim() > 0 else (*rows, 0)
    if any_shape and ids.dim() > 0 and math.prod(ids.shape[:-1]) == math.prod(rows):
        ids = ids.reshape(shape)
    if tuple(ids.shape) != shape:
        raise error(
            f"{name}: expected shape {shape_text((*rows, 'K'))} (ids for each row), got {shape_text(ids.shape)}"
        )
    return ids


def check_dtype(name: str, target: Tensor, dtypes: Sequence[torch.dtype], error: type[Exception]) -> None:
    """Raises ``error`` unless the target has one of these dtypes."""
    if target.dtype not in dtypes:
        raise error(f"{name}: expected {' or '.join(map(str, dtypes))}, got {target.dtype}")


def check_as_cross_entropy(name: str, target: Tensor, rows: Sequence[int]) -> Tensor:
    """Returns class indices as int64, one for each row; raises what ``F.cross_entropy`` raises for others."""
    count = len(rows)
    if tuple(target.shape) != tuple(rows):
        error = ValueError if tuple(target.shape[:count]) != tuple(rows) else RuntimeError
        raise error(f"{name}: expected shape {shape_text(rows)} (one for each row), got {shape_text(target.shape)}")
    check_dtype(name, target, (torch.int64, torch.uint8), RuntimeError)
    return target.long() if target.dtype == torch.uint8 else target


def check_matrix(name: str, input: Tensor, error: type[Exception]) -> None:
    if input.dim() != 2:
        raise error(f"{name}: expected shape [N, D], got {shape_text(input.shape)}")
