"""Agreement of the ranks of a group before every run.

If ranks were called differently, they would run different collectives and wait for ever. If a rank assumed a different
cut of the vocabulary, its results would be wrong in silence. So before every run each rank sends a header with its call
and its rows to all others. A rank remembers a configuration by the headers of all ranks, so either all of them find it
or none does. Hosts exchange headers (_channel.py) without waiting for a device.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidArgumentError
from ..native import Cache, PlanInfo
from ..options import shape_text
from ._channel import Group, channel_of


class RankInfo(NamedTuple):
    """Properties that may differ from rank to rank."""

    rows: int  # rows of the weight
    vocab_start: int  # -1: not given
    threads: int
    unaligned: int  # 1: the kernels copy rows of the weight, which needs another plan


class Shard(NamedTuple):
    """The place of a rank's rows in the vocabulary, and sizes of the group."""

    start: int
    total: int
    largest: int  # rows of the group's largest shard
    rank: int
    ranks: int

    def packed(self, seed: int = 0) -> Tensor:
        """Returns a tensor on the CPU that a forward pass saves, with the seed of its draw."""
        return torch.tensor((*self, seed), dtype=torch.int64)

    @classmethod
    def unpacked(cls, tensor: Tensor) -> tuple[Shard, int]:
        *fields, seed = tensor.tolist()
        return cls(*fields), seed


SHARD_SIZE = len(Shard._fields) + 1  # elements of a packed shard


class _Header(NamedTuple):
    """A rank's message to the others before every run, in integers."""

    is_refused: int = 0  # 1: the rank's own checks failed
    fields: int = 0  # digest of the properties that must be the same on all ranks
    targets: int = 0  # digest of the targets
    seed: int = 0
    rows: int = 0
    vocab_start: int = -1  # -1: not given
    threads: int = 0
    unaligned: int = 0
    remembered: int = 0  # how often the rank has looked up or kept a shard


class Agreed(NamedTuple):
    """The result of comparing all ranks' headers."""

    shard: Shard
    seed: int
    new: Any  # None, or the key to remember once all ranks have compared their plans


class _Memory:
    """A rank's shards, by the headers of all ranks of its group."""

    def __init__(self) -> None:
        self._shards: Cache[Any, Shard] = Cache(256)
        self.steps = 0  # equal on all ranks, else they may remember different shards

    def get(self, key: Any) -> Shard | None:
        self.steps += 1
        return self._shards.get(key)

    def put(self, key: Any, shard: Shard) -> None:
        self.steps += 1
        self._shards.put(key, shard)


_memories: weakref.WeakKeyDictionary[Group, _Memory] = weakref.WeakKeyDictionary()


def _memory_of(group: Group) -> _Memory:
    memory = _memories.get(group)
    if memory is None:
        memory = _memories[group] = _Memory()
    return memory


def _digest(data: Any) -> int:
    """Returns 64 bits. data: bytes, or an object with a buffer."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _digest_of(targets: Tensor | None) -> int:
    """Returns 0 for targets that headers do not compare: a rank's own, or those on a device, to avoid waiting."""
    if targets is None or targets.device.type != "cpu":
        return 0
    targets = targets.contiguous()
    return _digest((ctypes.c_char * targets.nbytes).from_address(targets.data_ptr()) if targets.nbytes else b"")


