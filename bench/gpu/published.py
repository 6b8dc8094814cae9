"""Writes the tables of docs/results.md and README.md whose figures are in bench/records, and the plots of records.

    python bench/gpu/published.py

``run.py --json``, steps.py, host.py, parallel.py and fsdp.py write records; --show of the same program prints all of a
record. studies.py plots the records of the studies, whose pages keep their tables. A table stands between two comments
that name its record. The line before it says where its figures come from.
"""

from __future__ import annotations

import argparse
import functools
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

from plots import plot_time_against_budget, plot_time_against_memory
from ranks import in_turns
from record import Record, Row, command_of, load, read_json
from step_record import StepRecord, load_steps, plot_steps, published_steps
from studies import ROOT, draw_batches, draw_fine_tuning_loss, draw_memory_of_a_step
from table import host_table, markdown, number
from terms import MATMULS, budget_words, gradients_are, in_words

RECORDS = ROOT / "bench" / "records"
DOCS = ROOT / "docs"
RESULTS = DOCS / "results.md"
README = ROOT / "README.md"
PLOTS = DOCS / "plots"
HEAD, HEADS = "peers-2026-11-27", "heads-2026-11-22"  # both are plotted against memory, the second for one of its heads


# Words of rows without figures.
FAULTS = {"failed": "fails", "refused": "refused", "skipped": "not run"}


def two(idle: float | None, steady: float | None, form: str = ".2f") -> str:
    """Formats the time after idle and the steady time."""
    return f"{number(idle, form)} / {number(steady, form)}"


def beyond(row: Row) -> str:
    """Formats MiB beyond inputs and gradients."""
    return "-" if row.extra_mib is None else f"{row.extra_mib - row.gradient_mib:,.0f}"


def heads(record: Record) -> list[str]:
    """A row per method: for each head milliseconds after idle, and MiB beyond gradients."""
    head, methods = [""], dict.fromkeys(row.method for row in record.rows)
    for shape in record.shapes:
        head += [f"{shape.name}, ms", "extra MiB"]
    lines = []
    for method in methods:
        cells = [in_words(method)]
        for shape in record.shapes:
            row = next(row for row in record.rows if (row.method, row.shape) == (method, shape.name))
            cells += [number(row.burst_ms, ".1f") if row.status == "ok" else FAULTS[row.status], beyond(row)]
        lines.append(cells)
    return markdown(head, lines)


def errors_of(record: Record) -> dict[str, list[str]]:
    """Relative errors of loss, d_hidden and d_weight, by method."""
    return {
        item.method: [
            number(item.loss_error, ".0e"),
            number(item.d_hidden_error, ".2%"),
            number(item.d_weight_error, ".2%"),
        ]
        for item in record.accuracy
        if item.pass_ not in ("tokens", "entropy")
    }


def costs_of(record: Record) -> dict[str, list[str]]:
    """Steady time and memory with gradients, by method."""
    rows = (row for row in record.rows if row.pass_ == "gradients")
    return {row.method: [number(row.sustained_ms, ".1f"), beyond(row)] for row in rows}


def calls_of(record: Record) -> dict[str, dict[str, Row]]:
    """Each method's rows by pass: ours, then peers by their time with gradients. One without any figure is left out."""
    methods: dict[str, dict[str, Row]] = {}
    for row in record.rows:
        methods.setdefault(row.method, {})[row.pass_] = row

    def order(item: tuple[str, dict[str, Row]]) -> tuple[bool, float]:
        row = next(iter(item[1].values()))
        return not row.ours, 0.0 if row.ours else item[1]["gradients"].burst_ms or math.inf

    measured = {method: of for method, of in methods.items() if any(row.extra_mib for row in of.values())}
    return dict(sorted(measured.items(), key=order))


