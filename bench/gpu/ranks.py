"""Processes as the ranks of a group, for benchmarks of several GPUs."""

from __future__ import annotations

import argparse
import gc
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from harness import ratio_of
from machine import describe_machine
from record import read_json, write_json

Measure = Callable[[argparse.Namespace, str, int, float, Callable[[Any], None]], None]


def of_all(value: Any, ranks: int) -> list[Any]:
    """Gathers every rank's value on every rank."""
    import torch.distributed as dist

    values = [None] * ranks
    dist.all_gather_object(values, value)
    return values


def out_of_time(end: float, ranks: int) -> bool:
    """Returns whether any rank's time is over."""
    return bool(max(of_all(time.time(), ranks)) > end)


def in_turns(way: dict[str, Any], base: dict[str, Any] | None, which: str) -> tuple[float | None, float | None]:
    """Returns the median of the times, and of their ratios to the base's in the same rounds."""
    if not way[which]:
        return None, None
    ratio = None if base is None else ratio_of(*(dict(enumerate(each[which])) for each in (way, base)))
    return statistics.median(way[which]), ratio


def work(
    rank: int,
    asked: argparse.Namespace,
    measure: Measure,
    imports: Callable[[argparse.Namespace], None] | None,
    partial: pathlib.Path,
    end: float,
) -> None:
    # DTensor is imported before the group exists, because it would keep the group alive.
    import logitless.distributed  # noqa: F401
    import torch
    import torch.distributed as dist
    import torch.distributed.fsdp

    if imports is not None:
        imports(asked)
    device = asked.device
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    backend = "nccl" if asked.device == "cuda" else "gloo"
    store = f"file://{partial.parent}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=asked.ranks)
    measure(asked, device, rank, end, lambda record: write_json(partial, record) if rank == 0 else None)
    gc.collect()  # models in reference cycles know their groups, and gloo's threads must end before Python does
    dist.destroy_process_group()


def main(
    parser: argparse.ArgumentParser,
    measure: Measure,
    show: Callable[[dict[str, Any]], None],
    imports: Callable[[argparse.Namespace], None] | None = None,
) -> int:
    """Measures in the requested number of processes and shows the record.

    The record has the machine's facts, then the content of ``measure``'s last call of ``save``.
    """
    import torch

    asked = parser.parse_args()
    if asked.show:
        show(read_json(asked.show))
        return 0
    if asked.ranks < 2:
        parser.error(f"argument --ranks: expected 2 or more, got {asked.ranks}")
    if asked.device == "cuda" and torch.cuda.device_count() < asked.ranks:
        print(f"needs {asked.ranks} GPUs, got {torch.cuda.device_count()} (try --device cpu)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        partial, end = pathlib.Path(folder) / "record.json", time.time() + 60 * asked.minutes
        torch.multiprocessing.spawn(work, (asked, measure, imports, partial, end), nprocs=asked.ranks)
        record = {**describe_machine(asked.device), **read_json(partial)}
    if asked.json:
        write_json(asked.json, record)
    show(record)
    return 0
