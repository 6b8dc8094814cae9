"""Tables and pictures of docs/studies/fine_tuning.md, of the record of fine_tuning."""

from __future__ import annotations

import pathlib
import statistics

from plots import COLORS, MARKERS, new_axes, save_figure
from studies import RECORDS
from studies.record import Cell, StudyRecord
from studies.snapshot import CATEGORIES
from table import markdown, number

NOT_RUN = ["This has not run."]
LOSS, MEMORY = "study-fine-tuning-loss", "study-fine-tuning-memory"
GIB_IN_MIB = 1024
# of categories, from below: what every head has, then what heads differ by
SHADES = {"weights": "#999999", "optimizer": "#bbbbbb", "gradients": "#56b4e9", "activations": "#009e73"}
SHADES |= {"head": "#d55e00", "other": "#cc79a7"}


def record(name: str = "fine_tuning") -> StudyRecord:
    return StudyRecord("fine_tuning", RECORDS / f"{name}.json.xz")


def cells(found: StudyRecord) -> dict[str, Cell]:
    """The runs that were measured."""
    return {key: cell for key in found.cells if "held_out" in (cell := found.ok(key) or {})}


def runs() -> list[str]:
    """A row a head: losses, and the time and memory of a step."""
    found = record()
    heads = cells(found)
    stock = heads.get("stock")
    lines = []
    for name, cell in heads.items():
        line = [name, number(cell["held_out"][0], ".4f"), number(cell["held_out"][1], ".4f")]
        if stock is not None:
            away = [abs(a - b) for a, b in zip(cell["losses"], stock["losses"])]
            line += [
                f"{cell['held_out'][1] - stock['held_out'][1]:+.4f}",
                number(statistics.mean(away) if away else None, ".4f"),
            ]
            ratio = number(cell["ms"] / stock["ms"], ".3f")
        else:
            line += ["-", "-"]
            ratio = "-"
        line += [f"{1e3 * cell['tokens'] / cell['ms']:,.0f}", number(cell["ms"], ".1f"), ratio]
        lines.append([*line, number(cell.get("peak_gib"))])
    head = ["head", "held-out loss before", "after", "minus stock", "curve's mean distance from stock's"]
    head += ["tokens/s", "ms a step", "x stock", "peak GiB"]
    return [*markdown(head, lines), "", *(f"- {line}" for line in found.about(heads))] if lines else NOT_RUN


def cce() -> list[str]:
    """Why cce does not train here, of a record of its own, as its start is another one: errors of gradients at the
    start's weights, and held-out losses of the heads that were trained from there."""
    found = record("fine_tuning_cce")
    errors, trained = (found.ok("errors") or {"heads": {}})["heads"], cells(found)
    lines = []
    for name in dict.fromkeys([*errors, *trained]):
        before, after = trained[name]["held_out"] if name in trained else (None, None)
        row = errors.get(name, {})
        which = (row.get("d_hidden"), row.get("d_weight"))
        lines.append([name, *(number(value, ".2%") for value in which), number(before, ".4f"), number(after, ".4f")])
    head = ["head", "error of dE", "of dC", "held-out loss before", "after"]
    keys = [*trained, *(["errors"] if errors else [])]
    return [*markdown(head, lines), "", *(f"- {line}" for line in found.about(keys, False))] if lines else NOT_RUN


def memory() -> list[str]:
    """GiB of each category at the peak of one step."""
    lines = []
    for name, cell in cells(record()).items():
        at_peak = cell["memory"].get("at_peak")
        if at_peak:
            sizes = [at_peak[category] / GIB_IN_MIB for category in CATEGORIES]
            lines.append([name, *(number(size) for size in sizes), number(sum(sizes))])
    return markdown(["head", *CATEGORIES, "sum"], lines) if lines else NOT_RUN


def pictures() -> list[str]:
    heads = cells(record())
    if not heads:
        return NOT_RUN
    ends = ", ".join(f"{name} {cell['losses'][-1]:.3f}" for name, cell in heads.items() if cell["losses"])
    lines = [f"![Training loss of each head over the steps; the last ones are: {ends}.](../plots/{LOSS}.svg)"]
    peaks = {name: cell["memory"]["at_peak"] for name, cell in heads.items() if "at_peak" in cell["memory"]}
    if peaks:
        said = ", ".join(f"{name} {sum(sizes.values()) / GIB_IN_MIB:.1f}" for name, sizes in peaks.items())
        text = f"Memory of one step by category, a part a head; peaks in GiB: {said}."
        lines += ["", f"![{text}](../plots/{MEMORY}.svg)"]
    return lines


def draw(folder: pathlib.Path) -> list[pathlib.Path]:
    """Loss curves on each other, and memory over a step; nothing before there is a record."""
    heads = cells(record())
    if not heads:
        return []
    figure, axes = new_axes("Fine-tuning, training loss", "step", "nats a token")
    for index, (name, cell) in enumerate(heads.items()):
        marker, color = MARKERS[index % len(MARKERS)], COLORS[index % len(COLORS)]
        steps = range(1, len(cell["losses"]) + 1)
        axes.plot(steps, cell["losses"], color=color, label=name, linewidth=1.2, marker=marker, markevery=(index, 12))
    figure.legend(loc="outside right upper")
    found = [save_figure(figure, folder, LOSS, "svg")]
    timelines = {name: cell["memory"]["timeline"] for name, cell in heads.items() if "timeline" in cell["memory"]}
    return found + ([draw_memory(timelines, folder)] if timelines else [])


def draw_memory(timelines: dict[str, list[dict[str, float]]], folder: pathlib.Path) -> pathlib.Path:
    from matplotlib import pyplot

    figure, _ = new_axes("", "", "")
    figure.clear()
    parts = figure.subplots(1, len(timelines), sharey=True, squeeze=False)[0]
    for axes, (name, timeline) in zip(parts, timelines.items()):
        sizes = [[now[category] / GIB_IN_MIB for now in timeline] for category in CATEGORIES]
        axes.stackplot(range(len(timeline)), sizes, labels=CATEGORIES, colors=[SHADES[c] for c in CATEGORIES])
        axes.set_title(name, fontsize="small")
        axes.set_xticks([])
        axes.grid(True, axis="y", alpha=0.3)
    parts[0].set_ylabel("GiB")
    figure.supxlabel("one step: forward, head, backward, optimizer")
    figure.legend(*parts[0].get_legend_handles_labels(), loc="outside right upper")
    path = save_figure(figure, folder, MEMORY, "svg")
    pyplot.close(figure)
    return path


TABLES = {
    "fine-tuning-runs": runs,
    "fine-tuning-cce": cce,
    "fine-tuning-memory": memory,
    "fine-tuning-pictures": pictures,
}