def times_of(row: Row | None, form: str = "") -> str:
    """Formats a row's ratios, or its times in the given form, or why it has none."""
    if row is None or row.status != "ok":
        return "-" if row is None else FAULTS[row.status]
    return two(row.burst_ms, row.sustained_ms, form) if form else two(row.burst_ratio, row.sustained_ratio)


def with_gradients(record: Record) -> list[str]:
    """A row per way to compute one head's mean loss and gradients: time, memory, errors."""
    (gemms,), errors = record.gemms.values(), errors_of(record)
    lines = [[MATMULS, two(sum(gemms.burst.values()), sum(gemms.sustained.values()), ".1f"), *["-"] * 6]]
    for method, of in calls_of(record).items():
        if row := of.get("gradients"):
            ratios = times_of(row) if row.status == "ok" else "-"
            cells = [in_words(method), times_of(row, ".1f"), ratios, beyond(row), gradients_are(method)]
            lines.append([*cells, *errors.get(method, ["-"] * 3)])
    head = ["", "ms", f"of {MATMULS}", "extra MiB", "loss and gradients are", "error of the loss"]
    return markdown([*head, "of d_hidden", "of d_weight"], lines)


def other_calls(record: Record) -> list[str]:
    """A row per method: the mean loss alone, then gradients of a loss for each token, without and with an entropy."""
    (gemms,), errors = record.gemms.values(), {(item.method, item.pass_): item for item in record.accuracy}
    one = two(gemms.burst["logits"], gemms.sustained["logits"], ".1f") + " ms"
    three = two(sum(gemms.burst.values()), sum(gemms.sustained.values()), ".1f") + " ms"
    lines = [["one matmul, or three", one, "-", three, "-", "-", three, "-", "-"]]
    for method, of in calls_of(record).items():
        cells = [in_words(method)]
        for pass_, name in {"loss": "", "tokens": "loss_error", "entropy": "entropy_error"}.items():
            row, error = of.get(pass_), errors.get((method, pass_))
            cells += [times_of(row), beyond(row) if row else "-"]
            cells += [number(error and getattr(error, name), ".0e")] if name else []
        if set(cells[1:]) != {"-"}:
            lines.append(cells)
    head = ["", "loss alone", "MiB", "a loss for each token", "MiB", "error of the losses"]
    return markdown([*head, "entropies, too", "MiB", "error of the entropies"], lines)


def peers(record: Record) -> list[str]:
    """One head's calls by every method."""
    tables = {"The mean loss and its gradients:": with_gradients, "Other calls, of one matmul or three:": other_calls}
    return [line for words, table in tables.items() for line in (words, "", *table(record), "")][:-1]


# README's rows: methods of HEAD's record, and their names there.
FIRST_PAGE = {
    "canonical": "PyTorch eager (transformers' default)",
    "torch.compile": "torch.compile",
    "liger": "Liger",
    "logitless default": "**Logitless**, exact",
    "logitless 256 MiB": "**Logitless**, exact, at most 256 MiB",
    "logitless sparsified 2^-9": "**Logitless**, [sparsified gradients](docs/sparsified.md)",
}


# Rows of the pages on PyTorch, which compares its own function, and on numerics.
PYTORCH_PAGE = {
    "torch fused": "`F.linear_cross_entropy`",
    "torch fused chunked": "`F.linear_cross_entropy` with `options`",
    "logitless default": "Logitless, default",
    "logitless 256 MiB": 'Logitless, `"256MiB"`',
}
NUMERICS_PAGE = {
    "logitless sparsified 2^-9": "sparsified gradients, 2^-9",
    "logitless unlimited": 'exact, `"fastest"`',
    "logitless default": "exact, by default",
    "logitless 256 MiB": "exact, 256 MiB",
    "canonical": "eager PyTorch, logits upcast to float32",
    "torch.compile": "`torch.compile`",
}


