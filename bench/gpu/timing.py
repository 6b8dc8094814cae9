"""Times of all methods at one shape, interleaved with the bare products: a round runs everything, in random order."""

from __future__ import annotations

import functools
import random
import statistics
from typing import Any

import torch

from clock import MIB, Call, Clock
from data import Inputs
from harness import describe, ratio_of, tried
from limits import Deadline
from methods import Method, differentiate, seen_plan
from record import Gemms, Record, Row
from shapes import Shape

GEMMS = ("logits", "d_hidden", "d_weight")
LEAST_ROUNDS = 3


class Cell:
    """One timed call: a bare product (no row), a pass of a method, or a step with a head."""

    def __init__(self, name: str, call: Call, row: Any = None, milliseconds: float = 0.0) -> None:
        self.name, self.call, self.row, self.milliseconds = name, call, row, milliseconds
        self.times: dict[int, float] = {}  # by round


def pass_call(method: Method, inputs: Inputs, pass_: str) -> Call:
    """Returns a call of the loss alone without gradients, or of forward and backward with fresh gradients."""
    if pass_ == "loss":

        def forward() -> None:
            with torch.no_grad():
                method.outputs(pass_, *inputs)

        return forward
    leaves, upstream = inputs.leaves(), inputs.upstream(pass_)

    def both() -> None:
        leaves.hidden.grad = leaves.weight.grad = None
        differentiate(method.outputs(pass_, *leaves), upstream)
        leaves.hidden.grad = leaves.weight.grad = None

    return both


def gemm_cells(inputs: Inputs) -> list[Cell]:
    """Returns the three products on whole matrices, bf16 in and out; dz is a real softmax in bf16.

    V and D are rounded up to multiples of 64: a user would pad the head like this.
    """
    more_vocab, more_hidden = (-size % 64 for size in inputs.weight.shape)
    hidden = torch.nn.functional.pad(inputs.hidden, (0, more_hidden))
    weight = torch.nn.functional.pad(inputs.weight, (0, more_hidden, 0, more_vocab))
    logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    dz = torch.empty_like(logits)
    for part, out in zip(hidden.split(512), dz.split(512)):
        out.copy_(torch.softmax((part @ weight.T).float(), dim=1))
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
    return [
        Cell("logits", lambda: torch.mm(hidden, weight.T, out=logits)),
        Cell("d_hidden", lambda: torch.mm(dz, weight, out=d_hidden)),
        Cell("d_weight", lambda: torch.mm(dz.T, hidden, out=d_weight)),
    ]


