"""The grids of the papers and blogs: heads alone, by the benchmark of bench/gpu, a cell a shape."""

from __future__ import annotations

import dataclasses
import functools
import time

from bench import Settings, ShapeBench
from limits import Deadline, StepTimeout
from methods import our_methods, peer_methods
from record import Record
from shapes import BY_NAME, NVIDIA, Shape
from studies.record import Cell, with_status
from studies.session import Session
from timing import describe

TINY = 64, 300, 32
MARGIN_SECONDS = 5.0
LEAST_SHARE = 0.7  # of a shape's time: with less, methods would be left out
PEERS = "canonical,torch-compile,liger,apple,apple-kahan,fla"


@dataclasses.dataclass(frozen=True)
class Grid:
    """Shapes of one published table, and what is measured at them."""

    name: str
    shapes: tuple[Shape, ...]
    budgets: tuple[int | None, ...]
    peers: str
    ignored: float = 0.0
    rounds: int = 4
    seconds: float = 60.0  # most for a shape


CCE = (BY_NAME["gemma-2-2b"],)
GRIDS = (
    Grid("cce", CCE, (None, 2560, 160), PEERS, seconds=110),
    Grid("cce-ignored", CCE, (None, 160), PEERS, ignored=0.5, seconds=45),
    Grid("chunks", (BY_NAME["llama-3-8b"],), (None, 512, 128), "canonical,torch-compile", seconds=40),
    Grid("blog", (BY_NAME["gemma-e2b"], BY_NAME["mistral-nemo"]), (None, 160), PEERS, seconds=60),
    Grid("nvidia", tuple(s for s in NVIDIA if s.tokens != 2048), (None, 2560), "canonical", rounds=3, seconds=20),
)


def measure(session: Session, grid: Grid, shape: Shape, seconds: float) -> Cell:
    """Rows and bare products of one shape, as bench/gpu/run.py records them."""
    options = session.options
    record = Record(None, {})
    peers, missing = peer_methods("none" if options.tiny else grid.peers)
    for reason in missing:
        record.note(reason)
    settings = Settings(device=options.device, rounds=grid.rounds, prepare_seconds=40.0, ignored=grid.ignored)
    ours = our_methods(list(grid.budgets), [""], [9])
    try:
        ShapeBench(record, settings, shape).run(ours, peers, Deadline(time.monotonic(), seconds))
    except StepTimeout as error:  # what was measured before is kept
        if all(row.burst_ms is None for row in record.rows):
            raise
        for row in record.rows:
            if row.status == "ok" and row.burst_ms is None:
                row.status, row.reason = "skipped", describe(error)
    content = record.to_json()
    found = {name: content[name] for name in ("gemms", "rows", "notes")} | {"shape": shape._asdict()}
    return found | with_status(content["rows"], "method")


def measured(session: Session, key: str, grid: Grid, shape: Shape) -> None:
    """The benchmark keeps to its time by itself, and ends before the call does; the limit here is for what hangs."""
    seconds = min(grid.seconds, session.deadline.left() - MARGIN_SECONDS)
    work = functools.partial(measure, session, grid, shape, seconds)
    session.cell(key, work, 1.5 * grid.seconds + 10, least=MARGIN_SECONDS + LEAST_SHARE * grid.seconds)


def run(session: Session) -> None:
    """Smallest shapes first within the large grid, so that what is left out is what takes longest."""
    for grid in GRIDS:
        for shape in sorted(grid.shapes, key=lambda shape: shape.flop)[: 2 if session.options.tiny else None]:
            if session.options.tiny:
                shape = shape._replace(tokens=TINY[0], vocab=TINY[1], hidden=TINY[2])
            measured(session, f"{grid.name}/{shape.name}", grid, shape)
