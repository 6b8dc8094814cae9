"""Tables and the plot of docs/studies/linear_rnn.md and accumulation.md."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable
from typing import Any

from plots import COLORS, MARKERS, new_axes, save_figure
from step_record import load_steps
from studies.records import ROOT, Cell, study
from table import markdown, number

BASELINE = "torch.compile"
HEADS = (BASELINE, "fla", "liger", "cce_kahan_full_c", "logitless", "logitless 160 MiB", "thinned")
STYLES = {BASELINE: 0, "logitless": 2, "thinned": 3}  # of the plot
EARLIER_STEPS = ROOT / "bench" / "records" / "steps-2026-11-23.json"
PEAK_FLOP = 989e12  # of an H200, dense bf16, by its datasheet


def last_validation(cell: Cell) -> float:
    return float(cell["validation"][str(max(map(int, cell["validation"])))])


def run_speed(cell: Cell) -> float:
    """Tokens a second."""
    return 1e3 * float(cell["tokens"]) / statistics.median(cell["step_ms"])


def ratio(a: float | None, b: float | None) -> str:
    return number(a / b if a is not None and b else None, ".3f")


def mve_runs() -> list[str]:
    record = study("mve")
    found = {name: record.cells[f"run/{name}"] for name in HEADS}
    base = found[BASELINE]
    lines = []
    for name, cell in found.items():
        loss, speed, peak, times = last_validation(cell), run_speed(cell), cell["peak_gib"], cell["step_ms"]
        line = [name, f"{loss:.4f} ({loss - last_validation(base):+.4f})"]
        line += [f"{speed:,.0f} ({speed / run_speed(base):.3f})", f"{peak:.2f} ({peak / base['peak_gib']:.3f})"]
        lines.append([*line, f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"])
    head = "head | validation loss (minus baseline) | tokens/s (x baseline) | peak GiB (x baseline) | ms a step *"
    return markdown(head.split(" | "), lines) + record.sources(found.values())


def mve_batches() -> list[str]:
    """Tokens a second of each batch, in brackets in that of the baseline's at the same, and its peak."""
    record = study("mve")
    found: dict[str, dict[int, Cell]] = {}
    for key, cell in record.under("batch/").items():
        found.setdefault(key.split("/")[0], {})[cell["batch"]] = cell

    def text(cell: Cell) -> str:
        speed, same = cell["tokens_per_second"], found[BASELINE][cell["batch"]]["tokens_per_second"]
        return f"{speed:,.0f} ({speed / same:.2f}), {cell['peak_gib']:.2f} GiB"

    lines = [[name, *map(text, cells.values())] for name, cells in found.items()]
    head = ["head", *(f"{batch} sequences" for batch in found[BASELINE])]
    return markdown(head, lines) + record.sources(record.under("batch/").values())


def mve_criteria() -> list[str]:
    """Each criterion of the proposal for each head, yes or no with its figure. The larger batch is the fastest whose
    peak is no more than the baseline's at its own batch."""
    record = study("mve")
    base, first = record.cells[f"run/{BASELINE}"], record.cells[f"batch/{BASELINE}/x1"]

    def answer(value: float, good: bool, form: str) -> str:
        return f"{'yes' if good else '**no**'}: {format(value, form)}"

    lines = []
    for name in HEADS[1:]:
        cell = record.cells[f"run/{name}"]
        memory, speed = cell["peak_gib"] / base["peak_gib"] - 1, run_speed(cell) / run_speed(base) - 1
        loss = last_validation(cell) - last_validation(base)
        line = [name, answer(memory, memory <= -0.5, "+.0%"), answer(speed, speed >= -0.05, "+.1%")]
        fits = [cell for cell in record.under(f"batch/{name}/").values() if cell["peak_gib"] <= base["peak_gib"]]
        larger = max(fits, key=lambda cell: float(cell["tokens_per_second"]), default=None)
        if larger is None:
            line.append("-")
        else:
            gain = larger["tokens_per_second"] / first["tokens_per_second"] - 1
            line.append(f"{answer(gain, gain >= 0.1, '+.1%')} with {larger['batch']} sequences")
        line += [answer(loss, abs(loss) <= 0.01, "+.4f")]
        lines.append([*line, "yes" if speed < -0.05 else "no", "yes" if abs(loss) > 0.1 else "no"])
    head = "head | memory -50% or more | speed within 5% at the same batch | +10% or more with a larger batch | "
    head += "loss within 0.01 | failed: slower | failed: diverges"
    return markdown(head.split(" | "), lines) + record.sources(record.cells.values())


