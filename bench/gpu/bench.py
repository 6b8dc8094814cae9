"""One shape: errors of ours, our methods, peers, rounds; what is dropped first is what matters least."""

from __future__ import annotations

import dataclasses
import sys

import torch

from accuracy import check_shape
from clock import Clock
from data import make_inputs, with_ignored
from limits import Deadline
from methods import Method
from record import Record
from shapes import Shape
from timing import ShapeTiming

ERRORS_SHARE = 0.25  # of a shape's time at most, before the rounds; without peers NO_PEERS_ERRORS_SHARE
NO_PEERS_ERRORS_SHARE = 0.5
ROUNDS_SHARE = 0.30  # kept free for the rounds while peers are prepared


@dataclasses.dataclass
class Settings:
    device: str = "cuda"
    rounds: int = 10
    prepare_seconds: float = 60.0
    data: list[str] = dataclasses.field(default_factory=list)
    timing_data: str = "std1"
    ignored: float = 0.0  # share of the tokens without a target, of the timing
    peer_errors: bool = False
    time: bool = True


class ShapeBench:
    def __init__(self, record: Record, settings: Settings, shape: Shape) -> None:
        self.record, self.settings, self.shape = record, settings, shape
        self.clock = Clock(settings.device)

    def run(self, ours: list[Method], peers: list[Method], deadline: Deadline) -> None:
        settings, clock, total = self.settings, self.clock, deadline.left()
        if "torch._dynamo" in sys.modules:  # else the shapes before this one use up the limit of recompilations
            torch.compiler.reset()
        # Errors first: their fp64 matrices must not stand beside the timing's buffers.
        share = ERRORS_SHARE if peers else NO_PEERS_ERRORS_SHARE
        errors_end = Deadline(deadline.end - total, share * total)
        check_shape(self.record, clock, self.shape, settings.data, ours, errors_end)
        inputs = with_ignored(make_inputs(self.shape, settings.timing_data, settings.device), settings.ignored)
        timing = ShapeTiming(self.record, clock, self.shape, inputs, settings.time, settings.timing_data)
        for method in ours:
            timing.add(method, max(settings.prepare_seconds, 1.0))
        for method in sorted(peers, key=lambda method: method.slow_to_prepare):
            left = deadline.left() - ROUNDS_SHARE * total
            timing.add(method, min(settings.prepare_seconds, left))
        if settings.time:
            timing.run(settings.rounds, deadline)
        del timing, inputs
        clock.release()
        if settings.peer_errors:
            usable = {row.method for row in self.record.rows if row.shape == self.shape.name and row.status == "ok"}
            tried = [method for method in peers if method.name in usable]
            check_shape(self.record, clock, self.shape, settings.data, tried, deadline)
