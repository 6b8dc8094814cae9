"""Tables of docs/studies/linear_rnn.md and accumulation.md, of the records of mve, scale, crossover, accumulation and
sparsity."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from plots import COLORS, MARKERS, new_axes, save_figure
from step_record import load_steps
from studies import RECORDS, ROOT, heads
from studies.record import Cell, StudyRecord
from table import markdown, number

NOT_RUN = ["This has not run."]
EARLIER_STEPS = ROOT / "bench" / "records" / "steps-2026-11-23.json"
PEAK_FLOP = 989e12  # of an H200, dense bf16, by its datasheet


def record_of(study: str) -> StudyRecord:
    return StudyRecord(study, RECORDS / f"{study}.json.xz")


def with_sources(record: StudyRecord, lines: list[str], keys: Iterable[str], compared: bool = True) -> list[str]:
    """The lines, and the calls that measured these cells; a warning where figures of several calls are compared."""
    return [*lines, "", *(f"- {line}" for line in record.about(keys, compared))] if lines else NOT_RUN


def last_validation(cell: Cell | None) -> float | None:
    """None where nothing was validated."""
    found: dict[str, float] = cell["validation"] if cell is not None else {}
    return float(found[str(max(map(int, found)))]) if found else None


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def run_speed(cell: Cell | None) -> float | None:
    """Tokens a second of a run; None where no step was timed."""
    ms = median(cell["step_ms"]) if cell is not None else None
    return 1e3 * float(cell["tokens"]) / ms if cell is not None and ms else None


def minus(a: float | None, b: float | None) -> float | None:
    return a - b if a is not None and b is not None else None


def divided(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def answer(value: float | None, good: Callable[[float], bool], form: str) -> str:
    """To a criterion, with its figure; a dash where it was not measured."""
    return "-" if value is None else f"{'yes' if good(value) else '**no**'}: {format(value, form)}"


def mve_runs() -> list[str]:
    record = record_of("mve")
    base = record.ok(f"run/{heads.BASELINE}")
    found = {name: cell for name in heads.ALL if (cell := record.ok(f"run/{name}")) is not None}
    lines = []
    for name, cell in found.items():
        loss, speed, peak = last_validation(cell), run_speed(cell), cell.get("peak_gib")
        away, faster = minus(loss, last_validation(base)), divided(speed, run_speed(base))
        more = divided(peak, base.get("peak_gib") if base else None)
        times = cell["step_ms"]
        cells = [name, number(loss, ".4f"), number(speed, ",.0f"), number(peak), number(median(times), ".1f")]
        cells[1] += f" ({away:+.4f})" if away is not None else ""
        cells[2] += f" ({faster:.3f})" if faster is not None else ""
        cells[3] += f" ({more:.3f})" if more is not None else ""
        cells[4] += f" ({min(times):.1f} to {max(times):.1f})" if times else ""
        lines.append(cells)
    head = ["head", "validation loss (minus baseline)", "tokens/s (x baseline)", "peak GiB (x baseline)", "ms a step *"]
    return with_sources(record, markdown(head, lines) if lines else [], [f"run/{name}" for name in found])


def best_batch(record: StudyRecord, name: str, most_gib: float) -> Cell | None:
    """The fastest of the larger batches whose peak is no more than the baseline's at its own batch."""
    found = [record.ok(key) for key in record.cells if key.startswith(f"batch/{name}/")]
    fits = [cell for cell in found if cell is not None and cell.get("peak_gib", float("inf")) <= most_gib]
    return max(fits, key=lambda cell: cell["tokens_per_second"], default=None)


def mve_batches() -> list[str]:
    """Tokens a second of each batch, in brackets in that of the baseline's at the same, and its peak."""
    record = record_of("mve")
    found: dict[str, dict[int, Cell]] = {}
    keys = [key for key in record.cells if key.startswith("batch/") and record.ok(key)]
    for key in keys:
        cell = record.cells[key]
        found.setdefault(key.split("/")[1], {})[cell["batch"]] = cell
    base = found.get(heads.BASELINE, {})

    def text(cell: Cell | None) -> str:
        if cell is None:
            return "-"
        speed, same = cell["tokens_per_second"], base.get(cell["batch"])
        faster = f" ({speed / same['tokens_per_second']:.2f})" if same is not None else ""
        return f"{speed:,.0f}{faster}, {number(cell.get('peak_gib'))} GiB"

    batches = sorted({batch for cells in found.values() for batch in cells})
    lines = [[name, *(text(cells.get(batch)) for batch in batches)] for name, cells in found.items()]
    head = ["head", *(f"{batch} sequences" for batch in batches)]
    return with_sources(record, markdown(head, lines) if lines else [], keys)