def scale_same() -> list[str]:
    """All heads at the baseline's batch, and what a step takes beyond one without a head: the head, and the optimizer's
    update of the head's weight."""
    record = study("scale")
    cells = [cell for key, cell in record.cells.items() if key.endswith("/B8")]
    head = "head | tokens/s | ms a step | x baseline | peak GiB | x baseline | beyond no head: of the time | "
    head += "of the memory"
    lines: list[str] = []
    for cell in cells:
        rows = {row["head"]: row for row in cell["rows"] if row["status"] == "ok"}
        base, body = rows[BASELINE], rows["no head"]
        found = []
        for name, row in rows.items():
            line = [name, f"{row['tokens_per_second']:,.0f}", f"{row['ms']:.1f}"]
            line += [ratio(row["tokens_per_second"], base["tokens_per_second"]), number(row["peak_gib"])]
            line += [ratio(row["peak_gib"], base["peak_gib"])]
            line += ["-" if row is body else f"{1 - body[what] / row[what]:.1%}" for what in ("ms", "peak_gib")]
            found.append(line)
        model = cell["model"]
        lines += ["", f"{model['model']}, {model['sequences']} x {model['length']} tokens:", ""]
        lines += markdown(head.split(" | "), found)
    return lines + record.sources(cells, compared=False)


def scale_largest() -> list[str]:
    """Under the cap: how many sequences fit, and what they bring."""
    record = study("scale")
    found = {tuple(key.split("/largest/")): cell for key, cell in record.cells.items() if "/largest/" in key}
    lines, used = [], []
    for (model, name), cell in found.items():
        base, same = found[model, BASELINE], record.cells[f"{model}/B8"]
        small = next(row["tokens_per_second"] for row in same["rows"] if row["head"] == BASELINE)
        speed = cell["tokens_per_second"]
        line = [model, name, str(cell["batch"]), ratio(cell["batch"], base["batch"]), f"{speed:,.0f}"]
        lines.append([*line, ratio(speed, small), ratio(speed, base["tokens_per_second"])])
        used += [cell, same]
    head = "model | head | sequences | x baseline | tokens/s | x baseline with 8 | x baseline's largest"
    return markdown(head.split(" | "), lines) + record.sources(used)


def scale_batches() -> list[str]:
    """Tokens a second over the batch, in brackets the share of the GPU's peak; of heads with three batches or more."""
    record = study("scale")
    found: dict[tuple[str, str], dict[int, str]] = {}
    cells = {key: cell for key, cell in record.cells.items() if "/B" in key}
    for key, cell in cells.items():
        model, _, batch = key.partition("/B")
        for row in (row for row in cell["rows"] if row["status"] == "ok"):
            share = cell["model_flop"] / (1e-3 * row["ms"]) / PEAK_FLOP
            text = f"{row['tokens_per_second']:,.0f} ({share:.0%})"
            found.setdefault((model, row["head"]), {})[int(batch)] = text
    batches = sorted({batch for row in found.values() for batch in row})
    lines = [[*key, *(row[batch] for batch in batches)] for key, row in found.items() if len(row) > 2]
    head = ["model", "head", *(f"{batch} sequences" for batch in batches)]
    return markdown(head, lines) + record.sources(cells.values())


def scale_earlier() -> list[str]:
    """GLA of an earlier record, where the baseline is flash-linear-attention's own head."""
    rows = [row for row in load_steps([str(EARLIER_STEPS)]).steps if row.model == "gla-1.3b"]
    base = rows[0]
    lines = [
        [row.head, f"{row.tokens_per_second:,.0f}", ratio(row.tokens_per_second, base.tokens_per_second)]
        + [number(row.peak_gib), ratio(row.peak_gib, base.peak_gib)]
        for row in rows
    ]
    return markdown(["head", "tokens/s", "x stock (1.08 was predicted)", "peak GiB", "x stock (0.6)"], lines)


def crossover() -> list[str]:
    """Loss and gradients over the vocabulary: milliseconds, in that of torch.compile, and MiB beyond gradients."""
    record = study("crossover")
    found: dict[int, dict[str, Any]] = {}
    for cell in record.cells.values():
        rows = [row for row in cell["rows"] if row["pass_"] == "gradients"]
        found[cell["shape"]["vocab"]] = {row["method"]: row for row in rows}

    def text(row: dict[str, Any], base: dict[str, Any]) -> str:
        times = f"{row['burst_ms']:.2f} ({ratio(row['burst_ms'], base['burst_ms'])})"
        return f"{times}, {row['extra_mib'] - row['gradient_mib']:,.0f} MiB"

    vocabs = sorted(found)
    methods = dict.fromkeys(method for rows in found.values() for method in rows)
    lines = [[name, *(text(found[vocab][name], found[vocab][BASELINE]) for vocab in vocabs)] for name in methods]
    return markdown(["head", *(f"V {vocab:,}" for vocab in vocabs)], lines) + record.sources(record.cells.values())


