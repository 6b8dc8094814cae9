"""The tables of the results' pages in docs/ whose figures are in bench/records, and their plots.

    python bench/gpu/published.py            writes tables and plots
    python bench/gpu/published.py --check    says whether the tables are those of the records

A record is what run.py --json writes, or bench/steps.py --json where its name begins with steps; --show of the same
program prints all of it. A table stands between two comments that name it.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

from plots import plot_time_against_budget, plot_time_against_memory
from record import Record, Row, load
from step_record import draw_steps, load_steps, published_steps
from table import markdown, number

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDS = ROOT / "bench" / "records"
RESULTS = ROOT / "docs" / "results.md"
TRAINING = ROOT / "docs" / "results_training.md"
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
    methods = [method for method in dict.fromkeys(row.method for row in record.rows) if method != "headroom loss"]
    head = ["head", "N x V x D", "F, ms", "3F, ms", "loss / F"]
    head += [f"{method.removeprefix('headroom ')} / 3F" for method in methods] + ["loss, MiB"]

    def cell(row: Row) -> str:
        return f"{row.burst_ratio:.2f} / {row.sustained_ratio:.2f}" if row.status == "ok" else row.status

    lines = []
    for shape in record.shapes:
        found = {row.method: row for row in record.rows if row.shape == shape.name}
        sizes = f"{shape.tokens} x {shape.vocab} x {shape.hidden}"
        gemms, loss = record.gemms[shape.name].burst, found["headroom loss"]
        name = "" if "x" in shape.name and shape.name[0].isdigit() and shape.name[-1].isdigit() else shape.name
        cells = [name, sizes, number(gemms["logits"]), number(sum(gemms.values())), cell(loss)]
        lines.append(cells + [cell(found[method]) for method in methods] + [number(loss.extra_mib, ".1f")])
    if not any(line[0] for line in lines):
        head, lines = head[1:], [line[1:] for line in lines]
    return markdown(head, lines)


def hosts(record: Record) -> list[str]:
    """A row a head: milliseconds back to back, in brackets the host's microseconds, of each method and pass."""
    columns = [
        key for key in dict.fromkeys((row.method, row.pass_) for row in record.rows) if key[1] in ("gradients", "loss")
    ]
    columns.sort(key=lambda key: key[1])
    found = {(row.shape, row.method, row.pass_): row for row in record.rows}

    def cell(row: Row) -> str:
        return f"{number(row.back_to_back_ms)} ({number(row.host_us, '.0f')})" if row.status == "ok" else row.status

    head = [f"{NAMES.get(method, method)}{', loss' if pass_ == 'loss' else ''}" for method, pass_ in columns]
    lines = [[shape.name, *(cell(found[(shape.name, *key)]) for key in columns)] for shape in record.shapes]
    return markdown(["head", *head], lines)


NAMES = {"canonical": "eager PyTorch"}
KINDS: dict[str, Callable[[Any], list[str]]] = {
    "heads": heads,
    "budgets": budgets,
    "products": ratios,
    "odd": ratios,
    "random": ratios,
    "host": hosts,
    "steps": published_steps,
}
TABLES = (  # a kind and a date
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
    path = str(RECORDS / f"{name}.json")
    return load_steps([path]) if name.startswith("steps") else load(path)


def page_of(name: str) -> pathlib.Path:
    return TRAINING if name.startswith("steps") else RESULTS


def with_tables(page: pathlib.Path, text: str) -> str:
    for name in TABLES:
        if page_of(name) != page:
            continue
        table = KINDS[name.partition("-")[0]]
        before, after = f"<!-- {name} -->\n\n", f"\n\n<!-- /{name} -->"
        head, _, rest = text.partition(before)
        _, found, tail = rest.partition(after)
        if not found:
            raise SystemExit(f"{page}: expected {before.strip()} and {after.strip()}")
        text = head + before + "\n".join(table(loaded(name))) + after + tail
    return text


def main() -> None:
    for page in (RESULTS, TRAINING):
        text = page.read_text()
        made = with_tables(page, text)
        if "--check" in sys.argv[1:]:
            if made != text:
                raise SystemExit(f"{page}: tables differ from bench/records")
        else:
            page.write_text(made)
    if "--check" in sys.argv[1:]:
        return
    folder = ROOT / "docs" / "plots"
    plot_time_against_budget(load(str(RECORDS / "budgets-2026-11-22.json")), folder, "svg")
    record = load(str(RECORDS / "heads-2026-11-22.json"))
    for shape in record.shapes:
        if shape.name in PLOTTED:
            plot_time_against_memory(record, shape, folder, "svg")
    for name in TABLES:
        if name.startswith("steps"):
            draw_steps(loaded(name), str(folder), "svg")


if __name__ == "__main__":
    main()
