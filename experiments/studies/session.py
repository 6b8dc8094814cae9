"""One call of a study: its time, its device, and cells that are measured once."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import pathlib
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from clock import Clock
from limits import Deadline, StepTimeout, step_limit
from step_rounds import fewer_configurations
from studies.record import Cell, StudyRecord, plain
from timing import describe


@dataclasses.dataclass(frozen=True)
class Options:
    """Of the command line, for the studies that know them."""

    device: str = "cuda"
    data: pathlib.Path | None = None  # what prepare wrote
    checkpoints: pathlib.Path | None = None  # of models in training; default: beside the data
    heads: tuple[str, ...] = ()  # empty: the study's own
    models: tuple[str, ...] = ()
    part: tuple[int, int] = (1, 1)  # the first of one
    tune: int | None = 2  # configurations that Triton tries of each kernel of flash-linear-attention's layers
    rounds: int = 5
    cap_gib: float = 80e9 / 2**30  # of the allocator, where the largest batch is looked for
    tiny: bool = False  # a try-out on the CPU


class Session:
    def __init__(self, record: StudyRecord, options: Options, seconds: float) -> None:
        self.record, self.options = record, options
        self.deadline = Deadline(time.monotonic(), seconds)
        self.clock = Clock(options.device)
        self.left_out: list[str] = []

    @property
    def cuda(self) -> bool:
        return self.clock.cuda

    def cell(
        self,
        key: str,
        work: Callable[[], Cell],
        most: float = float("inf"),
        least: float = 0.0,
        settings: dict[str, Any] | None = None,
    ) -> Cell | None:
        """What is in the record, or what ``work`` finds within ``most`` seconds; None where it was not measured. It is
        not begun when less than ``least`` seconds are left, which is about what it needs; a try-out needs none. Raises
        SettingsDiffer where the record has it with other ``settings``."""
        self.record.check(key, settings or {})
        if self.record.final(key):
            return self.record.ok(key)
        left = min(most, self.deadline.left())
        if left <= (0.0 if self.options.tiny else least):
            self.left_out.append(f"{key} (needs {least:.0f} s)" if left > 0 else key)
            return None
        start = time.monotonic()
        try:
            with step_limit(left):
                cell: Cell = {"status": "ok"} | work()
        except StepTimeout as error:
            cell = {"status": "cut off", "reason": str(error)}
        except torch.OutOfMemoryError as error:
            cell = {"status": "out of memory", "reason": describe(error)}
        except ImportError as error:
            cell = {"status": "not installed", "reason": describe(error)}
        except Exception as error:
            traceback.print_exc()
            cell = {"status": "failed", "reason": describe(error)}
        cell["seconds"] = round(time.monotonic() - start, 1)
        self.clock.release()
        before = self.record.holds(key)  # of an earlier call, or of the work, which may end after its result
        if before is not None and poorer(cell, before):
            self.record.keep(key, f"{cell['status']}: {cell.get('reason', '')}")
        else:
            self.record.put(key, cell | ({"settings": plain(settings)} if settings else {}))
        print(f"{key}: {cell['status']} {cell.get('reason', '')} ({cell['seconds']:.1f} s)", flush=True)
        return self.record.ok(key)

    @contextlib.contextmanager
    def tuning(self) -> Iterator[None]:
        """Inside, Triton's autotuners try few configurations. Heads are prepared outside, with all of theirs."""
        has_triton = importlib.util.find_spec("triton") is not None
        with fewer_configurations(self.options.tune if has_triton else None):
            yield


def poorer(cell: Cell, before: Cell) -> bool:
    """Has another try of a cell that was measured in part less than that?"""
    if cell["status"] == "ok":
        return False
    good, had = (sum(row["status"] == "ok" for row in one.get("rows", [])) for one in (cell, before))
    return cell["status"] != "partial" or good < had
