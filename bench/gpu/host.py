"""Host time of small heads: the time that a call takes to queue, and the time on the device.

    python bench/gpu/host.py [--shapes 256x32768x1024,2048x32000x768] [--peers canonical,torch-compile]
        [--minutes 1.8] [--json out.json]

Host time is in microseconds until the call returns with all of its work queued: the median over blocks of calls. The
wait for the device is outside the blocks. The time back to back is in milliseconds per call of many calls in a row,
between two events: the larger of the host's and the device's time. Calls are forward and backward, or the loss alone,
all interleaved. The parts of a call belong to the first shape, in blocks of six calls: the whole call and logitless_run
inside it, with and without recorded runs, and the planning of a new N. So do calls for the next tokens of 8 rows.
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
import time
from typing import Any
from unittest import mock

import torch

from clock import MIB, Call, Clock
from data import make_inputs
from harness import has_device, measured_in_time, parser, tried
from limits import Deadline
from machine import describe_machine, package_versions
from methods import Method, our_loss, without_recordings
from peer_heads import peer_methods
from record import Record, Row
from shapes import Shape
from table import host_table
from timing import pass_call

SHAPES = "256x32768x1024,1024x32768x1024,2048x32000x768,4096x50304x768,1024x128256x2048,2048x128256x4096"
HOST_CALLS = 8  # calls per block; their launches must fit into the device's queue
BLOCK_SECONDS = 0.05  # least duration of a block back to back
BLOCKS = 7
PARTS_CALLS, PARTS_BLOCKS, NEW_PLANS = 6, 9, 24  # for the parts of a call
DECODED = 8  # rows, of which each gets its next token
PREPARE_SECONDS, LEAST_SECONDS = 30.0, 5.0


def our_methods() -> list[Method]:
    """Returns Logitless as a user calls it."""
    sparsified = our_loss(gradient="sparsified", threshold=2.0**-9)
    return [
        Method("logitless", our_loss(), ours=True),
        Method("logitless 160 MiB", our_loss(max_workspace_bytes=160 * MIB), ours=True, passes=("gradients",)),
        Method("logitless sparsified 2^-9", sparsified, ours=True),
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


def call_and_queue_us(clock: Clock, call: Call) -> tuple[float, float]:
    """Returns medians over blocks in microseconds: a call, and its logitless_run (0 if it makes none)."""
    from logitless import native

    inside = 0.0
    run: Any = native.run

    def timed(*args: Any, **options: Any) -> None:
        nonlocal inside
        start = time.perf_counter()
        run(*args, **options)
        inside += time.perf_counter() - start

    for _ in range(4):  # makes the recordings
        call()
    calls, queues = [], []
    with mock.patch.object(native, "run", timed):
        for _ in range(PARTS_BLOCKS):
            clock.wait()
            inside, start = 0.0, time.perf_counter()
            for _ in range(PARTS_CALLS):
                call()
            calls.append(1e6 * (time.perf_counter() - start) / PARTS_CALLS)
            queues.append(1e6 * inside / PARTS_CALLS)
    clock.wait()
    return statistics.median(calls), statistics.median(queues)


def planning_us(rows: int, vocab: int, hidden: int, budget: int, device: int) -> float:
    """Returns the median microseconds to plan forward and backward for a new number of rows."""
    from logitless import native
    from logitless import options as _options

    names = ("hidden", "weight", "d_hidden", "d_weight")
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
    """Writes microseconds of a call, of logitless_run and of planning into the record's meta."""
    inputs = make_inputs(shape, "std1", clock.device)
    sparsified = {"gradient": "sparsified", "threshold": 2.0**-9}
    passes = [("whole", "gradients", {}), ("sparsified 2^-9", "gradients", sparsified), ("loss alone", "loss", {})]
    for name, pass_, options in passes:

        def parts_of(budget: int | None) -> str:
            loss = our_loss(max_workspace_bytes=budget, **options)
            whole, queue = call_and_queue_us(clock, pass_call(Method(name, loss), inputs, pass_))
            return f"{whole:.0f} ({queue:.0f})"

        text = parts_of(None)
        with without_recordings():
            text += f", without recordings {parts_of(1 << 50)}"  # a budget beyond any need gives new plans
        record.meta[f"us of a call (of logitless_run), {shape.name}, {name}"] = text
        if eager is not None:
            of_eager = call_and_queue_us(clock, pass_call(eager, inputs, pass_))[0]
            record.meta[f"us of eager PyTorch's call, {name}"] = f"{of_eager:.0f}"
    if clock.cuda:
        device = torch.cuda.current_device()
        for name, budget in (("default", 0), ("256 MiB", 256 * MIB)):
            planning = planning_us(len(inputs.hidden), *inputs.weight.shape, budget, device)
            record.meta[f"us of planning a new N, {shape.name}, {name}"] = f"{planning:.0f}"