def mve_criteria() -> list[str]:
    """Each criterion of the proposal for each head, yes or no with its figure."""
    record = record_of("mve")
    base = record.ok(f"run/{heads.BASELINE}")
    first = record.ok(f"batch/{heads.BASELINE}/x1")
    if base is None or "peak_gib" not in base:
        return NOT_RUN
    head = ["head", "memory -50% or more", "speed within 5% at the same batch", "+10% or more with a larger batch"]
    head += ["loss within 0.01", "failed: slower", "failed: diverges"]
    found = {name: cell for name in heads.ALL if (cell := record.ok(f"run/{name}")) is not None}
    lines = []
    for name, cell in found.items():
        if name == heads.BASELINE:
            continue
        memory = minus(divided(cell.get("peak_gib"), base["peak_gib"]), 1.0)
        speed = minus(divided(run_speed(cell), run_speed(base)), 1.0)
        loss = minus(last_validation(cell), last_validation(base))
        larger = best_batch(record, name, base["peak_gib"])
        gain = larger["tokens_per_second"] / first["tokens_per_second"] - 1 if larger and first else None
        cells = [name, answer(memory, lambda x: x <= -0.5, "+.0%"), answer(speed, lambda x: x >= -0.05, "+.1%")]
        with_batch = f" with {larger['batch']} sequences" if larger and gain is not None else ""
        cells += [answer(gain, lambda x: x >= 0.1, "+.1%") + with_batch, answer(loss, lambda x: abs(x) <= 0.01, "+.4f")]
        cells.append("-" if speed is None else "yes" if speed < -0.05 else "no")
        cells.append("-" if loss is None else "yes" if abs(loss) > 0.1 else "no")
        lines.append(cells)
    keys = [key for key in record.cells if key.partition("/")[2].partition("/")[0] in found]
    return with_sources(record, markdown(head, lines), keys)


def scale_same() -> list[str]:
    """All heads at the baseline's batch, and what a step takes beyond one without a head: the head, and the optimizer's
    update of the head's weight."""
    record = record_of("scale")
    lines: list[str] = []
    keys = [key for key in record.cells if key.endswith("/B8") and record.holds(key)]
    for cell in (record.cells[key] for key in keys):
        rows = [row for row in cell["rows"] if row["status"] == "ok"]
        body = next((row for row in rows if row["head"] == "no head"), None)
        base = next((row for row in rows if row["head"] == heads.BASELINE), None)
        cells = []
        for row in rows:
            share = 1 - body["ms"] / row["ms"] if body and row is not body else None
            memory = 1 - body["peak_gib"] / row["peak_gib"] if body and row is not body and row["peak_gib"] else None
            line = [row["head"], f"{row['tokens_per_second']:,.0f}", number(row["ms"], ".1f")]
            line += [number(row["tokens_per_second"] / base["tokens_per_second"] if base else None, ".3f")]
            line += [number(row["peak_gib"]), ratio(row["peak_gib"], base["peak_gib"] if base else None)]
            lines_share = ["-" if value is None else f"{value:.1%}" for value in (share, memory)]
            cells.append(line + lines_share)
        model = cell["model"]
        lines += ["", f"{model['model']}, {model['sequences']} x {model['length']} tokens:", ""]
        head = [
            "head",
            "tokens/s",
            "ms a step",
            "x baseline",
            "peak GiB",
            "x baseline",
            "beyond no head: of the time",
            "of the memory",
        ]
        lines += markdown(head, cells)
    return with_sources(record, lines, keys, compared=False)


def ratio(a: float | None, b: float | None) -> str:
    return number(a / b if a is not None and b else None, ".3f")


def scale_largest() -> list[str]:
    """Under the cap: how many sequences fit, and what they bring."""
    record = record_of("scale")
    lines, keys = [], []
    for key in record.cells:
        model, _, name = key.partition("/largest/")
        cell, base = record.ok(key), record.ok(f"{model}/largest/{heads.BASELINE}")
        same = record.holds(f"{model}/B8")
        if not name or cell is None:
            continue
        keys += [key] + ([f"{model}/B8"] if same else [])
        rows = {row["head"]: row["tokens_per_second"] for row in same["rows"]} if same else {}
        small = rows.get(heads.BASELINE)
        line = [model, name, str(cell["batch"]), ratio(cell["batch"], base["batch"] if base else None)]
        line += [f"{cell['tokens_per_second']:,.0f}", ratio(cell["tokens_per_second"], small)]
        lines.append([*line, ratio(cell["tokens_per_second"], base["tokens_per_second"] if base else None)])
    head = ["model", "head", "sequences", "x baseline", "tokens/s", "x baseline with 8", "x baseline's largest"]
    return with_sources(record, markdown(head, lines) if lines else [], keys)


