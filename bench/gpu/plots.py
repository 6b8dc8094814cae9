"""Plots of a record: time against budget, memory against vocabulary, share of the bare products' speed."""

from __future__ import annotations

import pathlib
from typing import Any

from record import Record, Row
from shapes import Shape

LEAST_POINTS, LEAST_BUDGETS = 2, 5


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, alpha=0.3)
    return figure, axes


def _save(figure: Any, folder: pathlib.Path, name: str, form: str) -> pathlib.Path:
    from matplotlib import pyplot

    path = folder / f"{name}.{form}"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _gradients(record: Record, shape: Shape) -> list[Row]:
    return [r for r in record.rows if r.shape == shape.name and r.pass_ == "gradients" and r.status == "ok"]


def plot_time_against_memory(record: Record, shape: Shape, folder: pathlib.Path, form: str) -> list[pathlib.Path]:
    """Ours as a line over the budgets, every peer a point; horizontal line: the three bare products."""
    rows = [r for r in _gradients(record, shape) if r.burst_ms is not None and r.extra_mib is not None]
    lines: dict[str, list[Row]] = {}
    for row in rows:
        words = row.method.split()
        own = words[0] if row.threshold is None else f"{words[0]} thinned"
        lines.setdefault(own if row.ours else row.method, []).append(row)
    if not any(row.ours for row in rows):
        return []
    title = f"Forward and backward, N {shape.tokens}, V {shape.vocab}, D {shape.hidden}"
    figure, axes = _axes(title, "peak memory beyond inputs and gradients, MiB", "milliseconds")
    for label, points in lines.items():
        points.sort(key=lambda row: row.extra_mib or 0.0)
        beyond = [max((row.extra_mib or 0.0) - row.gradient_mib, 1.0) for row in points]
        axes.plot(beyond, [row.burst_ms for row in points], "o-" if points[0].ours else "x", label=label)
    gemms = record.gemms.get(shape.name)
    if gemms and gemms.burst:
        axes.axhline(sum(gemms.burst.values()), color="black", linestyle="--", label="three bare products")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend()
    return [_save(figure, folder, f"time-against-memory-{shape.name}", form)]


def plot_memory_against_vocabulary(record: Record, folder: pathlib.Path, form: str) -> list[pathlib.Path]:
    """For each N and D with several V."""
    groups: dict[tuple[int, int], list[Shape]] = {}
    for shape in record.shapes:
        groups.setdefault((shape.tokens, shape.hidden), []).append(shape)
    found = []
    for (tokens, hidden), shapes in groups.items():
        lines: dict[str, list[tuple[int, float]]] = {}
        for shape in sorted(shapes, key=lambda shape: shape.vocab):
            for row in _gradients(record, shape):
                if row.extra_mib is not None:
                    point = (shape.vocab, max(row.extra_mib - row.gradient_mib, 1.0))
                    lines.setdefault(row.method, []).append(point)
        if len(shapes) < LEAST_POINTS or not lines:
            continue
        figure, axes = _axes(
            f"Forward and backward, N {tokens}, D {hidden}", "vocabulary", "MiB beyond inputs and gradients"
        )
        for method, points in lines.items():
            style = "o-" if method.startswith("headroom") else "x--"
            axes.plot([v for v, _ in points], [m for _, m in points], style, label=method)
        axes.set_yscale("log")
        axes.legend(fontsize="small")
        found.append(_save(figure, folder, f"memory-against-vocabulary-n{tokens}-d{hidden}", form))
    return found


def plot_share_of_bare_products(record: Record, folder: pathlib.Path, form: str) -> list[pathlib.Path]:
    """100% is the speed of the bare products of the same round."""
    found = []
    for pass_, what in (("loss", "Loss alone"), ("gradients", "Forward and backward")):
        rows = [r for r in record.rows if r.pass_ == pass_ and r.status == "ok" and r.burst_ratio]
        methods = list(dict.fromkeys(row.method for row in rows))
        shapes = [shape.name for shape in record.shapes if any(row.shape == shape.name for row in rows)]
        if not rows:
            continue
        figure, axes = _axes(what, "", "speed, % of the bare products'")
        width = 0.8 / len(methods)
        for index, method in enumerate(methods):
            share = {row.shape: 100.0 / row.burst_ratio for row in rows if row.method == method and row.burst_ratio}
            places = [i + index * width for i, name in enumerate(shapes) if name in share]
            axes.bar(places, [share[name] for name in shapes if name in share], width, label=method)
        axes.axhline(100, color="black", linestyle="--")
        axes.set_xticks([i + 0.4 for i in range(len(shapes))], shapes, rotation=30, ha="right")
        axes.legend(fontsize="small")
        found.append(_save(figure, folder, f"share-of-bare-products-{pass_}", form))
    return found


def plot_time_against_budget(record: Record, folder: pathlib.Path, form: str) -> list[pathlib.Path]:
    """A line a shape that was measured at several budgets, in shares of its bare products."""
    lines = {}
    for shape in record.shapes:
        rows = [
            r for r in _gradients(record, shape) if r.ours and r.threshold is None and r.burst_ratio and r.extra_mib
        ]
        points = sorted(((row.extra_mib or 0.0) - row.gradient_mib, row.burst_ratio) for row in rows)
        if len({row.budget_mib for row in rows}) >= LEAST_BUDGETS:
            lines[f"{shape.name}: {shape.tokens} x {shape.vocab} x {shape.hidden}"] = points
    if not lines:
        return []
    figure, axes = _axes("Forward and backward", "workspace, MiB", "time, in that of the three bare products")
    for label, points in lines.items():
        axes.plot([mib for mib, _ in points], [ratio for _, ratio in points], "o-", label=label)
    axes.axhline(1, color="black", linestyle="--", label="three bare products")
    axes.axhline(4 / 3, color="gray", linestyle=":", label="four: all logits made twice")
    axes.set_xscale("log")
    axes.legend(fontsize="small")
    return [_save(figure, folder, "time-against-budget", form)]


def draw_all(record: Record, folder: str, form: str = "svg", most: int = 8) -> list[pathlib.Path]:
    """All plots that the record has points for, at most ``most`` files; returns them."""
    place = pathlib.Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    found = plot_share_of_bare_products(record, place, form)
    found += plot_time_against_budget(record, place, form)
    found += plot_memory_against_vocabulary(record, place, form)
    for shape in record.shapes:
        if len(found) < most:
            found += plot_time_against_memory(record, shape, place, form)
    return found[:most]
