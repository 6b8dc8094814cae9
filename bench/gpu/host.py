"""Host time of small heads: what a call takes to queue, beside what it takes on the device.

    python bench/gpu/host.py [--shapes 256x32768x1024,2048x32000x768] [--peers canonical,torch-compile]
        [--minutes 1.8] [--json out.json]

Host time: microseconds until the call returns and all of its work is queued, the median over blocks of calls; the
device is waited for outside of the blocks. Back to back: milliseconds a call of many calls in a row, between two
events: the larger of host's and device's time. Calls are forward and backward, or the loss alone; all of them are
interleaved. A new N: host time of a call with a number of rows that was never seen, beyond that of a call with a known
one. Parts of a call: of the first shape, in blocks of six calls, the whole call and logitless_run in it, with runs that
come again played from recordings and without; and the planning of a new N.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable

START = time.monotonic()
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
if os.environ.get("LOGITLESS_LIBRARY"):
    sys.path.insert(0, str(HERE.parents[1] / "python"))

import torch  # noqa: E402

from clock import Clock  # noqa: E402
from data import Inputs, make_inputs  # noqa: E402
from host_parts import call_and_queue_us, planning_us, without_recordings  # noqa: E402
from limits import Deadline, reported_by, step_limit  # noqa: E402
from machine import describe_machine, package_versions  # noqa: E402
from methods import MIB, Loss, Method, budget_of, peer_methods  # noqa: E402
from record import Record, Row  # noqa: E402
from shapes import Shape, parse_shapes  # noqa: E402
from table import markdown, number  # noqa: E402
from timing import describe, pass_call  # noqa: E402

SHAPES = "256x32768x1024,1024x32768x1024,2048x32000x768,4096x50304x768,1024x128256x2048,2048x128256x4096"
HOST_CALLS = 8  # a block; its launches must fit into the device's queue
BLOCK_SECONDS = 0.05  # of a block back to back, at least
BLOCKS = 7
NEW_LENGTHS = 24
NEW_BUDGETS = (None, 256)
PREPARE_SECONDS = 30.0
TOLERANCE = 1.02  # of bars: noise of a median


def our_methods() -> list[Method]:
    """Logitless as a user calls it."""
    import logitless

    def method(name: str, **options: object) -> Method:
        def loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = logitless.linear_cross_entropy(hidden, weight, target, **options)
            return found

        return Method(name, loss, ours=True)

    found = [
        method("logitless"),
        method("logitless 160 MiB", max_workspace_bytes=160 * MIB),
        method("logitless thinned 2^-9", gradient="thinned", threshold=2.0**-9),
    ]
    found[1].passes = ("gradients",)
    return found


class Cell:
    """A pass of a method at one shape."""

    def __init__(self, row: Row, call: Callable[[], object]) -> None:
        self.row, self.call = row, call
        self.calls = HOST_CALLS
        self.host: list[float] = []
        self.together: list[float] = []

    def prepare(self, clock: Clock) -> None:
        for _ in range(3):
            self.call()
        clock.wait()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            self.call()
        clock.wait()
        self.calls = max(HOST_CALLS, int(BLOCK_SECONDS * HOST_CALLS / (time.perf_counter() - start)))

    def block(self, clock: Clock) -> None:
        clock.wait()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            self.call()
        self.host.append(1e6 * (time.perf_counter() - start) / HOST_CALLS)
        clock.wait()
        self.together.append(clock.together_ms(self.call, self.calls))

    def summarize(self) -> None:
        if self.host:
            self.row.host_us, self.row.back_to_back_ms = statistics.median(self.host), statistics.median(self.together)
            self.row.rounds = len(self.host)


def new_lengths_us(clock: Clock, loss: Loss, inputs: Inputs, known: float) -> float:
    """Beyond ``known``, the host time of a call with a known number of rows."""
    times = []
    weight = inputs.weight.detach().requires_grad_()
    for rows in range(inputs.hidden.shape[0] - 1, max(inputs.hidden.shape[0] - 1 - NEW_LENGTHS, 0), -1):
        hidden, target = inputs.hidden[:rows].detach().requires_grad_(), inputs.target[:rows]
        clock.wait()
        start = time.perf_counter()
        loss(hidden, weight, target).backward()
        times.append(1e6 * (time.perf_counter() - start))
        weight.grad = None
    clock.wait()
    return statistics.median(times) - known


def measure_new_lengths(record: Record, clock: Clock, shape: Shape, inputs: Inputs) -> None:
    import logitless

    for budget in NEW_BUDGETS:
        row = Row(shape.name, "logitless", "new N", True, budget)
        record.rows.append(row)
        limit = budget_of(budget)

        def loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = logitless.linear_cross_entropy(hidden, weight, target, max_workspace_bytes=limit)
            return found

        try:
            cell = Cell(row, pass_call(Method("known", loss), inputs, "gradients"))
            cell.prepare(clock)
            for _ in range(BLOCKS):
                clock.wait()
                start = time.perf_counter()
                cell.call()
                cell.host.append(1e6 * (time.perf_counter() - start))
            row.host_us = new_lengths_us(clock, loss, inputs, statistics.median(cell.host))
        except Exception as error:
            row.status, row.reason = "failed", describe(error)


def measure_parts(record: Record, clock: Clock, shape: Shape, eager: Method | None) -> None:
    """Into the record's meta: microseconds of a call, of logitless_run in it, and of planning."""
    import logitless

    inputs = make_inputs(shape, "std1", clock.device)
    passes = [
        ("whole", "gradients", {}),
        ("thinned 2^-9", "gradients", {"gradient": "thinned", "threshold": 2.0**-9}),
        ("loss alone", "loss", {}),
    ]
    for name, pass_, options in passes:
        found = []
        # A budget that is none: plans of their own.
        for budget, recorded in ((None, True), (1 << 50, False)):

            def loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                made: torch.Tensor = logitless.linear_cross_entropy(
                    hidden, weight, target, max_workspace_bytes=budget, **options
                )
                return made

            call = pass_call(Method(name, loss), inputs, pass_)
            if recorded:
                found.append(call_and_queue_us(clock, call))
            else:
                with without_recordings():
                    found.append(call_and_queue_us(clock, call))
        texts = [f"{whole:.0f} ({queue:.0f})" for whole, queue in found]
        record.meta[f"us of a call (of logitless_run), {shape.name}, {name}"] = (
            f"{texts[0]}, without recordings {texts[1]}"
        )
        if eager is not None:
            record.meta[f"us of eager PyTorch's call, {name}"] = (
                f"{call_and_queue_us(clock, pass_call(eager, inputs, pass_))[0]:.0f}"
            )
    if clock.cuda:
        device = torch.cuda.current_device()
        for name, budget in (("default", 0), ("256 MiB", 256 * MIB)):
            planning = planning_us(len(inputs.hidden), *inputs.weight.shape, budget, device)
            record.meta[f"us of planning a new N, {shape.name}, {name}"] = f"{planning:.0f}"


