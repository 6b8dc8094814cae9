"""Time limits: the rest of the run, a limit on one step, and a last resort that ends the run with its results."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator


class Deadline:
    """Seconds left until ``seconds`` after ``start``, a time of time.monotonic."""

    def __init__(self, start: float, seconds: float) -> None:
        self.end = start + seconds

    def left(self) -> float:
        return self.end - time.monotonic()

    def share(self, parts: int) -> Deadline:
        """Returns an equal part of the time left for the next of ``parts`` steps."""
        return Deadline(time.monotonic(), max(0.0, self.left()) / parts)


class StepTimeout(BaseException):
    """Raised when a step exceeds its limit.

    It is no Exception: a tuner catches those of a configuration and continues.
    """


class DeviceFault(BaseException):
    """Raised with a method's name when its kernels broke the device, which this process then cannot use any more."""


@contextlib.contextmanager
def step_limit(seconds: float) -> Iterator[None]:
    """Raises StepTimeout in the main thread after ``seconds``, as soon as Python code runs again.

    There is one timer, so limits cannot be nested.
    """
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        raise RuntimeError("a step has a limit already")

    def stop(*_: object) -> None:
        raise StepTimeout(f"longer than {seconds:.3g} s")

    before = signal.signal(signal.SIGALRM, stop)
    # fires again in case something swallows the first one
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds), 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def reported_by(start: float, seconds: float, report: Callable[[], None]) -> Iterator[None]:
    """Reports at the end of the block. If a call hangs, it reports at the given time and exits with status 3."""

    def end() -> None:
        print(f"time is up after {seconds:.0f} s: ending with what was measured", flush=True)
        try:
            report()
        finally:
            sys.stdout.flush()
            os._exit(3)

    timer = threading.Timer(max(0.1, start + seconds - time.monotonic()), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        report()
