"""Predicts steps over tokens or vocabularies, as numbers and as a chart."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from ..errors import BudgetTooSmallError
from .config import Model
from .heads import Head
from .step import Step, predict
from .work import Batch

OVER = ("tokens", "vocab")
_GIB, _INCHES = 1 << 30, (10.0, 4.0)


@dataclasses.dataclass(frozen=True)
class Point:
    """One prediction of a sweep: ``value`` is N or V."""

    value: int
    head: Head
    step: Step


def sweep(
    model: Model, batch: Batch, heads: Sequence[Head], over: str, values: Sequence[int], **options: Any
) -> list[Point]:
    """Predicts a step for every head and value; points where no plan fits a head's budget are left out.

    Args:
        model: The model's sizes.
        batch: The batch of one step.
        heads: Implementations of the head.
        over: ``tokens`` for N, in whole sequences of the batch's length, or ``vocab`` for V.
        values: Values of N or V.
        options: Options of :func:`predict`.

    Raises:
        ValueError: ``over`` is another name, or a number of tokens is not a multiple of the length.
    """
    if over not in OVER:
        raise ValueError(f"over: expected one of {', '.join(OVER)}, got {over!r}")
    points = []
    for value in values:
        if over == "tokens" and (value < 1 or value % batch.length != 0):
            raise ValueError(f"values: expected multiples of the length {batch.length}, got {value}")
        here = dataclasses.replace(batch, sequences=value // batch.length) if over == "tokens" else batch
        sized = dataclasses.replace(model, vocab=value) if over == "vocab" else model
        for head in heads:
            with contextlib.suppress(BudgetTooSmallError):
                points.append(Point(value, head, predict(sized, here, head, **options)))
    return points


def draw(points: Sequence[Point], over: str, path: str | os.PathLike[str]) -> None:
    """Draws peak memory and the head's share of time into an SVG file; needs matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "a chart of a sweep needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "logitless", "font.size": 9.0}):
        figure = Figure(figsize=_INCHES, layout="constrained")
        memory, share = figure.subplots(1, 2)
        for name in dict.fromkeys(point.head.name for point in points):
            mine = [point for point in points if point.head.name == name]
            values = [point.value for point in mine]
            memory.plot(values, [point.step.peak_bytes / _GIB for point in mine], marker="o", markersize=3, label=name)
            share.plot(
                values, [100 * point.step.head_time_share for point in mine], marker="o", markersize=3, label=name
            )
        label = {"tokens": "tokens N", "vocab": "vocabulary V"}[over]
        for axes, title in ((memory, "peak memory, GiB (predicted)"), (share, "head's share of a step, % (predicted)")):
            axes.set(xlabel=label, title=title, ylim=(0, None))
            axes.grid(alpha=0.3)
        memory.legend(frameon=False)
        figure.savefig(os.fspath(path), format="svg", metadata={"Date": None})