def measure_shape(record: Record, clock: Clock, shape: Shape, methods: list[Method], end: Deadline, parts: int) -> None:
    """The next of ``parts`` shapes until ``end``."""
    inputs = make_inputs(shape, "std1", clock.device)
    cells = []
    for method in sorted(methods, key=lambda method: method.slow_to_prepare):
        for pass_ in method.passes:
            row = Row(shape.name, method.name, pass_, method.ours)
            record.rows.append(row)
            cell = Cell(row, pass_call(method, inputs, pass_))
            left = min(PREPARE_SECONDS, end.left() / 3)
            if left < 5:
                row.status, row.reason = "skipped", "no time left to prepare it"
                continue
            try:
                with step_limit(left):
                    cell.prepare(clock)
                cells.append(cell)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                row.status, row.reason = "failed", describe(error)
    order, deadline = random.Random(0), end.share(parts)
    for index in range(BLOCKS):
        if index >= 3 and deadline.left() <= 0:
            break
        order.shuffle(cells)
        for cell in cells:
            cell.block(clock)
            cell.summarize()
    if any(method.ours for method in methods):
        measure_new_lengths(record, clock, shape, inputs)
    record.save()


def rows_of(record: Record, shape: Shape) -> dict[tuple[str, str], Row]:
    """By method and pass; those of a new N by budget, too."""
    found = {}
    for row in record.rows:
        if row.shape == shape.name:
            name = f"{row.method} {row.budget_mib} MiB" if row.pass_ == "new N" and row.budget_mib else row.method
            found[name, row.pass_] = row
    return found


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.status != "ok":
        return row.status
    host = number(row.host_us, ".0f")
    return host if row.pass_ == "new N" else f"{number(row.back_to_back_ms)} ({host})"