def measure_decoding(record: Record, clock: Clock, shape: Shape) -> None:
    """Writes microseconds of calls that find next tokens into the record's meta."""
    import logitless

    inputs = make_inputs(shape, "std1", clock.device)
    (hidden, target), weight = (tensor[:DECODED] for tensor in (inputs.hidden, inputs.target)), inputs.weight
    seed = torch.zeros((), dtype=torch.int64, device=clock.device)
    calls: dict[str, Call] = {
        "matmul and argmax": lambda: (hidden @ weight.T).argmax(-1),
        "loss": lambda: logitless.linear_cross_entropy(hidden, weight, target, reduction="none"),
        "linear_top_k": lambda: logitless.linear_top_k(hidden, weight, 1),
        "sample": lambda: logitless.sample(hidden, weight, seed=seed),
    }
    with torch.no_grad():
        for name, call in calls.items():
            whole, queue = call_and_queue_us(clock, call)
            of = f"{DECODED}x{shape.vocab}x{shape.hidden}"
            record.meta[f"us of a call (of logitless_run), {of}, {name}"] = f"{whole:.0f} ({queue:.0f})"


def measure_shape(record: Record, clock: Clock, shape: Shape, methods: list[Method], end: Deadline, parts: int) -> None:
    """Measures the next of ``parts`` shapes until ``end``."""
    inputs = make_inputs(shape, "std1", clock.device)
    cells = []
    for method in sorted(methods, key=lambda method: method.slow_to_prepare):
        for pass_ in method.passes:
            row = Row(shape.name, method.name, pass_, method.ours)
            record.rows.append(row)
            cell = Cell(row, pass_call(method, inputs, pass_))
            left = min(PREPARE_SECONDS, end.left() / 3)
            if tried(row, left if left >= LEAST_SECONDS else 0.0, functools.partial(cell.prepare, clock)):
                cells.append(cell)
    order, deadline = random.Random(0), end.share(parts)
    for index in range(BLOCKS):
        if index >= 3 and deadline.left() <= 0:
            break
        order.shuffle(cells)
        for cell in cells:
            cell.block(clock)
            cell.summarize()
    record.save()


def render(record: Record) -> str:
    lines = [f"{name}: {value}" for name, value in record.meta.items()]
    lines += ["", "Milliseconds back to back, in brackets the host's microseconds.", ""]
    lines += host_table(record)
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

    clock = Clock(args.device)

    def measure(deadline: Deadline) -> None:
        for index, shape in enumerate(shapes):
            measure_shape(record, clock, shape, methods, deadline, len(shapes) - index)
            clock.release()
        if any(method.ours for method in methods) and deadline.left() > 0:
            measure_parts(record, clock, shapes[0], next((m for m in methods if m.name == "canonical"), None))
            measure_decoding(record, clock, shapes[0])

    return measured_in_time(args, record, measure, render)


if __name__ == "__main__":
    sys.exit(main())
