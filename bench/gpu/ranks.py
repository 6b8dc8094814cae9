"""Processes as the ranks of a group, for the benchmarks of several GPUs."""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from machine import describe_machine


def of_all(value: Any, ranks: int) -> list[Any]:
    """Every rank's value, on every rank."""
    import torch.distributed as dist

    found = [None] * ranks
    dist.all_gather_object(found, value)
    return found


def record_of(
    work: Callable[..., None], asked: argparse.Namespace, ranks: int, device: str, *more: Any
) -> dict[str, Any]:
    """Runs work(rank, asked, init_method, *more) in each of the processes. The record is what rank 0 has written to
    asked.partial, behind the facts of the machine; it is written to asked.json where that is given."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        asked.partial = pathlib.Path(folder) / "record.json"
        torch.multiprocessing.spawn(work, (asked, f"file://{folder}/store", *more), nprocs=ranks)
        record = {**describe_machine(device), **json.loads(asked.partial.read_text())}
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n")
    return record