def missed_bars(record: Record) -> list[str]:
    """Host time at most eager's; back to back at most that of eager and of torch.compile; 0.3 ms for a new N."""
    lines = []
    for shape in record.shapes:
        rows = rows_of(record, shape)
        for (name, pass_), row in rows.items():
            if not row.ours or row.host_us is None:
                continue
            what = f"{shape.name}, {name}, {pass_}"
            if pass_ == "new N":
                if row.host_us > 300:
                    lines.append(f"{what}: {row.host_us:.0f} us, bar 300")
                continue
            for peer in ("canonical", "torch.compile"):
                other = rows.get((peer, pass_))
                if other is None or other.host_us is None or other.back_to_back_ms is None:
                    continue
                if peer == "canonical" and row.host_us > TOLERANCE * other.host_us:
                    lines.append(f"{what}: host {row.host_us:.0f} us, {peer} {other.host_us:.0f}")
                if row.back_to_back_ms is not None and row.back_to_back_ms > TOLERANCE * other.back_to_back_ms:
                    lines.append(f"{what}: {row.back_to_back_ms:.2f} ms, {peer} {other.back_to_back_ms:.2f}")
    return lines


def render(record: Record) -> str:
    """One row a shape: milliseconds back to back, in brackets the host's microseconds."""
    columns: dict[tuple[str, str], None] = {}
    tables = [rows_of(record, shape) for shape in record.shapes]
    for pass_ in ("gradients", "loss", "new N"):
        columns |= {key: None for rows in tables for key in rows if key[1] == pass_}
    names = {"gradients": "fwd + bwd", "loss": "loss", "new N": "new N, us"}
    head = ["shape", *(f"{method}, {names[pass_]}" for method, pass_ in columns)]
    body = [[shape.name, *(_cell(rows.get(key)) for key in columns)] for shape, rows in zip(record.shapes, tables)]
    lines = [f"{name}: {value}" for name, value in record.meta.items()]
    lines += ["", "Milliseconds back to back, in brackets the host's microseconds.", "", *markdown(head, body)]
    missed = missed_bars(record)
    lines += ["", f"Bars missed: {len(missed)}", *(f"- {line}" for line in missed)]
    return "\n".join([*lines, *(f"- {row.shape}, {row.method}: {row.reason}" for row in record.rows if row.reason)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="NxVxD")
    parser.add_argument("--peers", default="canonical,torch-compile", help="auto, none or names")
    parser.add_argument("--minutes", type=float, default=1.8)
    parser.add_argument("--device", default="cuda", help="cpu: a try-out without a GPU, of small shapes")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    try:
        shapes = parse_shapes(args.shapes)
    except ValueError as error:
        parser.error(str(error))
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("no CUDA device: nothing is measured (try --device cpu --shapes 64x500x64)", file=sys.stderr)
        return 2
    record = Record(args.json, describe_machine(args.device) | {"packages": package_versions()})
    record.shapes = shapes
    methods, missing = peer_methods(args.peers)
    for method in methods:
        if method.slow_to_prepare:
            method.passes = ("gradients",)
    try:
        methods = our_methods() + methods
    except ImportError as error:
        missing.append(f"logitless is not available: {error}")
    for reason in missing:
        record.note(reason)

    def last_words() -> None:
        record.save()
        print(render(record), flush=True)

    deadline, clock = Deadline(START, 60 * args.minutes * 0.9), Clock(args.device)
    with reported_by(START, 60 * args.minutes, last_words):
        for index, shape in enumerate(shapes):
            measure_shape(record, clock, shape, methods, deadline, len(shapes) - index)
            clock.release()
        if any(method.ours for method in methods) and deadline.left() > 0:
            measure_parts(record, clock, shapes[0], next((m for m in methods if m.name == "canonical"), None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
