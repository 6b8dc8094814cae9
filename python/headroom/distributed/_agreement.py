"""What the ranks of a group must have in common, compared once for each configuration.

A rank that is called otherwise than the others would run other collectives, and all would wait for ever. So a
configuration that is new to a rank is compared by all of them, which raise the same error where it differs. Which ranks
have one that is new is told by a header of four numbers that goes before every run on the CPU. On CUDA, where a header
would be waited for, ranks compare what is new to them, and a rank whose configuration changes alone is not noticed.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._cache import Cache
from .._options import shape_text
from .._plan import PlanInfo
from ..errors import InvalidArgumentError
from ._collectives import all_gather

Group = Any  # torch.distributed.ProcessGroup, which a PyTorch without distributed does not have


class Own(NamedTuple):
    """What may differ from rank to rank."""

    rows: int  # of the classifier
    vocab_start: int | None
    threads: int


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

    @classmethod
    def fake(cls) -> Tensor:
        """Of the size that packed() has."""
        return torch.empty(len(cls._fields) + 1, dtype=torch.int64, device="cpu")


class _Report(NamedTuple):
    """What a rank tells the others."""

    fields: dict[str, Any]
    own: Own
    targets: int
    seed: int
    error: str | None


_shards: weakref.WeakKeyDictionary[Group, Cache[Any, Shard]] = weakref.WeakKeyDictionary()


def _known(group: Group) -> Cache[Any, Shard]:
    found = _shards.get(group)
    if found is None:
        found = _shards[group] = Cache(256)
    return found


def _digest(fields: dict[str, Any]) -> int:
    text = repr(tuple(fields.items())).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _sum_of(targets: Tensor | None) -> int:
    """A number that other targets, or an other order of them, are unlikely to have."""
    if targets is None:
        return 0
    flat = targets.reshape(-1).to(torch.int64)
    places = torch.arange(1, flat.numel() + 1, dtype=torch.int64) * 0x9E3779B97F4A7C1
    return int(((flat + 1) * places).sum())


def _header(group: Group, numbers: list[int]) -> list[list[int]]:
    """Of every rank."""
    mine = torch.tensor(numbers, dtype=torch.int64)
    every = torch.empty(dist.get_world_size(group) * len(numbers), dtype=torch.int64)
    all_gather(every, mine, group=group)
    return every.view(-1, len(numbers)).tolist()


def _reports(group: Group, mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _check_fields(reports: list[_Report]) -> None:
    names = list(dict.fromkeys(name for report in reports for name in report.fields))
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, report in enumerate(reports):
            values.setdefault(repr(report.fields.get(name)), []).append(rank)
        if len(values) > 1:
            got = " and ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.items())
            raise InvalidArgumentError(f"{name}: expected the same on all ranks of the group, got {got}")


def _check_targets(targets: list[int], name: str) -> None:
    others = [rank for rank, target in enumerate(targets) if target != targets[0]]
    if others:
        raise InvalidArgumentError(
            f"{name}: expected the same on all ranks of the group, got others on {_ranks(others)} than on rank 0"
        )


def _placed(reports: list[_Report], rank: int) -> Shard:
    """The rank's shard; the starts given, or one shard behind another."""
    rows = [report.own.rows for report in reports]
    starts = [report.own.vocab_start for report in reports]
    if starts[0] is None:
        starts = [sum(rows[:index]) for index in range(len(rows))]
    total = sum(rows)
    if total == 0:
        raise InvalidArgumentError("weight_shard: expected rows on one rank of the group at least, got none on all")
    given = reports[0].fields["vocab_total"]
    if given is not None and given != total:
        raise InvalidArgumentError(
            f"vocab_total: expected {total}, the rows of all ranks' shards {shape_text(rows)}, got {given}"
        )
    end = 0
    for start, count in sorted((start, count) for start, count in zip(starts, rows) if count > 0 and start is not None):
        if start != end:
            raise InvalidArgumentError(
                f"vocab_start: expected shards that follow one another from 0 to {total}, got starts "
                f"{shape_text(starts)} of {shape_text(rows)} rows"
            )
        end = start + count
    start = starts[rank] or 0
    return Shard(min(start, total - rows[rank]), total, max(rows), rank, len(rows))


def refuse(group: Group, device: torch.device, error: Exception) -> None:
    """Tells the other ranks that this one's arguments are refused; on the CPU, where they listen."""
    if device.type == "cpu":
        _header(group, [0, 1, 0, 0])
        _reports(group, _Report({}, Own(0, None, 0), 0, 0, f"{type(error).__name__}: {error}"))


def _agreed_seed(fields: dict[str, Any], seeds: list[int]) -> int:
    """Of all ranks, which were given it; or rank 0's, where each has drawn its own."""
    if fields["seed"] == "given" and len(set(seeds)) > 1:
        got = " and ".join(f"{seed} on rank {rank}" for rank, seed in enumerate(seeds))
        raise InvalidArgumentError(f"seed: expected the same on all ranks of the group, got {got}")
    return seeds[0]


def shard_of(
    group: Group,
    device: torch.device,
    fields: dict[str, Any],
    own: Own,
    targets: Tensor | None,
    targets_name: str,
    seed: int,
) -> tuple[Shard, bool, int]:
    """The rank's shard; whether the configuration is new: then all ranks have compared it, and go on to compare_plans
    and keep; and the seed of all.

    fields: what all ranks have in common, by the names of arguments. targets: those that all ranks have in common, too;
    None: they will.
    """
    found = _known(group).get(_key(fields, own))
    checksum = 0
    if device.type == "cpu":
        checksum = _sum_of(targets)
        headers = _header(group, [_digest(fields), found is None, checksum, seed])
        if not any(header[1] for header in headers) and len({header[0] for header in headers}) == 1:
            _check_targets([header[2] for header in headers], targets_name)
            assert found is not None
            return found, False, _agreed_seed(fields, [header[3] for header in headers])
    elif found is not None:
        return found, False, seed
    reports = _reports(group, _Report(fields, own, checksum, seed, None))
    for rank, report in enumerate(reports):
        if report.error is not None:
            raise InvalidArgumentError(f"rank {rank} of the group refused its arguments: {report.error}")
    _check_fields(reports)
    _check_targets([report.targets for report in reports], targets_name)
    agreed = _agreed_seed(fields, [report.seed for report in reports])
    return _placed(reports, dist.get_rank(group)), True, agreed


def _key(fields: dict[str, Any], own: Own) -> Any:
    return tuple(fields.items()), own


def keep(group: Group, fields: dict[str, Any], own: Own, shard: Shard) -> None:
    """Of a configuration that all ranks have plans for: it is not compared again."""
    _known(group).put(_key(fields, own), shard)


def compare_plans(group: Group, plan: PlanInfo | None, error: Exception | None) -> None:
    """Raises on every rank where one lacks a plan, or has one that exchanges in other steps.

    plan: of the pass that exchanges statistics; error: of this rank, in planning that pass or a later one."""
    steps = None if plan is None else {"token_chunk": plan.token_chunk, "gathers": plan.gathers}
    reports = _reports(group, (steps, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(reports):
        if message is not None:
            raise InvalidArgumentError(f"rank {rank} of the group has no plan: {message}")
    for name in ("token_chunk", "gathers"):
        found = [steps[name] for steps, _ in reports]
        if len(set(found)) > 1:
            raise InvalidArgumentError(
                f"{name}: expected plans with the same exchanges on all ranks of the group, got {shape_text(found)}: "
                "their machines or numbers of threads differ"
            )
