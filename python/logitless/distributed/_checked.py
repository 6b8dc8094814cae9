"""What the functions of this package have in common: their group, and the shapes of what there is for each token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _options
from .._arguments import Arguments
from .._options import shape_text
from ..errors import InvalidArgumentError
from . import _agreement
from ._passes import Ranks


def checked_group(group: Any) -> Any:
    if group is None:
        group = dist.group.WORLD
    if group is None:
        raise ValueError("group: expected a process group, got None before torch.distributed.init_process_group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup, got {type(group).__name__}")
    return group


def is_whole_head(ranks: int, shard: Tensor, vocab_start: int | None, vocab_total: int | None) -> bool:
    """Of a group of one rank, whose call is that of the ordinary head."""
    return ranks == 1 and vocab_start in (None, 0) and vocab_total in (None, shard.shape[0])


@contextlib.contextmanager
def refused_for_all(group: Any) -> Iterator[None]:
    """Tells the other ranks what this one refuses; of compiled code, which is traced alone, nothing."""
    try:
        yield
    except Exception as error:
        if not torch.compiler.is_compiling():
            _agreement.refuse(group, error)
        raise


def _classes(name: str, value: Any) -> int:
    """As the operators take it: -1 for None."""
    if value is None:
        return -1
    found = _options.integer(name, value)
    if found < 0:
        raise InvalidArgumentError(f"{name}: expected a number of classes or None, got {found}")
    return found


def ranks_of(
    group: Any, vocab_start: int | None, vocab_total: int | None, sequence_parallel: bool, own_targets: bool
) -> Ranks:
    start, total = _classes("vocab_start", vocab_start), _classes("vocab_total", vocab_total)
    return Ranks(group.group_name, dist.get_world_size(group), start, total, sequence_parallel, own_targets, False)


def check_sequence_parallel(input: Tensor, sequence_parallel: Any) -> None:
    if not isinstance(sequence_parallel, bool):
        raise TypeError(f"sequence_parallel: expected a bool, got {type(sequence_parallel).__name__}")
    if sequence_parallel and input.dim() < 2:
        raise ValueError(
            f"input: expected shape [tokens, ..., D] with sequence_parallel, got {shape_text(input.shape)}"
        )


def rows_of(a: Arguments, ranks: int, sequence_parallel: bool, name: str) -> tuple[tuple[int, ...], bool]:
    """The shape of all tokens, and whether what is given for each of them is of this rank's alone. name: of the
    targets."""
    own = tuple(a.rows())
    rows = tuple(a.target.shape)
    several = a.has_several_targets()
    if several:
        _options.check_targets_shape(name, rows, rows[:-1], several)
        rows = rows[:-1]
    if not sequence_parallel:
        _options.check_targets_shape(name, a.target.shape, own, several)
        return own, False
    every = (ranks * own[0], *own[1:])
    if rows not in (own, every):
        raise ValueError(
            f"{name}: expected shape {shape_text(every)} (all ranks' tokens) or {shape_text(own)} (this rank's) with "
            f"sequence_parallel, and one more dimension with target_weight, got {shape_text(a.target.shape)}"
        )
    return every, rows == own and ranks > 1