def first_page() -> list[str]:
    """Steady time and memory of a few ways, whether their gradients are exact, and PyTorch's own function below."""
    costs = costs_of(loaded(HEAD))
    lines = [[words, *costs[method], gradients_are(method)] for method, words in FIRST_PAGE.items()]
    ms, mib = costs["torch fused"]
    own = (
        f"PyTorch 2.13's `F.linear_cross_entropy` takes {ms} ms and {mib} MiB (its Python source, under PyTorch 2.11)."
    )
    return [*markdown(["", "time, ms", "extra memory, MiB", "loss and gradients are"], lines), "", own]


def pytorch_page() -> list[str]:
    costs, errors = costs_of(loaded(HEAD)), errors_of(loaded(HEAD))
    lines = [[words, *costs[method], *errors[method]] for method, words in PYTORCH_PAGE.items()]
    return markdown(["", "ms", "extra MiB", "error of the loss", "of d_hidden", "of d_weight"], lines)


def numerics_page() -> list[str]:
    errors = errors_of(loaded(HEAD))
    lines = [[words, *errors[method]] for method, words in NUMERICS_PAGE.items()]
    return markdown(["head", "loss", "`d_hidden`", "`d_weight`"], lines)


def engines(record: Record) -> list[str]:
    """A row per engine, budget and pass: for each head the time in its matmuls, and MiB beyond gradients."""
    lines = []
    for method, kind in dict.fromkeys((row.method, row.pass_) for row in record.rows):
        cells = [in_words(method.removesuffix(" loss")) + (", loss" if kind == "loss" else "")]
        for shape in record.shapes:
            key = (method, kind, shape.name)
            row = next(row for row in record.rows if (row.method, row.pass_, row.shape) == key)
            cells.append(f"{two(row.burst_ratio, row.sustained_ratio)} ({beyond(row)})")
        lines.append(cells)
    return markdown(["of one matmul (loss) or three", *(shape.name for shape in record.shapes)], lines)


def screens(record: Record) -> list[str]:
    """A row per call and head: the time in matmuls, MiB beyond gradients, and errors."""
    lines = []
    for shape in record.shapes:
        errors = {(item.method, item.pass_): item for item in record.accuracy if item.shape == shape.name}
        for row in (row for row in record.rows if row.shape == shape.name):
            # Behind a screen a loss alone is the one of the call with gradients, bit by bit.
            item = errors.get((row.method, row.pass_)) or errors[row.method, "gradients"]
            loss_only = row.pass_ == "loss"
            name = in_words(row.method.removesuffix(" loss")) + (", loss alone" if loss_only else "")
            name = re.sub(", fp8$|, fp8(?=,)", ", screen", name)
            cells = [shape.name, name, two(row.burst_ratio, row.sustained_ratio)]
            cells += [two(row.burst_ms, row.sustained_ms), beyond(row), number(item.loss_error, ".0e")]
            both = (item.d_hidden_error, item.d_weight_error)
            lines.append(cells + ["-" if loss_only else number(error, ".2%") for error in both])
    head = ["head", "", "of one matmul (loss) or three", "ms", "extra MiB"]
    return markdown(head + ["error of the loss", "of d_hidden", "of d_weight"], lines)


def budgets(record: Record) -> list[str]:
    """A row per budget: for each head the time in three matmuls."""

    def cell(row: Row) -> str:
        return "none fits" if row.status == "refused" else two(row.burst_ratio, row.sustained_ratio)

    lines = []
    for budget in dict.fromkeys(row.budget_mib for row in record.rows):
        by_shape = {row.shape: row for row in record.rows if row.budget_mib == budget}
        name = budget_words("unlimited") if budget is None else str(budget)
        lines.append([name, *(cell(by_shape[s.name]) for s in record.shapes)])
    return markdown(["budget, MiB", *(shape.name for shape in record.shapes)], lines)


