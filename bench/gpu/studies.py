"""Records of the studies in bench/records/studies, and the plots of docs/studies.

``xzcat`` shows a record; the pages have its tables.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from typing import Any

from plots import COLORS, MARKERS, legend_below, new_axes, save_figure
from record import read_json
from terms import in_words, plain

ROOT = pathlib.Path(__file__).resolve().parents[2]
Cell = dict[str, Any]
GIB_IN_MIB = 1024
BATCHES = {"torch.compile": 0, "logitless": 2, "sparsified": 3}  # heads, with the index of their color and marker
# Categories of memory, from the bottom, with their colors. Categories that no head changes come first.
SHADES = {"weights": "#999999", "optimizer": "#cccccc", "other": "#777777"}
SHADES |= {"activations": "#56b4e9", "gradients": "#0072b2", "head": "#d55e00"}
STEP = {"stock": "stock transformers", "logitless": "Logitless, fastest", "logitless 256 MiB": "Logitless, 256 MiB"}
PHASES = {"layers forward": 4.0, "head": 1.5, "layers backward": 4.0, "optimizer": 2.5}  # widths in the picture


def shown(head: str) -> str:
    """Returns the head's name on the pages. Records keep its name at the time of the run."""
    return plain(in_words(head))


@functools.cache
def study(name: str) -> dict[str, Cell]:
    """Returns the cells that were measured, as a whole or in part."""
    cells = read_json(ROOT / "bench" / "records" / "studies" / f"{name}.json.xz")["cells"]
    return {key: cell for key, cell in cells.items() if cell["status"] in ("ok", "partial")}


def draw_batches(folder: pathlib.Path) -> None:
    """Plots tokens per second of whole steps over the batch."""
    points_of: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for key, cell in study("scale").items():
        model, _, rest = key.partition("/")
        rows = [cell | {"head": rest.removeprefix("largest/")}] if "largest/" in rest else cell.get("rows", [])
        for row in rows:
            name = row["head"]
            if name in BATCHES and row["status"] == "ok":
                batch = cell["batch"] if "batch" in cell else int(rest[1:])
                points_of.setdefault((model, name), []).append((batch, row["tokens_per_second"]))
    figure, axes = new_axes("Whole steps over the batch", "sequences of 2,048 tokens", "tokens per second")
    for (model, name), points in points_of.items():
        look = {"marker": MARKERS[BATCHES[name]], "color": COLORS[BATCHES[name]], "label": f"{model}: {shown(name)}"}
        axes.plot(*zip(*sorted(points)), "--" if model == "transformer" else "-", **look)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    legend_below(figure)
    save_figure(figure, folder, "study-batches")


def draw_fine_tuning_loss(folder: pathlib.Path) -> None:
    """Plots loss curves over each other."""
    heads = {name: cell for name, cell in study("fine_tuning").items() if "held_out" in cell}
    figure, axes = new_axes("Fine-tuning, training loss", "step", "nats per token")
    for index, (name, cell) in enumerate(heads.items()):
        look = {"marker": MARKERS[index % len(MARKERS)], "color": COLORS[index % len(COLORS)], "linewidth": 1.2}
        steps = range(1, len(cell["losses"]) + 1)
        axes.plot(steps, cell["losses"], label=shown(name), markevery=(index, 12), **look)
    legend_below(figure)
    save_figure(figure, folder, "study-fine-tuning-loss")


def phase_places(timeline: list[dict[str, float]]) -> list[float]:
    """Places each moment in the picture: moments of a phase are spread evenly over the phase's width."""
    sizes = [sum(now.values()) for now in timeline]
    peak = sizes.index(max(sizes))
    head = [i for i in range(peak - 1, peak + 2) if timeline[i]["head"] > 1]
    end = next(i for i in range(peak, len(timeline)) if timeline[i]["activations"] < 10)
    bounds = [0, head[0], head[-1] + 1, end, len(timeline)]
    places, left = [], 0.0
    for first, last, width in zip(bounds, bounds[1:], PHASES.values()):
        places += [left + width * (i + 0.5) / (last - first) for i in range(last - first)]
        left += width
    return places


def draw_memory_of_a_step(folder: pathlib.Path) -> None:
    """Plots README's picture: memory of one fine-tuning step by category, a part per head."""
    cells = study("fine_tuning")
    figure, _ = new_axes("", "", "")
    figure.clear()
    figure.set_size_inches(10, 4.2)
    parts = figure.subplots(1, len(STEP), sharey=True)
    edges = list(itertools.accumulate(PHASES.values()))
    middles = [edge - width / 2 for edge, width in zip(edges, PHASES.values())]
    for axes, (name, title) in zip(parts, STEP.items()):
        timeline = cells[name]["memory"]["timeline"]
        places = phase_places(timeline)
        sizes = [[now[category] / GIB_IN_MIB for now in timeline] for category in SHADES]
        axes.stackplot(places, sizes, labels=list(SHADES), colors=list(SHADES.values()))
        axes.set_title(f"{title}: {cells[name]['peak_gib']:.1f} GiB", fontsize="medium", fontweight="bold")
        peak = max(range(len(timeline)), key=lambda i: sum(timeline[i].values()))
        text = f"head\n{timeline[peak]['head'] / GIB_IN_MIB:.1f} GiB"
        look = {"color": SHADES["head"], "arrowprops": {"arrowstyle": "-", "color": SHADES["head"]}}
        place = (places[peak], cells[name]["peak_gib"])
        axes.annotate(text, place, (2.0, 29), ha="center", va="center", fontweight="bold", **look)
        for edge in edges:
            axes.axvline(edge, color="black", alpha=0.25, linewidth=0.8)
        axes.set_xticks(middles, [phase.replace(" ", "\n") for phase in PHASES], fontsize="small")
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(0, edges[-1])
        axes.set_ylim(0, 36)
        axes.grid(True, axis="y", alpha=0.3)
    parts[0].set_ylabel("GPU memory, GiB")
    figure.supxlabel("one training step (phases are not to scale in time)", fontsize="medium")
    handles, labels = parts[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center")
    save_figure(figure, folder, "memory-of-a-step")
