"""The tables of the pages in docs/ whose figures are in bench/records, and their plots.

    python bench/gpu/published.py

A record is what run.py --json writes, or bench/steps.py --json where its name begins with steps; --show of the same
program prints all of it. Those of the studies are read in studies.py, which makes plots of them: programs that are gone
wrote them, and the studies' pages keep their tables. A table stands between two comments that name it.
"""

from __future__ import annotations

import functools
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

from plots import plot_time_against_budget, plot_time_against_memory
from record import Record, Row, load, read_json
from step_record import load_steps, plot_steps, published_steps
from studies import ROOT, draw_batches, draw_fine_tuning
from table import host_table, markdown, number

RECORDS = ROOT / "bench" / "records"
RESULTS = ROOT / "docs" / "results.md"
TRAINING = ROOT / "docs" / "results_training.md"
PARALLEL = ROOT / "docs" / "parallel.md"
README = ROOT / "README.md"
PLOTS = ROOT / "docs" / "plots"
OVERLAP = "overlap-2026-11-24"
PLOTTED = ("gemma-2-2b", "llama-3-8b")  # against memory


def heads(record: Record) -> list[str]:
    """A row a method, of each head milliseconds and MiB beyond gradients."""
    head, methods = [""], dict.fromkeys(row.method for row in record.rows)
    for shape in record.shapes:
        head += [f"{shape.name}, ms", "MiB beyond gradients" if len(head) == 1 else "MiB"]
    lines = []
    for method in methods:
        cells = [method]
        for shape in record.shapes:
            row = next(row for row in record.rows if (row.method, row.shape) == (method, shape.name))
            cells += [number(row.burst_ms, ".1f") if row.status == "ok" else "fails", number(row.extra_mib, ".0f")]
        lines.append(cells)
    return markdown(head, lines)


def one_head(record: Record, words: dict[str, str] | None = None) -> list[str]:
    """A row a way to gradients of one head: time, memory, errors. words: the methods to show, and what they are."""
    (shape,) = record.shapes
    errors = {item.method: item for item in record.accuracy}
    bare = number(sum(record.gemms[shape.name].burst.values()), ".1f")
    lines = [] if words else [["three bare products", bare, "1.00", *["-"] * 4]]
    for row in (row for row in record.rows if row.pass_ == "gradients" and row.method in (words or {row.method})):
        error = errors[row.method]
        cells = [words[row.method] if words else row.method, number(row.burst_ms, ".1f")]
        assert row.extra_mib is not None
        cells += [number(row.burst_ratio), f"{row.extra_mib - row.gradient_mib:,.0f}"]
        cells += [number(error.loss_error, ".0e"), number(error.d_hidden_error, ".2%")]
        lines.append([*cells, number(error.d_weight_error, ".2%")])
    if words:
        order = list(words.values())
        lines.sort(key=lambda line: order.index(line[0]))
    head = ["", "time, ms", "of three bare products", "MiB beyond inputs and gradients", "error of the loss"]
    return markdown([*head, "of d_hidden", "of d_weight"], lines)


def budgets(record: Record) -> list[str]:
    """A row a budget, of each head burst / sustained in its three bare products."""

    def cell(row: Row) -> str:
        return "refused" if row.status == "refused" else f"{row.burst_ratio:.2f} / {row.sustained_ratio:.2f}"

    lines = []
    for budget in dict.fromkeys(row.budget_mib for row in record.rows):
        found = {row.shape: row for row in record.rows if row.budget_mib == budget}
        lines.append(["unlimited" if budget is None else str(budget), *(cell(found[s.name]) for s in record.shapes)])
    return markdown(["budget, MiB", *(shape.name for shape in record.shapes)], lines)


def ratios(record: Record) -> list[str]:
    """A row a head: F and 3F, the loss over F, each way to gradients over 3F, and memory of the loss."""
    methods = [method for method in dict.fromkeys(row.method for row in record.rows) if method != "logitless loss"]
    head = ["head", "N x V x D", "F, ms", "3F, ms", "loss / F"]
    head += [f"{method.removeprefix('logitless ')} / 3F" for method in methods] + ["loss, MiB"]

    def cell(row: Row) -> str:
        return f"{row.burst_ratio:.2f} / {row.sustained_ratio:.2f}" if row.status == "ok" else row.status

    lines = []
    for shape in record.shapes:
        found = {row.method: row for row in record.rows if row.shape == shape.name}
        sizes = f"{shape.tokens} x {shape.vocab} x {shape.hidden}"
        gemms, loss = record.gemms[shape.name].burst, found["logitless loss"]
        name = "" if "x" in shape.name and shape.name[0].isdigit() and shape.name[-1].isdigit() else shape.name
        cells = [name, sizes, number(gemms["logits"]), number(sum(gemms.values())), cell(loss)]
        lines.append(cells + [cell(found[method]) for method in methods] + [number(loss.extra_mib, ".1f")])
    if not any(line[0] for line in lines):
        head, lines = head[1:], [line[1:] for line in lines]
    return markdown(head, lines)