def accumulation_losses() -> list[str]:
    record = study("accumulation")
    runs = {key: cell for key, cell in record.cells.items() if "validation" in cell}
    lines = []
    for key, cell in runs.items():
        model, _, name = key.partition("/")
        loss, exact = last_validation(cell), last_validation(runs[f"{model}/logitless"])
        perplexity = record.cells[f"{key}/wikitext2"]["perplexity"]
        lines.append([model, name, f"{loss:.4f}", f"{loss - exact:+.4f}", f"{perplexity:.2f}"])
    head = ["model", "head", "validation loss", "minus exact", "WikiText-2 perplexity"]
    return markdown(head, lines) + record.sources(runs.values())


def accumulation_errors() -> list[str]:
    record = study("accumulation")
    cells = {key.partition("/")[0]: cell for key, cell in record.cells.items() if "heads" in cell}
    names = dict.fromkeys(name for cell in cells.values() for name in cell["heads"])

    def text(row: dict[str, Any]) -> str:
        return f"{row['d_hidden']:.2%} / {row['d_weight']:.2%}" if "d_hidden" in row else "-"

    lines = [[name, *(text(cell["heads"].get(name, {})) for cell in cells.values())] for name in names]
    return markdown(["head", *cells], lines) + record.sources(cells.values(), compared=False)


SPARSITY: dict[str, Callable[[Cell], str]] = {
    "elements above 2^-12": lambda c: f"{c['above']:.3%}",
    "the same a row": lambda c: f"{c['above_a_row']:.1f}",
    "blocks of 128 x 128 with such an element": lambda c: f"{c['blocks']:.1%}",
    "the same, vocabulary sorted by mean logit": lambda c: f"{c['sorted_blocks']:.1%}",
    "elements a row that thinning keeps at 2^-9": lambda c: f"{c['kept_a_row']:.1f}",
    "error of thinned dE, dC": lambda c: "{d_hidden:.2%} / {d_weight:.2%}".format(**c["errors"]["thinned"]),
    "error of cce's dE, dC": lambda c: "{d_hidden:.2%} / {d_weight:.2%}".format(**c["errors"]["cce"]),
}


def sparsity() -> list[str]:
    record = study("sparsity")
    lines = [[name, *(make(cell) for cell in record.cells.values())] for name, make in SPARSITY.items()]
    return markdown(["", *record.cells], lines) + record.sources(record.cells.values())


def sparsity_times() -> list[str]:
    """Backward is both minus the loss."""
    record = study("sparsity")
    lines = []
    for model, cell in record.cells.items():
        backward = {name: row["gradients"] - row["loss"] for name, row in cell["times"].items()}
        for name, row in cell["times"].items():
            times = [row["loss"], row["gradients"], backward[name], backward[BASELINE] / backward[name]]
            lines.append([model, name, *map(number, times)])
    head = ["model", "head", "loss, ms", "both, ms", "backward, ms", "speed of backward, x baseline"]
    return markdown(head, lines) + record.sources(record.cells.values())


def batch_points() -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Tokens a second over the batch, of each model and head."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for key, cell in study("scale").cells.items():
        model, _, rest = key.partition("/")
        rows = [cell | {"head": rest.removeprefix("largest/")}] if "largest/" in rest else cell.get("rows", [])
        for row in rows:
            if row["head"] in STYLES and row["status"] == "ok":
                batch = cell["batch"] if "batch" in cell else int(rest[1:])
                found.setdefault((model, row["head"]), []).append((batch, row["tokens_per_second"]))
    return {key: sorted(points) for key, points in found.items()}


def draw(folder: pathlib.Path) -> None:
    """Speed over the batch."""
    figure, axes = new_axes("Whole steps over the batch", "sequences of 2,048 tokens", "tokens a second")
    for (model, name), line in batch_points().items():
        look = {"marker": MARKERS[STYLES[name]], "color": COLORS[STYLES[name]], "label": f"{model}, {name}"}
        axes.plot(*zip(*line), "--" if model == "transformer" else "-", **look)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper")
    save_figure(figure, folder, "study-batches", "svg")


def batches_picture() -> list[str]:
    ends = (
        f"{model} with {name} {line[-1][1]:,.0f} at {line[-1][0]}" for (model, name), line in batch_points().items()
    )
    text = f"Tokens a second over the batch; with the largest one {', '.join(ends)} sequences."
    return [f"![{text}](../plots/study-batches.svg)"]


TABLES = {
    "scale-picture": batches_picture,
    "mve-criteria": mve_criteria,
    "mve-runs": mve_runs,
    "mve-batches": mve_batches,
    "scale-earlier": scale_earlier,
    "scale-same": scale_same,
    "scale-largest": scale_largest,
    "scale-batches": scale_batches,
    "crossover": crossover,
    "sparsity": sparsity,
    "sparsity-times": sparsity_times,
}
ACCUMULATION = {"accumulation-losses": accumulation_losses, "accumulation-errors": accumulation_errors}