def ratios(record: Record) -> list[str]:
    """A row per head: its matmul, the loss over one matmul, each way to gradients over three, and the loss's memory."""
    methods = [method for method in dict.fromkeys(row.method for row in record.rows) if method != "logitless loss"]
    head = ["head", "N x V x D", "one matmul, ms", "three, ms", "loss"]
    head += [budget_words(method.removeprefix("logitless ")) for method in methods] + ["loss, MiB"]

    def cell(row: Row) -> str:
        words = {"ok": two(row.burst_ratio, row.sustained_ratio), "refused": "none fits"}
        return words.get(row.status, row.status)

    lines = []
    for shape in record.shapes:
        by_method = {row.method: row for row in record.rows if row.shape == shape.name}
        sizes = f"{shape.tokens} x {shape.vocab} x {shape.hidden}"
        gemms, loss = record.gemms[shape.name].burst, by_method["logitless loss"]
        name = "" if "x" in shape.name and shape.name[0].isdigit() and shape.name[-1].isdigit() else shape.name
        cells = [name, sizes, number(gemms["logits"]), number(sum(gemms.values())), cell(loss)]
        lines.append(cells + [cell(by_method[method]) for method in methods] + [number(loss.extra_mib, ".1f")])
    if not any(line[0] for line in lines):
        head, lines = head[1:], [line[1:] for line in lines]
    return markdown(head, lines)


# Ways of two ranks: their names in the record, and in the table.
WAYS = {
    "sparsified, peaked, vocabulary parallel": "sparsified 2^-9, peaked logits",
    "sparsified, flat, vocabulary parallel": "sparsified 2^-9, flat logits",
    "sequence parallel": "exact, sequence parallel",
    "vocabulary parallel": "exact",
    "loss, vocabulary parallel": "loss alone",
    "shards alone": "half the vocabulary on each GPU, no exchange",
}


def groups(record: dict[str, Any]) -> list[str]:
    """A row per way to share a head: for each head the time over one GPU's, and the memory of both."""
    shapes = {name: {way: of for way, of in ways.items()} for name, ways in record["shapes"].items()}

    def cell(ways: dict[str, Any], way: str) -> str:
        alone = way.replace("vocabulary parallel", "one GPU") if "," in way else "one GPU"
        ratio = (in_turns(ways[way], ways[alone], which)[1] for which in ("ms", "steady_ms"))
        return two(*ratio, ".3f")

    lines = [[words, *(cell(ways, way) for ways in shapes.values())] for way, words in WAYS.items()]
    for way, words in {"vocabulary parallel": "exact, ms", "one GPU": "one GPU, exact, ms"}.items():
        times = [[in_turns(ways[way], None, which)[0] for which in ("ms", "steady_ms")] for ways in shapes.values()]
        lines.append([words, *(two(*of, ".1f") for of in times)])
    peaks = ["peak above inputs: one GPU, each of two, MiB"]
    for ways in shapes.values():
        both = (ways[way]["peak_bytes"] / 2**20 for way in ("one GPU", "vocabulary parallel"))
        peaks.append(", ".join(f"{mib:,.0f}" for mib in both))
    lines.append(peaks)
    return markdown(["time over one GPU's", *(" x ".join(name.split("x")) for name in shapes)], lines)


def sharded_steps(record: dict[str, Any]) -> list[str]:
    """A row per head of whole steps under FSDP2. Memory is above weights and optimizer."""
    heads = {head: of for head, of in record["heads"].items() if head != "no head"}
    rest, lines = record["heads"]["no head"]["peak_bytes"], []
    for head, of in heads.items():
        ms, ratio = in_turns(of, heads["stock"], "ms")
        peak = of["peak_bytes"]
        gib = [number(size / 2**30, ".1f") for size in (peak, peak - rest)]
        lines.append([in_words(head), number(ms, ".0f"), number(ratio, ".3f"), *gib])
    return markdown(["head", "ms a step", "x stock", "peak, GiB", "of it the head's, GiB"], lines)