def overlap() -> list[str]:
    """Does the sum of d_hidden over ranks hide behind d_weight's product? Medians of each way at each head."""
    shapes: dict[str, dict[str, list[float]]] = read_json(RECORDS / f"{OVERLAP}.json")["shapes"]
    ways = list(next(iter(shapes.values())))
    lines = [[way, *(number(statistics.median(of[way]), ".3f") for of in shapes.values())] for way in ways]
    return markdown(["ms", *shapes], lines)


KINDS: dict[str, Callable[[Any], list[str]]] = {
    "head": one_head,
    "heads": heads,
    "budgets": budgets,
    "products": ratios,
    "odd": ratios,
    "random": ratios,
    "host": host_table,
    "steps": published_steps,
}
# Rows of README's table, which is of the first of TABLES.
FIRST_PAGE = {
    "canonical": "whole logits, upcast to float32 as transformers does, eager PyTorch",
    "torch.compile": "the same, torch.compile",
    "liger": "Liger",
    "apple cce": "Apple's cut-cross-entropy, which filters gradients",
    "apple cce_exact": "the same without filter, float32 sums",
    "logitless unlimited": 'Logitless, `max_workspace_bytes="fastest"`',
    "logitless default": "Logitless, nothing given",
    "logitless 256 MiB": 'Logitless, `"256MiB"`',
    "logitless 160 MiB": 'Logitless, `"160MiB"`',
    "logitless sparsified 2^-9": 'Logitless, [`gradient="sparsified"`](docs/sparsification.md) at 2^-9',
}
TABLES = (  # a kind and a date
    "head-2026-11-25",
    "heads-2026-11-22",
    "heads-2026-11-20",
    "budgets-2026-11-22",
    "products-2026-11-23",
    "odd-2026-11-23",
    "random-2026-11-23",
    "host-2026-11-23",
    "steps-2026-11-23",
)


def loaded(name: str) -> Any:
    path = RECORDS / f"{name}.json"
    return load_steps(path) if name.startswith("steps") else load(path)


def table_of(name: str) -> list[str]:
    return KINDS[name.partition("-")[0]](loaded(name))


# By page and name.
PAGES: dict[pathlib.Path, dict[str, Callable[[], list[str]]]] = {
    README: {TABLES[0]: lambda: one_head(loaded(TABLES[0]), FIRST_PAGE)},
    RESULTS: {name: functools.partial(table_of, name) for name in TABLES if not name.startswith("steps")},
    TRAINING: {name: functools.partial(table_of, name) for name in TABLES if name.startswith("steps")},
    PARALLEL: {OVERLAP: overlap},
}


def with_tables(page: pathlib.Path, text: str) -> str:
    for name, table in PAGES[page].items():
        before, after = f"<!-- {name} -->\n\n", f"\n\n<!-- /{name} -->"
        head, _, rest = text.partition(before)
        _, found, tail = rest.partition(after)
        if not found:
            raise SystemExit(f"{page}: expected {before.strip()} and {after.strip()}")
        text = head + before + "\n".join(table()).strip() + after + tail
    return text


def main() -> None:
    for page in PAGES:
        page.write_text(with_tables(page, page.read_text()))
    plot_time_against_budget(loaded("budgets-2026-11-22"), PLOTS)
    record = loaded("heads-2026-11-22")
    for shape in record.shapes:
        if shape.name in PLOTTED:
            plot_time_against_memory(record, shape, PLOTS)
    for name in TABLES:
        if name.startswith("steps"):
            steps = loaded(name)
            for model in steps.models:
                plot_steps(steps, model, PLOTS)
    draw_batches(PLOTS)
    draw_fine_tuning(PLOTS)


if __name__ == "__main__":
    main()
