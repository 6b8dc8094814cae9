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

import random
import statistics
import sys
import time
from typing import Any

import torch

from clock import MIB, Call, Clock
from data import Inputs, make_inputs
from harness import START, has_device, parser, reported
from limits import Deadline, StepTimeout, step_limit
from machine import describe_machine, package_versions
from methods import Loss, Method, budget_of, our_loss, peer_methods, without_recordings
from record import Record, Row
from shapes import Shape
from table import host_method, host_table
from timing import describe, pass_call

SHAPES = "256x32768x1024,1024x32768x1024,2048x32000x768,4096x50304x768,1024x128256x2048,2048x128256x4096"
HOST_CALLS = 8  # a block; its launches must fit into the device's queue
BLOCK_SECONDS = 0.05  # of a block back to back, at least
BLOCKS = 7
NEW_LENGTHS = 24
NEW_BUDGETS = (None, 256)
PARTS_CALLS, PARTS_BLOCKS, NEW_PLANS = 6, 9, 24  # of the parts of a call
PREPARE_SECONDS = 30.0
TOLERANCE = 1.02  # of bars: noise of a median


def our_methods() -> list[Method]:
    """Logitless as a user calls it."""
    thinned = our_loss(gradient="thinned", threshold=2.0**-9)
    return [
        Method("logitless", our_loss(), ours=True),
        Method("logitless 160 MiB", our_loss(max_workspace_bytes=160 * MIB), ours=True, passes=("gradients",)),
        Method("logitless thinned 2^-9", thinned, ours=True),
    ]


class Cell:
    """A pass of a method at one shape."""

    def __init__(self, row: Row, call: Call) -> None:
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
    for budget in NEW_BUDGETS:
        row = Row(shape.name, "logitless", "new N", True, budget)
        record.rows.append(row)
        loss = our_loss(max_workspace_bytes=budget_of(budget))
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


def call_and_queue_us(clock: Clock, call: Call) -> tuple[float, float]:
    """Medians over blocks: microseconds of a call, and of logitless_run in it (0 for a call without it)."""
    from logitless import native

    inside = 0.0
    run: Any = native.run

    def timed(*args: Any, **options: Any) -> None:
        nonlocal inside
        start = time.perf_counter()
        run(*args, **options)
        inside += time.perf_counter() - start

    for _ in range(4):  # recordings are made
        call()
    calls, queues = [], []
    native.run = timed
    try:
        for _ in range(PARTS_BLOCKS):
            clock.wait()
            inside, start = 0.0, time.perf_counter()
            for _ in range(PARTS_CALLS):
                call()
            calls.append(1e6 * (time.perf_counter() - start) / PARTS_CALLS)
            queues.append(1e6 * inside / PARTS_CALLS)
    finally:
        native.run = run
        clock.wait()
    return statistics.median(calls), statistics.median(queues)


def planning_us(rows: int, vocab: int, hidden: int, budget: int, device: int) -> float:
    """Microseconds of planning forward and backward with a number of rows that was not planned before, the median."""
    from logitless import native
    from logitless import options as _options

    names = ("hidden", "classifier", "d_hidden", "d_classifier")
    tensors = dict.fromkeys(names, _options.BF16) | {"targets": _options.I64}
    times = []
    for tokens in range(rows, max(rows - NEW_PLANS, 0), -1):
        sizes = (tokens, vocab, hidden)
        spec = native.spec(sizes, tensors, pass_=_options.FORWARD_BACKWARD, max_workspace_bytes=budget)
        start = time.perf_counter()
        native.Plan(spec, 1, None, device)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def measure_parts(record: Record, clock: Clock, shape: Shape, eager: Method | None) -> None:
    """Into the record's meta: microseconds of a call, of logitless_run in it, and of planning."""
    inputs = make_inputs(shape, "std1", clock.device)
    thinned = {"gradient": "thinned", "threshold": 2.0**-9}
    passes = [("whole", "gradients", {}), ("thinned 2^-9", "gradients", thinned), ("loss alone", "loss", {})]
    for name, pass_, options in passes:

        def parts_of(budget: int | None) -> str:
            loss = our_loss(max_workspace_bytes=budget, **options)
            whole, queue = call_and_queue_us(clock, pass_call(Method(name, loss), inputs, pass_))
            return f"{whole:.0f} ({queue:.0f})"

        text = parts_of(None)
        with without_recordings():
            text += f", without recordings {parts_of(1 << 50)}"  # a budget that is none: plans of their own
        record.meta[f"us of a call (of logitless_run), {shape.name}, {name}"] = text
        if eager is not None:
            of_eager = call_and_queue_us(clock, pass_call(eager, inputs, pass_))[0]
            record.meta[f"us of eager PyTorch's call, {name}"] = f"{of_eager:.0f}"
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
            except (Exception, StepTimeout) as error:
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


def missed_bars(record: Record) -> list[str]:
    """Host time at most eager's; back to back at most that of eager and of torch.compile; 0.3 ms for a new N."""
    lines = []
    for shape in record.shapes:
        rows = {(host_method(row), row.pass_): row for row in record.rows if row.shape == shape.name}
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
    lines = [f"{name}: {value}" for name, value in record.meta.items()]
    lines += ["", "Milliseconds back to back, in brackets the host's microseconds.", ""]
    lines += host_table(record, ("gradients", "loss", "new N"))
    missed = missed_bars(record)
    lines += ["", f"Bars missed: {len(missed)}", *(f"- {line}" for line in missed)]
    return "\n".join([*lines, *(f"- {row.shape}, {row.method}: {row.reason}" for row in record.rows if row.reason)])


def main() -> int:
    args = parser(__doc__, shapes=SHAPES, peers="canonical,torch-compile", minutes=1.8, json=None).parse_args()
    if not has_device(args):
        return 2
    record = Record(args.json, describe_machine(args.device) | {"packages": package_versions()})
    record.shapes = shapes = args.shapes
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

    deadline, clock = Deadline(START, 60 * args.minutes * 0.9), Clock(args.device)
    with reported(record, args.minutes, lambda: print(render(record), flush=True)):
        for index, shape in enumerate(shapes):
            measure_shape(record, clock, shape, methods, deadline, len(shapes) - index)
            clock.release()
        if any(method.ours for method in methods) and deadline.left() > 0:
            measure_parts(record, clock, shapes[0], next((m for m in methods if m.name == "canonical"), None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
