"""Records of the studies in bench/records/studies, and the plots of docs/studies. ``xzcat`` shows a record; the pages
have its tables."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

from plots import COLORS, MARKERS, new_axes, save_figure
from record import read_json

ROOT = pathlib.Path(__file__).resolve().parents[2]
Cell = dict[str, Any]
GIB_IN_MIB = 1024
BATCHES = {"torch.compile": 0, "logitless": 2, "sparsified": 3}  # heads, and their colours and markers
# Categories of memory, from below: what every head has, then what heads differ by.
SHADES = {"weights": "#999999", "optimizer": "#bbbbbb", "gradients": "#56b4e9", "activations": "#009e73"}
SHADES |= {"head": "#d55e00", "other": "#cc79a7"}


@functools.cache
def study(name: str) -> dict[str, Cell]:
    """The cells that were measured, as a whole or in part."""
    cells = read_json(ROOT / "bench" / "records" / "studies" / f"{name}.json.xz")["cells"]
    return {key: cell for key, cell in cells.items() if cell["status"] in ("ok", "partial")}


def draw_batches(folder: pathlib.Path) -> None:
    """Tokens a second of whole steps over the batch."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for key, cell in study("scale").items():
        model, _, rest = key.partition("/")
        rows = [cell | {"head": rest.removeprefix("largest/")}] if "largest/" in rest else cell.get("rows", [])
        for row in rows:
            if row["head"] in BATCHES and row["status"] == "ok":
                batch = cell["batch"] if "batch" in cell else int(rest[1:])
                found.setdefault((model, row["head"]), []).append((batch, row["tokens_per_second"]))
    figure, axes = new_axes("Whole steps over the batch", "sequences of 2,048 tokens", "tokens a second")
    for (model, name), points in found.items():
        look = {"marker": MARKERS[BATCHES[name]], "color": COLORS[BATCHES[name]], "label": f"{model}, {name}"}
        axes.plot(*zip(*sorted(points)), "--" if model == "transformer" else "-", **look)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper")
    save_figure(figure, folder, "study-batches")


def draw_fine_tuning(folder: pathlib.Path) -> None:
    """Loss curves on each other, and memory over a step."""
    heads = {name: cell for name, cell in study("fine_tuning").items() if "held_out" in cell}
    figure, axes = new_axes("Fine-tuning, training loss", "step", "nats a token")
    for index, (name, cell) in enumerate(heads.items()):
        look = {"marker": MARKERS[index % len(MARKERS)], "color": COLORS[index % len(COLORS)], "linewidth": 1.2}
        steps = range(1, len(cell["losses"]) + 1)
        axes.plot(steps, cell["losses"], label=name, markevery=(index, 12), **look)
    figure.legend(loc="outside right upper")
    save_figure(figure, folder, "study-fine-tuning-loss")
    figure, _ = new_axes("", "", "")
    figure.clear()
    parts = figure.subplots(1, len(heads), sharey=True)
    for axes, (name, cell) in zip(parts, heads.items()):
        timeline = cell["memory"]["timeline"]
        sizes = [[now[category] / GIB_IN_MIB for now in timeline] for category in SHADES]
        axes.stackplot(range(len(timeline)), sizes, labels=list(SHADES), colors=list(SHADES.values()))
        axes.set_title(name, fontsize="small")
        axes.set_xticks([])
        axes.grid(True, axis="y", alpha=0.3)
    parts[0].set_ylabel("GiB")
    figure.supxlabel("one step: forward, head, backward, optimizer")
    figure.legend(*parts[0].get_legend_handles_labels(), loc="outside right upper")
    save_figure(figure, folder, "study-fine-tuning-memory")
