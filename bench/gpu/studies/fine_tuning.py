"""Tables and plots of docs/studies/fine_tuning.md."""

from __future__ import annotations

import pathlib
import statistics

from plots import COLORS, MARKERS, new_axes, save_figure
from studies.records import Cell, study
from table import markdown, number

LOSS, MEMORY = "study-fine-tuning-loss", "study-fine-tuning-memory"
GIB_IN_MIB = 1024
# Categories of memory, from below: what every head has, then what heads differ by.
SHADES = {"weights": "#999999", "optimizer": "#bbbbbb", "gradients": "#56b4e9", "activations": "#009e73"}
SHADES |= {"head": "#d55e00", "other": "#cc79a7"}
EXACT = "exact"
FEW_STEPS = 20  # left out of a mean of norms
SHOWN = ("answers", "an eighth", "plain text")  # arms whose gradients and optimizer the page shows; records have all
Key = tuple[str, str, str]  # model, arm and head


def trained(name: str = "fine_tuning") -> dict[str, Cell]:
    return {key: cell for key, cell in study(name).cells.items() if "held_out" in cell}


def table(heads: dict[str, Cell]) -> list[str]:
    """A row a head: losses, and the time and memory of a step."""
    stock, lines = heads.get("stock"), []
    for name, cell in heads.items():
        before, after = cell["held_out"]
        line = [name, f"{before:.4f}", f"{after:.4f}", "-", "-"]
        if stock is not None:
            away = statistics.mean(abs(a - b) for a, b in zip(cell["losses"], stock["losses"]))
            line[3:] = [f"{after - stock['held_out'][1]:+.4f}", f"{away:.4f}"]
        line += [f"{1e3 * cell['tokens'] / cell['ms']:,.0f}", f"{cell['ms']:.1f}"]
        line += [number(cell["ms"] / stock["ms"] if stock is not None else None, ".3f")]
        lines.append([*line, number(cell.get("peak_gib"))])
    head = "head | held-out loss before | after | minus stock | curve's mean distance from stock's | tokens/s | "
    head += "ms a step | x stock | peak GiB"
    return markdown(head.split(" | "), lines)


def runs() -> list[str]:
    return table(trained()) + study("fine_tuning").sources(trained().values())


def cce() -> list[str]:
    """Why cce does not train here, of a record of its own, as its start is another one: errors of gradients at the
    start's weights, and held-out losses of the heads that were trained from there."""
    record, heads = study("fine_tuning_cce"), trained("fine_tuning_cce")
    errors = record.cells["errors"]["heads"]
    lines = []
    for name in dict.fromkeys([*errors, *heads]):
        row, losses = errors.get(name, {}), heads.get(name, {}).get("held_out", (None, None))
        line = [name, *(number(row.get(which), ".2%") for which in ("d_hidden", "d_weight"))]
        lines.append([*line, *(number(value, ".4f") for value in losses)])
    head = ["head", "error of dE", "of dC", "held-out loss before", "after"]
    return markdown(head, lines) + record.sources([*heads.values(), record.cells["errors"]], compared=False)


def memory() -> list[str]:
    """GiB of each category at the peak of one step."""
    lines = []
    for name, cell in trained().items():
        sizes = [cell["memory"]["at_peak"][category] / GIB_IN_MIB for category in SHADES]
        lines.append([name, *map(number, sizes), number(sum(sizes))])
    return markdown(["head", *SHADES, "sum"], lines)


def pictures() -> list[str]:
    heads = trained()
    ends = ", ".join(f"{name} {cell['losses'][-1]:.3f}" for name, cell in heads.items())
    peaks = {name: sum(cell["memory"]["at_peak"].values()) / GIB_IN_MIB for name, cell in heads.items()}
    said = ", ".join(f"{name} {peak:.1f}" for name, peak in peaks.items())
    return [
        f"![Training loss of each head over the steps; the last ones are: {ends}.](../plots/{LOSS}.svg)",
        "",
        f"![Memory of one step by category, a part a head; peaks in GiB: {said}.](../plots/{MEMORY}.svg)",
    ]