def scale_batches() -> list[str]:
    """Tokens a second over the batch, in brackets the share of the GPU's peak."""
    record = record_of("scale")
    found: dict[tuple[str, str], dict[int, str]] = {}
    keys = [key for key in record.cells if "/B" in key and record.holds(key)]
    for key in keys:
        model, _, batch = key.partition("/B")
        cell = record.cells[key]
        for row in cell["rows"]:
            if row["status"] == "ok" and row["tokens_per_second"]:
                share = cell["model_flop"] / (1e-3 * row["ms"]) / PEAK_FLOP if cell.get("model_flop") else None
                text = f"{row['tokens_per_second']:,.0f}" + (f" ({share:.0%})" if share else "")
                found.setdefault((model, row["head"]), {})[int(batch)] = text
    batches = sorted({batch for cells in found.values() for batch in cells})
    lines = [[*key, *(cells.get(batch, "-") for batch in batches)] for key, cells in found.items() if len(cells) > 2]
    head = ["model", "head", *(f"{batch} sequences" for batch in batches)]
    return with_sources(record, markdown(head, lines) if lines else [], keys)


def scale_earlier() -> list[str]:
    """GLA of an earlier record, where the baseline is flash-linear-attention's own head."""
    record = load_steps([str(EARLIER_STEPS)])
    rows = [row for row in record.steps if row.model == "gla-1.3b"]
    base = next(row for row in rows if row.head == "stock")
    lines = [
        [row.head, f"{row.tokens_per_second:,.0f}", ratio(row.tokens_per_second, base.tokens_per_second)]
        + [number(row.peak_gib), ratio(row.peak_gib, base.peak_gib)]
        for row in rows
    ]
    return markdown(["head", "tokens/s", "x stock (1.08 was predicted)", "peak GiB", "x stock (0.6)"], lines)


def crossover() -> list[str]:
    """Loss and gradients over the vocabulary: milliseconds, in that of torch.compile, and MiB beyond gradients."""
    record = record_of("crossover")
    found: dict[int, dict[str, Any]] = {}
    keys = [key for key in record.cells if record.holds(key)]
    for cell in (record.cells[key] for key in keys):
        rows = [row for row in cell["rows"] if row["pass_"] == "gradients"]
        found[cell["shape"]["vocab"]] = {row["method"]: row for row in rows}
    methods = list(dict.fromkeys(method for rows in found.values() for method in rows))
    lines = []
    for method in methods:
        line = [method]
        for vocab in sorted(found):
            row, base = found[vocab].get(method), found[vocab].get("torch.compile")
            if row is None or row["status"] != "ok":
                line.append("-" if row is None else row["status"])
                continue
            mib = f", {row['extra_mib'] - row['gradient_mib']:,.0f} MiB" if row["extra_mib"] is not None else ""
            line.append(
                f"{number(row['burst_ms'])} ({ratio(row['burst_ms'], base['burst_ms'] if base else None)}){mib}"
            )
        lines.append(line)
    head = ["head", *(f"V {vocab:,}" for vocab in sorted(found))]
    return with_sources(record, markdown(head, lines) if lines else [], keys, compared=False)


def accumulation_losses() -> list[str]:
    """A step's time is left out where the call's note says that it shared the GPU."""
    record = record_of("accumulation")
    runs = {key: cell for key in record.cells if "validation" in (cell := record.ok(key) or {})}
    lines = []
    for key, cell in runs.items():
        model, _, name = key.partition("/")
        wiki, loss = record.ok(f"{key}/wikitext2"), last_validation(cell)
        away = minus(loss, last_validation(runs.get(f"{model}/logitless")))
        ms = None if record.noted(key) else median(cell["step_ms"])
        line = [model, name, number(loss, ".4f"), number(away, "+.4f")]
        lines.append([*line, number(wiki["perplexity"] if wiki else None), number(ms)])
    head = ["model", "head", "validation loss", "minus exact", "WikiText-2 perplexity", "ms a step"]
    return with_sources(record, markdown(head, lines) if lines else [], runs)