class ShapeTiming:
    """All cells of one shape."""

    def __init__(self, record: Record, clock: Clock, shape: Shape, inputs: Inputs, data: str = "std1") -> None:
        self.record, self.clock, self.shape, self.inputs, self.data = record, clock, shape, inputs, data
        self.cells: list[Cell] = []
        record.gemms[shape.name] = Gemms(shape.name)
        try:
            self.cells = gemm_cells(inputs)
            for cell in self.cells:
                cell.call()
                cell.milliseconds = clock.burst_ms(cell.call)
        except torch.OutOfMemoryError as error:
            self.cells = []
            record.note(f"{shape.name}: the bare products do not fit, so there are no ratios: {describe(error)}")
            clock.release()

    def add(self, method: Method, limit_seconds: float) -> None:
        """Prepares a method's passes (warm-up, peak memory). The method's row records any failure."""
        for pass_ in method.passes:
            row = Row(self.shape.name, method.name, pass_, method.ours, method.budget_mib, method.threshold, self.data)
            row.gradient_mib = 0.0 if pass_ == "loss" else self.shape.gradient_bytes / MIB
            self.record.rows.append(row)
            if not tried(row, limit_seconds, functools.partial(self._prepare, method, row)):
                print(f"  {method.name} ({pass_}) {row.status}: {row.reason}", flush=True)
                self.clock.release()
            self.record.save()

    def _prepare(self, method: Method, row: Row) -> None:
        call = pass_call(method, self.inputs, row.pass_)
        with seen_plan(method) as plans:
            call()
        row.plan = "".join(plans) or method.logits
        peak = self.clock.peak_bytes(call)
        row.extra_mib = None if peak is None else peak / MIB
        milliseconds = self.clock.burst_ms(call)
        self.cells.append(Cell(f"{row.method} {row.pass_}", call, row, milliseconds))

    def run(self, rounds: int, deadline: Deadline) -> None:
        """Runs rounds after idle, then steady ones, each within half of the time left."""
        for mode, one_round, parts in (("burst", self._burst, 2), ("sustained", self._sustained, 1)):
            part, order = deadline.share(parts), random.Random(0)
            self._drop_what_does_not_fit(part)
            for cell in self.cells:
                cell.times = {}
            if mode == "sustained":
                self._warm_chip()
            for index in range(rounds):
                if index >= LEAST_ROUNDS and part.left() < self._round_seconds():
                    break
                one_round(index, order.sample(self.cells, len(self.cells)))
            self._summarize(mode)
            self.record.save()

    def _round_seconds(self) -> float:
        return sum(1.1 * cell.milliseconds / 1e3 + self.clock.idle_seconds + 0.003 for cell in self.cells)

    def _drop_what_does_not_fit(self, part: Deadline) -> None:
        """Drops the slowest peers first; bare products and our own methods stay."""
        peers = [cell for cell in self.cells if cell.row is not None and not cell.row.ours]
        for cell in sorted(peers, key=lambda cell: -cell.milliseconds):
            if LEAST_ROUNDS * self._round_seconds() <= part.left():
                return
            self._remove(cell, "skipped", "no time left for its rounds")

    def _remove(self, cell: Cell, status: str, reason: str) -> None:
        self.cells.remove(cell)
        if cell.row is None:
            self.record.note(f"{self.shape.name}: bare product {cell.name} {status}: {reason}")
        elif not cell.row.rounds:
            cell.row.status, cell.row.reason = status, reason
        else:
            cell.row.reason = f"steady figure {status}: {reason}"

    def _warm_chip(self, seconds: float = 0.5) -> None:
        """Runs bare products until the chip is at its power limit, as in the middle of training."""
        bare = [cell for cell in self.cells if cell.row is None]
        repeats = int(seconds * 1e3 / max(sum(cell.milliseconds for cell in bare), 1e-3)) if self.clock.cuda else 0
        for _ in range(repeats):
            for cell in bare:
                cell.call()

    def _burst(self, index: int, cells: list[Cell]) -> None:
        for cell in cells:
            try:
                cell.times[index] = self.clock.burst_ms(cell.call)
            except Exception as error:
                self.clock.release()
                self._remove(cell, "failed", describe(error))

    def _sustained(self, index: int, cells: list[Cell]) -> None:
        try:
            for cell, time in zip(cells, self.clock.back_to_back_ms([cell.call for cell in cells])):
                cell.times[index] = time
        except Exception as error:
            self.record.note(f"{self.shape.name}: a steady round failed and is left out: {describe(error)}")
            self.clock.release()

    def _bare(self, row: Row) -> list[Cell]:
        """Returns the products that a pass needs, or none if one of them has no times."""
        wanted = GEMMS[:1] if row.pass_ == "loss" else GEMMS
        cells = [cell for cell in self.cells if cell.row is None and cell.name in wanted]
        return cells if len(cells) == len(wanted) else []

    def _summarize(self, mode: str) -> None:
        for cell in (cell for cell in self.cells if cell.times):
            time, row = statistics.median(cell.times.values()), cell.row
            if row is None:
                getattr(self.record.gemms[self.shape.name], mode)[cell.name] = time
                continue
            setattr(row, f"{mode}_ms", time)
            setattr(row, f"{mode}_ratio", ratio_of(cell.times, *(bare.times for bare in self._bare(row))))
            row.rounds = max(row.rounds, len(cell.times))
