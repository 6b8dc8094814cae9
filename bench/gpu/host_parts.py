"""Where the host's time of a small head goes: the part of a call that is inside of the library, and planning.

Blocks of a few calls, each after a wait for the device, on whatever else the host is doing: call_us is of the whole
call, queue_us of logitless_run in it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from clock import Clock

CALLS = 6
BLOCKS = 9
NEW_PLANS = 24


@contextmanager
def without_recordings() -> Iterator[None]:
    """Plans that are made here do not play runs that come again from recordings."""
    before = os.environ.get("LOGITLESS_CUDA_GRAPHS")
    os.environ["LOGITLESS_CUDA_GRAPHS"] = "0"
    try:
        yield
    finally:
        del os.environ["LOGITLESS_CUDA_GRAPHS"]
        if before is not None:
            os.environ["LOGITLESS_CUDA_GRAPHS"] = before


def call_and_queue_us(clock: Clock, call: Callable[[], object]) -> tuple[float, float]:
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
        for _ in range(BLOCKS):
            clock.wait()
            inside, start = 0.0, time.perf_counter()
            for _ in range(CALLS):
                call()
            calls.append(1e6 * (time.perf_counter() - start) / CALLS)
            queues.append(1e6 * inside / CALLS)
    finally:
        native.run = run
        clock.wait()
    return statistics.median(calls), statistics.median(queues)


def planning_us(rows: int, vocab: int, hidden: int, budget: int, device: int) -> float:
    """Microseconds of planning forward and backward with a number of rows that was not planned before, the median."""
    from logitless import native
    from logitless import options as _options

    bf16 = {f"{name}_dtype": _options.BF16 for name in ("hidden", "classifier", "d_hidden", "d_classifier")}
    times = []
    for tokens in range(rows, max(rows - NEW_PLANS, 0), -1):
        spec = native.Spec(
            _options.FORWARD_BACKWARD,
            tokens,
            vocab,
            hidden,
            want_d_hidden=True,
            want_d_classifier=True,
            max_workspace_bytes=budget,
            **bf16,
        )
        start = time.perf_counter()
        native.Plan(spec, 1, None, device)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)