def accumulation_errors() -> list[str]:
    record = record_of("accumulation")
    keys = [key for key in record.cells if "heads" in (record.ok(key) or {})]
    found = {key.partition("/")[0]: record.cells[key]["heads"] for key in keys}
    names = list(dict.fromkeys(name for rows in found.values() for name in rows))

    def cell_of(row: dict[str, Any] | None) -> str:
        return "-" if row is None or "d_hidden" not in row else f"{row['d_hidden']:.2%} / {row['d_weight']:.2%}"

    lines = [[name, *(cell_of(rows.get(name)) for rows in found.values())] for name in names]
    return with_sources(record, markdown(["head", *found], lines) if lines else [], keys, compared=False)


def sparsity() -> list[str]:
    record = record_of("sparsity")
    found = {key: cell for key in record.cells if (cell := record.ok(key)) is not None}
    what = {
        "elements above 2^-12": lambda c: f"{c['above']:.3%}",
        "the same a row": lambda c: f"{c['above_a_row']:.1f}",
        "blocks of 128 x 128 with such an element": lambda c: f"{c['blocks']:.1%}",
        "the same, vocabulary sorted by mean logit": lambda c: f"{c['sorted_blocks']:.1%}",
        "elements a row that thinning keeps at 2^-9": lambda c: f"{c['kept_a_row']:.1f}",
        "error of thinned dE, dC": lambda c: " / ".join(f"{c['errors']['thinned'][n]:.2%}" for n in ERRORS),
        "error of cce's dE, dC": lambda c: " / ".join(f"{c['errors']['cce'][n]:.2%}" for n in ERRORS),
    }
    lines = [[name, *(safely(make, cell) for cell in found.values())] for name, make in what.items()]
    return with_sources(record, markdown(["", *found], lines) if found else [], found, compared=False)


ERRORS = ("d_hidden", "d_weight")


def safely(make: Callable[[Cell], str], cell: Cell) -> str:
    try:
        return make(cell)
    except KeyError:
        return "-"


def sparsity_times() -> list[str]:
    """Backward is both minus the loss."""
    record = record_of("sparsity")
    keys = [key for key in record.cells if record.ok(key)]
    lines = []
    for key in keys:
        times = record.cells[key]["times"]
        base = backward_ms(times.get(heads.BASELINE))
        for name, row in times.items():
            backward = backward_ms(row)
            if backward is None:
                lines.append([key, name, row.get("reason", "-"), "-", "-", "-"])
                continue
            speed = divided(base, backward) if backward > 0 else None
            lines.append([key, name, number(row["loss"]), number(row["gradients"]), number(backward), number(speed)])
    head = ["model", "head", "loss, ms", "both, ms", "backward, ms", "speed of backward, x baseline"]
    return with_sources(record, markdown(head, lines) if lines else [], keys, compared=False)


def backward_ms(row: dict[str, Any] | None) -> float | None:
    """None of a head that failed."""
    return minus(row.get("gradients"), row.get("loss")) if row else None


def batch_points() -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Tokens a second over the batch, of each model and head."""
    record = record_of("scale")
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for key in record.cells:
        model, _, batch = key.partition("/B")
        cell = record.holds(key)
        for row in cell["rows"] if cell is not None and batch else []:
            if row["status"] == "ok" and row["tokens_per_second"] and row["head"] in PLOTTED:
                found.setdefault((model, row["head"]), []).append((int(batch), row["tokens_per_second"]))
        model, _, name = key.partition("/largest/")
        cell = record.ok(key)
        if cell is not None and name in PLOTTED:
            found.setdefault((model, name), []).append((cell["batch"], cell["tokens_per_second"]))
    return {key: sorted(points) for key, points in found.items() if len(points) > 1}


def draw(folder: pathlib.Path) -> list[pathlib.Path]:
    """Speed over the batch; nothing before there is a record."""
    points = batch_points()
    if not points:
        return []
    figure, axes = new_axes("Whole steps over the batch", "sequences of 2,048 tokens", "tokens a second")
    models = list(dict.fromkeys(model for model, _ in points))
    for (model, name), line in points.items():
        style = ("-", "--", ":", "-.")[models.index(model) % 4]
        color = COLORS[PLOTTED.index(name)]
        axes.plot(*zip(*line), style, marker=MARKERS[PLOTTED.index(name)], color=color, label=f"{model}, {name}")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper")
    return [save_figure(figure, folder, "study-batches", "svg")]


def batches_picture() -> list[str]:
    points = batch_points()
    if not points:
        return NOT_RUN
    ends = ", ".join(
        f"{model} with {name} {line[-1][1]:,.0f} at {line[-1][0]}" for (model, name), line in points.items()
    )
    return [f"![Tokens a second over the batch; with the largest one {ends} sequences.](../plots/study-batches.svg)"]


PLOTTED = (heads.BASELINE, "eager", "logitless", "thinned")
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