def draw(folder: pathlib.Path) -> None:
    """Loss curves on each other, and memory over a step."""
    heads = trained()
    figure, axes = new_axes("Fine-tuning, training loss", "step", "nats a token")
    for index, (name, cell) in enumerate(heads.items()):
        look = {"marker": MARKERS[index % len(MARKERS)], "color": COLORS[index % len(COLORS)], "linewidth": 1.2}
        steps = range(1, len(cell["losses"]) + 1)
        axes.plot(steps, cell["losses"], label=name, markevery=(index, 12), **look)
    figure.legend(loc="outside right upper")
    save_figure(figure, folder, LOSS, "svg")
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
    save_figure(figure, folder, MEMORY, "svg")


def seeds_of(arms: tuple[str, ...] | None = None) -> dict[Key, list[Cell]]:
    """The runs of the seeds, one record a seed; those of the full model first."""
    found: dict[Key, list[Cell]] = {}
    for part in range(1, 5):
        for key, cell in study(f"fine_tuning_seeds-{part}-of-4").cells.items():
            model, arm, *rest = key.split("/")
            if model != "start" and (arms is None or arm in arms):
                found.setdefault((model, arm, rest[0]), []).append(cell)
    return dict(sorted(found.items(), key=lambda item: item[0][0] != "full"))


def seeds() -> list[str]:
    found, lines = seeds_of(), []

    def norm(cell: Cell) -> float:
        return statistics.mean(cell["grad_norms"][FEW_STEPS:])

    def mean(of: list[float]) -> str:
        return f"{statistics.mean(of):+.4f} ± {statistics.stdev(of) / len(of) ** 0.5:.4f}" if of else "-"

    for (model, arm, head), cells in found.items():
        # An arm of exact gradients alone stands beside the study's own.
        base = found[model, arm, EXACT] if head != EXACT else found[model, "answers", EXACT] if "rate" in arm else []
        line = [model, arm, head, f"{statistics.mean(cell['supervised'] for cell in cells):,.0f}"]
        line += [f"{statistics.mean(cell['held_out'][1][0] for cell in cells):.4f}"]
        whole, unused = (
            [one["held_out"][1][i] - other["held_out"][1][i] for one, other in zip(cells, base)] for i in (0, 1)
        )
        line += [" ".join(f"{value:+.3f}" for value in whole) or "-", mean(whole), mean(unused)]
        ratios = [norm(one) / norm(other) for one, other in zip(cells, base)]
        line += [number(statistics.mean(ratios) if ratios else None, ".3f")]
        lines.append([*line, f"{statistics.mean(cell['clipped'] for cell in cells):.0%}"])
    head = "model | arm | gradient | labels a step | held-out loss after | minus exact, a seed each | mean | "
    head += "in unused tokens | norm of the gradient, x exact | steps clipped"
    record = study("fine_tuning_seeds-1-of-4")
    return markdown(head.split(" | "), lines) + record.sources(record.cells.values(), compared=False)


def noise() -> list[str]:
    """How far a draw is from the exact gradient, where the first exact run starts and ends."""
    lines = []
    for (model, arm, _), cells in seeds_of(SHOWN).items():
        for when, rows in cells[0].get("noise", {}).items():
            for name, row in rows.items():
                if name != "norms":
                    sizes = [number(row[group], ".2%") for group in rows["norms"]]
                    lines.append([model, arm, when, name, *sizes, number(row["norm"], ".4f")])
    head = "model | arm | at its | gradient | hidden states | layers | head's used rows | other rows | norm, x exact"
    return markdown(head.split(" | "), lines)


def adam() -> list[str]:
    """Mean size of Adam's steps in parts of the rate, and the share of weights that move."""
    lines = []
    for key, cells in seeds_of(SHOWN).items():
        for step in ("10", "50"):
            looks = [cell["adam"][step] for cell in cells]
            means = ((statistics.mean(look[group][i] for look in looks) for i in (0, 1)) for group in looks[0])
            lines.append([*key, step, *(f"{size:.3f} ({moved:.0%})" for size, moved in means)])
    return markdown(["model", "arm", "gradient", "step", "layers", "head's used rows", "other rows"], lines)


TABLES = {
    "fine-tuning-runs": runs,
    "fine-tuning-cce": cce,
    "fine-tuning-memory": memory,
    "fine-tuning-pictures": pictures,
    "fine-tuning-seeds": seeds,
    "fine-tuning-noise": noise,
    "fine-tuning-adam": adam,
}