KINDS: dict[str, Callable[[Any], list[str]]] = {
    "heads": heads,
    "peers": peers,
    "engines": engines,
    "budgets": budgets,
    "products": ratios,
    "odd": ratios,
    "random": ratios,
    "screen": screens,
    "host": host_table,
    "steps": published_steps,
    "parallel": groups,
    "fsdp": sharded_steps,
}
PLAIN = ("parallel", "fsdp")  # kinds of records that are not lists of rows
TABLES = (  # kind and date
    HEAD,
    "peers-llama-2026-11-27",
    "peers-quack-2026-11-27",
    "engines-2026-11-26",
    "engines-h100-2026-11-26",
    "engines-h100-peaked-2026-11-26",
    HEADS,
    "heads-2026-11-20",
    "budgets-2026-11-22",
    "products-2026-11-23",
    "odd-2026-11-23",
    "random-2026-11-23",
    "screen-trained-2026-11-27",
    "screen-trained-code-2026-11-27",
    "screen-2026-11-27",
    "screen-more-2026-11-27",
    "host-2026-11-23",
    "steps-2026-11-23",
    "parallel-2026-11-24",
    "fsdp-2026-11-24",
)


def kind_of(name: str) -> str:
    return name.partition("-")[0]


@functools.cache
def loaded(name: str) -> Any:
    path = RECORDS / f"{name}.json"
    if kind_of(name) in PLAIN:
        return read_json(path)
    return load_steps(path) if kind_of(name) == "steps" else load(path)


def facts_of(name: str) -> dict[str, Any]:
    """Returns device, date and command; a plain record stores them beside its figures."""
    record = loaded(name)
    return record if kind_of(name) in PLAIN else record.meta  # type: ignore[no-any-return]


def source(name: str) -> str:
    """Returns the source of a table: GPU, date, commands, record."""
    facts = facts_of(name)
    gpu = re.match(r"NVIDIA \w+", facts["device"])
    assert gpu, name
    which = f"Two {gpu[0]}s" if facts.get("ranks", 1) == 2 else f"One {gpu[0]}"
    run = ", ".join(f"`{command}`" for command in command_of(facts).split("; "))
    return f"{which}, {facts['date'][:10]}: {run}; record: `bench/records/{name}.json`."


def table_of(name: str) -> list[str]:
    return [source(name), "", *KINDS[kind_of(name)](loaded(name))]


# Keys are page and name.
PAGES: dict[pathlib.Path, dict[str, Callable[[], list[str]]]] = {
    README: {HEAD: first_page},
    DOCS / "pytorch.md": {HEAD: pytorch_page},
    DOCS / "numerics.md": {HEAD: numerics_page},
    RESULTS: {name: functools.partial(table_of, name) for name in TABLES},
}


def with_tables(page: pathlib.Path, text: str) -> str:
    for name, table in PAGES[page].items():
        before, after = f"<!-- {name} -->\n\n", f"\n\n<!-- /{name} -->"
        head, _, rest = text.partition(before)
        _, marker, tail = rest.partition(after)
        if not marker:
            raise SystemExit(f"{page}: expected {before.strip()} and {after.strip()}")
        text = head + before + "\n".join(table()).strip() + after + tail
    return text


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page in PAGES:
        page.write_text(with_tables(page, page.read_text()))
    plot_time_against_budget(loaded("budgets-2026-11-22"), PLOTS)
    for name, head in ((HEAD, "gemma-2-2b"), (HEADS, "llama-3-8b")):
        record: Record = loaded(name)
        (shape,) = (shape for shape in record.shapes if shape.name == head)
        plot_time_against_memory(record, shape, PLOTS)
    for name in TABLES:
        if kind_of(name) == "steps":
            steps: StepRecord = loaded(name)
            for model in steps.models:
                plot_steps(steps, model, PLOTS)
    draw_batches(PLOTS)
    draw_fine_tuning_loss(PLOTS)
    draw_memory_of_a_step(PLOTS)


if __name__ == "__main__":
    main()
