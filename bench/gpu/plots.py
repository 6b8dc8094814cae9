"""Plots of a record: time against budget and against memory."""

from __future__ import annotations

import pathlib
from typing import Any

from record import Record, Row
from shapes import Shape
from terms import MATMULS, in_words, plain

# The palette of Okabe and Ito suits all kinds of color vision. The first two colors are ours; others also have markers.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("s", "D", "^", "v", "P", "X", "*", "<", ">", "p", "h", "d")


def new_axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "logitless"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, alpha=0.3)
    return figure, axes


def _plain_logarithm(axis: Any, low: float, high: float) -> None:
    """Sets ticks at 1, 2 and 5 times powers of ten as plain numbers, fewer over a long range."""
    factors = (1, 2, 5) if high < 300 * low else (1,)
    powers = [10.0**k for k in range(-3, 7)]
    ticks = [f * power for power in powers for f in factors if low / 1.05 <= f * power <= high * 1.05]
    axis.set_ticks(ticks, [f"{tick:,g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def legend_below(figure: Any) -> None:
    """Puts the legend below, so that the axes keep their width."""
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")


def save_figure(figure: Any, folder: pathlib.Path, name: str) -> pathlib.Path:
    from matplotlib import pyplot

    path = folder / f"{name}.svg"
    figure.savefig(path, dpi=150, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _gradients(record: Record, shape: Shape) -> list[Row]:
    return [r for r in record.rows if r.shape == shape.name and r.pass_ == "gradients" and r.status == "ok"]


def _label(row: Row) -> str:
    """Returns a method's name in the legend. Our budgets form one line."""
    words = plain(in_words(row.method))
    return f"{words.partition(',')[0]}, {'exact' if row.threshold is None else 'sparsified'}" if row.ours else words


def _sizes(shape: Shape) -> str:
    return f"{shape.tokens:,} tokens, vocabulary {shape.vocab:,}, hidden size {shape.hidden:,}"


def plot_time_against_memory(record: Record, shape: Shape, folder: pathlib.Path) -> pathlib.Path:
    """Plots ours as a line over budgets, every peer as a point, and three matmuls as a horizontal line.

    Times are steady if the record has such times.
    """
    rows = [r for r in _gradients(record, shape) if r.burst_ms is not None and r.extra_mib is not None]
    steady = all(row.sustained_ms is not None for row in rows)
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(_label(row), []).append(row)
    how = "steady" if steady else "after idle"
    memory, time = "peak memory beyond inputs and gradients, MiB", f"forward and backward, ms, {how}"
    figure, axes = new_axes(f"{shape.name}: {_sizes(shape)}", memory, time)
    widest, slowest, fastest = 1.0, 0.0, float("inf")
    other, ours = 0, sorted({label for label, points in lines.items() if points[0].ours})  # exact before sparsified
    for label, points in lines.items():
        points.sort(key=lambda row: row.extra_mib or 0.0)
        beyond = [max((row.extra_mib or 0.0) - row.gradient_mib, 1.0) for row in points]
        times = [(row.sustained_ms if steady else row.burst_ms) or 0.0 for row in points]
        widest, slowest, fastest = max(widest, *beyond), max(slowest, *times), min(fastest, *times)
        if points[0].ours:
            color = COLORS[ours.index(label)]
            axes.plot(beyond, times, "o-", color=color, label=label, linewidth=2)
            for place in sorted({0, len(points) - 1}):
                words = plain(in_words(points[place].method)).partition(", ")[2]
                at, below = (beyond[place], times[place]), (0, -14)
                axes.annotate(words, at, below, textcoords="offset points", ha="center", fontsize="small", color=color)
        else:
            style = {"marker": MARKERS[other % len(MARKERS)], "color": COLORS[2 + other % 5]}
            axes.plot(beyond, times, linestyle="none", markersize=7, label=label, **style)
            other += 1
    gemms = record.gemms.get(shape.name)
    products = gemms and (gemms.sustained if steady else gemms.burst)
    if products:
        axes.axhline(sum(products.values()), color="black", linestyle="--", label=MATMULS)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(0.7, 1.4 * widest)
    axes.set_ylim(0.8 * fastest, 1.25 * slowest)
    _plain_logarithm(axes.xaxis, 1.0, widest)
    _plain_logarithm(axes.yaxis, fastest, slowest)
    legend_below(figure)
    return save_figure(figure, folder, f"time-against-memory-{shape.name}")


def _workspace(row: Row) -> float | None:
    """Returns MiB beyond gradients, or the budget for a record without them."""
    return row.budget_mib if row.extra_mib is None else row.extra_mib - row.gradient_mib


def plot_time_against_budget(record: Record, folder: pathlib.Path) -> pathlib.Path:
    """Plots a line per shape, in units of its three matmuls."""
    lines = {}
    for shape in record.shapes:
        rows = [r for r in _gradients(record, shape) if r.ours and r.threshold is None and r.burst_ratio]
        sizes = [_workspace(row) for row in rows]
        points = sorted((size, row.burst_ratio or 0.0) for size, row in zip(sizes, rows) if size is not None)
        lines[f"{shape.name}: {_sizes(shape)}"] = points
    what = "workspace" if any(row.extra_mib is not None for row in record.rows) else "budget"
    figure, axes = new_axes("Forward and backward, after idle", f"{what}, MiB", "time, in three matmuls")
    for label, points, color, marker in zip(lines, lines.values(), COLORS * len(lines), MARKERS * len(lines)):
        places, ratios = zip(*points)
        axes.plot(places, ratios, marker=marker, color=color, label=label)
    axes.axhline(1, color="black", linestyle="--", label=MATMULS)
    axes.axhline(4 / 3, color="gray", linestyle=":", label="four matmuls: all logits computed twice")
    axes.set_xscale("log")
    sizes = [mib for points in lines.values() for mib, _ in points]
    _plain_logarithm(axes.xaxis, min(sizes), max(sizes))
    axes.legend(fontsize="small")
    return save_figure(figure, folder, "time-against-budget")
