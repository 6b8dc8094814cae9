"""Agreement of the ranks of a group, reached before every run.

A rank that is called otherwise than the others would run other collectives, and all would wait for ever; and a rank
that takes another cut of the vocabulary for theirs would be wrong in silence. So a header goes before every run: each
rank tells all others what it is asked for and which rows it has. What a rank remembers it remembers of what all of them
said, so all of them find it or none does. Hosts tell each other (_channel.py), and no device is waited for.
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
    """What may differ from rank to rank."""

    rows: int  # of the weight
    vocab_start: int  # -1: not given
    threads: int
    unaligned: int  # 1: rows of the weight that the kernels copy, which is another plan


class Shard(NamedTuple):
    """Where a rank's rows are in the vocabulary, and what it needs to know of the others."""

    start: int
    total: int
    largest: int  # rows of the group's largest shard
    rank: int
    ranks: int

    def packed(self, seed: int = 0) -> Tensor:
        """As a forward pass saves it for its backward pass, with the seed of its draw; on the CPU."""
        return torch.tensor((*self, seed), dtype=torch.int64)

    @classmethod
    def unpacked(cls, tensor: Tensor) -> tuple[Shard, int]:
        *fields, seed = tensor.tolist()
        return cls(*fields), seed


SHARD_SIZE = len(Shard._fields) + 1  # numbers of a packed shard


class _Header(NamedTuple):
    """A rank's message to the others before every run, in integers."""

    is_refused: int = 0  # the rank's arguments, by itself
    fields: int = 0  # a digest of what all ranks have in common
    targets: int = 0  # a digest
    seed: int = 0
    rows: int = 0
    vocab_start: int = -1  # -1: not given
    threads: int = 0
    unaligned: int = 0
    remembered: int = 0  # how often a rank has looked for or kept something


class Agreed(NamedTuple):
    """The outcome of all ranks' headers."""

    shard: Shard
    seed: int
    new: Any  # None, or what is remembered when all ranks have compared their plans, too


class _Memory:
    """Shards of a rank by what all ranks of its group have said."""

    def __init__(self) -> None:
        self._shards: Cache[Any, Shard] = Cache(256)
        self.steps = 0  # the same on all ranks, or they may remember other things

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
    """data: bytes, or an object with a buffer of them."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _digest_of(targets: Tensor | None) -> int:
    """0 of those that no header compares: of a rank's own tokens, or on a device that would be waited for."""
    if targets is None or targets.device.type != "cpu":
        return 0
    targets = targets.contiguous()
    return _digest((ctypes.c_char * targets.nbytes).from_address(targets.data_ptr()) if targets.nbytes else b"")


def _headers(group: Group, mine: _Header) -> list[_Header]:
    return [_Header(*numbers) for numbers in channel_of(group).numbers(list(mine))]


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _check_same(name: str, values: Sequence[str]) -> None:
    """values: those of all ranks, as text."""
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
    """The rank's shard; the starts given, or one shard behind another. given: vocab_total."""
    rows, starts = [header.rows for header in headers], [header.vocab_start for header in headers]
    if starts[0] < 0:
        starts = [sum(rows[:index]) for index in range(len(rows))]
    total = sum(rows)
    if total == 0:
        raise InvalidArgumentError("weight: expected rows on one rank of the group at least, got none on all")
    if given is not None and given != total:
        raise InvalidArgumentError(
            f"vocab_total: expected {total}, the rows of all ranks' shards {shape_text(rows)}, got {given}"
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


def _of_all(group: Group, mine: Any, error: Exception | None, failed: str) -> list[Any]:
    """Returns what each rank sends. Raises this rank's error, or one that names the rank that failed and its error."""
    text = None if error is None else f"{type(error).__name__}: {error}"
    reports = channel_of(group).objects((mine, text))
    if error is not None:
        raise error
    for rank, (_, refusal) in enumerate(reports):
        if refusal is not None:
            raise InvalidArgumentError(f"rank {rank} of the group {failed}: {refusal}")
    return [value for value, _ in reports]


def refuse(group: Group, error: Exception) -> None:
    """Tells the other ranks, which listen, that this one's arguments are refused, and raises the error."""
    _headers(group, _Header(is_refused=1))
    _of_all(group, {}, error, "refused its arguments")


def _compare_fields(group: Group, fields: dict[str, Any]) -> None:
    """Raises where they differ."""
    every = _of_all(group, fields, None, "refused its arguments")
    for name in dict.fromkeys(name for given in every for name in given):
        _check_same(name, [repr(given.get(name)) for given in every])


def agree(
    group: Group, fields: dict[str, Any], own: RankInfo, targets: Tensor | None, targets_name: str, seed: int
) -> Agreed:
    """Raises on every rank where they differ. Of what is new, all ranks go on to compare_plans and keep.

    fields: what all ranks have in common, by the names of arguments. targets: those that all ranks have in common, too;
    None: they will.
    """
    memory = _memory_of(group)
    digest = _digest(repr(tuple(fields.items())).encode())
    mine = _Header(0, digest, _digest_of(targets), seed, *own, memory.steps)
    headers = _headers(group, mine)
    if any(header.is_refused or header.fields != digest for header in headers):
        _compare_fields(group, fields)
    _check_targets([header.targets for header in headers], targets_name)
    if fields["seed"] == "given":  # else each rank has drawn its own, and rank 0's is taken
        _check_same("seed", [str(header.seed) for header in headers])
    seed = headers[0].seed
    if len({header.remembered for header in headers}) > 1:  # one was interrupted where the others went on
        memory = _memories[group] = _Memory()
    key = (tuple(fields.items()), tuple((h.rows, h.vocab_start, h.threads, h.unaligned) for h in headers))
    shard = memory.get(key)
    if shard is not None:
        return Agreed(shard, seed, None)
    return Agreed(_placed(headers, fields["vocab_total"], dist.get_rank(group)), seed, key)


def keep(group: Group, agreed: Agreed) -> None:
    """Remembers a configuration that all ranks have plans for: plans are not compared again."""
    _memory_of(group).put(agreed.new, agreed.shard)


def compare_plans(group: Group, plan: PlanInfo | None, error: Exception | None) -> None:
    """Raises on every rank where one lacks a plan, or has one that exchanges in other steps.

    plan: of the pass that exchanges statistics; error: of this rank, in planning that pass or a later one."""
    names = ("token_chunk", "gathers")
    steps = _of_all(group, None if plan is None else [getattr(plan, name) for name in names], error, "has no plan")
    for name, values in zip(names, zip(*steps)):
        if len(set(values)) > 1:
            raise InvalidArgumentError(
                f"{name}: expected plans with the same exchanges on all ranks of the group, got {shape_text(values)}: "
                "their machines or numbers of threads differ"
            )
