"""Measures one shape: errors of our methods, then our methods, peers and rounds, and errors of the peers.

The order puts first what matters most: a run short of time drops the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import torch

from accuracy import check_shape
from clock import Clock
from data import make_inputs, with_ignored
from limits import Deadline, DeviceFault
from methods import Method
from record import Record
from shapes import Shape
from timing import ShapeTiming

ERRORS_SHARE = 0.25  # largest share of a shape's time before the rounds; NO_PEERS_ERRORS_SHARE without peers
NO_PEERS_ERRORS_SHARE = 0.5
PEER_ERRORS_SHARE = 0.15  # share kept free for the errors of peers
ROUNDS_SHARE = 0.30  # share kept free for the rounds and these errors while peers are prepared


def measure_shape(
    record: Record, args: argparse.Namespace, shape: Shape, ours: list[Method], peers: list[Method], deadline: Deadline
) -> None:
    clock, total = Clock(args.device), deadline.left()
    data = [] if args.data == "none" else args.data.split(",")
    if "torch._dynamo" in sys.modules:  # earlier shapes would use up the recompilation limit
        torch.compiler.reset()
    # Errors come first: their fp64 matrices must not be in memory with the timing's buffers.
    share = ERRORS_SHARE if peers else NO_PEERS_ERRORS_SHARE
    check_shape(record, clock, shape, data, ours, Deadline(deadline.end - total, share * total))
    inputs = with_ignored(make_inputs(shape, args.timing_data, args.device), args.ignored)
    timing = ShapeTiming(record, clock, shape, inputs, args.timing_data)
    for method in ours:
        timing.add(method, max(args.prepare_seconds, 1.0))
    for method in sorted(peers, key=lambda method: method.slow_to_prepare):
        try:
            timing.add(method, min(args.prepare_seconds, deadline.left() - ROUNDS_SHARE * total))
        finally:
            if not clock.works():
                raise DeviceFault(method.name)
    kept_free = PEER_ERRORS_SHARE * total if args.peer_errors and peers and data else 0.0
    timing.run(args.rounds, Deadline(deadline.end, -kept_free))
    del timing, inputs
    clock.release()
    if args.peer_errors:
        usable = {(row.method, row.pass_) for row in record.rows if row.shape == shape.name and row.status == "ok"}
        check_shape(record, clock, shape, data, [only(method, usable) for method in peers], deadline)


def only(method: Method, usable: set[tuple[str, str]]) -> Method:
    """Returns the method with its usable passes alone."""
    return dataclasses.replace(method, passes=tuple(p for p in method.passes if (method.name, p) in usable))