def _headers(group: Group, mine: _Header) -> list[_Header]:
    return [_Header(*numbers) for numbers in channel_of(group).numbers(list(mine))]


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _check_same(name: str, values: Sequence[str]) -> None:
    """Raises if ranks differ. values: those of all ranks, as text."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) > 1:
        got = " and ".join(f"{value} on {_ranks(of)}" for value, of in ranks.items())
        raise InvalidArgumentError(f"{name}: expected the same on all ranks of the group, got {got}")


def _check_targets(targets: list[int], name: str) -> None:
    others = [rank for rank, target in enumerate(targets) if target != targets[0]]
    if others:
        raise InvalidArgumentError(
            f"{name}: expected the same on all ranks of the group, got others on {_ranks(others)} than on rank 0"
        )


def _placed(headers: list[_Header], given: int | None, rank: int) -> Shard:
    """Returns the rank's shard. Without given starts, shards follow one another in the order of ranks.

    given: vocab_total.
    """
    rows, starts = [header.rows for header in headers], [header.vocab_start for header in headers]
    if starts[0] < 0:
        starts = [sum(rows[:index]) for index in range(len(rows))]
    total = sum(rows)
    if total == 0:
        raise InvalidArgumentError("weight: expected rows on one rank of the group at least, got none on all")
    if given is not None and given != total:
        raise InvalidArgumentError(
            f"vocab_total: expected {total} (the rows of all ranks' shards, {shape_text(rows)}), got {given}"
        )
    end = 0
    for start, count in sorted((start, count) for start, count in zip(starts, rows) if count > 0):
        if start != end:
            raise InvalidArgumentError(
                f"vocab_start: expected shards that follow one another from 0 to {total}, got starts "
                f"{shape_text(starts)} of {shape_text(rows)} rows"
            )
        end = start + count
    return Shard(min(starts[rank], total - rows[rank]), total, max(rows), rank, len(rows))


def of_all(group: Group, mine: Any, error: Exception | None, failed: str) -> list[Any]:
    """Returns each rank's data. Raises this rank's error, or an error with the failed rank and its message."""
    text = None if error is None else f"{type(error).__name__}: {error}"
    reports = channel_of(group).objects((mine, text))
    if error is not None:
        raise error
    for rank, (_, refusal) in enumerate(reports):
        if refusal is not None:
            raise InvalidArgumentError(f"rank {rank} of the group {failed}: {refusal}")
    return [value for value, _ in reports]


def refuse(group: Group, error: Exception) -> None:
    """Reports this rank's error to the other ranks, which wait for its header, and raises it."""
    _headers(group, _Header(is_refused=1))
    of_all(group, {}, error, "refused its arguments")


def _compare_fields(group: Group, fields: dict[str, Any]) -> None:
    """Raises if fields differ between ranks."""
    every = of_all(group, fields, None, "refused its arguments")
    for name in dict.fromkeys(name for given in every for name in given):
        _check_same(name, [repr(given.get(name)) for given in every])


def agree(
    group: Group, fields: dict[str, Any], own: RankInfo, targets: Tensor | None, targets_name: str, seed: int
) -> Agreed:
    """Compares the calls of all ranks, and raises on every rank if they differ.

    If the result is new, all ranks go on to compare_plans() and keep().

    fields: properties that must be the same on all ranks, by the names of arguments. targets: those that all ranks
    share; None: each rank has its own.
    """
    memory = _memory_of(group)
    digest = _digest(repr(tuple(fields.items())).encode())
    mine = _Header(0, digest, _digest_of(targets), seed, *own, memory.steps)
    headers = _headers(group, mine)
    if any(header.is_refused or header.fields != digest for header in headers):
        _compare_fields(group, fields)
    _check_targets([header.targets for header in headers], targets_name)
    if fields["seed"] == "given":  # else each rank has drawn one, and all use rank 0's
        _check_same("seed", [str(header.seed) for header in headers])
    seed = headers[0].seed
    if len({header.remembered for header in headers}) > 1:  # a rank was interrupted while the others went on
        memory = _memories[group] = _Memory()
    key = (tuple(fields.items()), tuple((h.rows, h.vocab_start, h.threads, h.unaligned) for h in headers))
    shard = memory.get(key)
    if shard is not None:
        return Agreed(shard, seed, None)
    return Agreed(_placed(headers, fields["vocab_total"], dist.get_rank(group)), seed, key)


def keep(group: Group, agreed: Agreed) -> None:
    """Remembers a configuration for which all ranks have plans, so plans are not compared again."""
    _memory_of(group).put(agreed.new, agreed.shard)


def compare_plans(group: Group, plan: PlanInfo | None, error: Exception | None) -> None:
    """Raises on every rank if a rank lacks a plan, or if their plans exchange in different steps.

    plan: the plan of the pass that exchanges statistics. error: this rank's error in planning that or a later pass.
    """
    names = ("token_chunk", "gathers")
    steps = of_all(group, None if plan is None else [getattr(plan, name) for name in names], error, "has no plan")
    for name, values in zip(names, zip(*steps)):
        if len(set(values)) > 1:
            raise InvalidArgumentError(
                f"{name}: expected plans with the same exchanges on all ranks of the group, got {shape_text(values)}: "
                "their machines or numbers of threads differ"
            )
