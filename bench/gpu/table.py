"""A record as Markdown."""

from __future__ import annotations

from record import Accuracy, Record, Row
from shapes import Shape
from terms import in_words

PASS_WORDS = {"loss": "loss", "gradients": "fwd + bwd", "tokens": "of tokens", "entropy": "with entropy"}


def number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)]


def shape_title(record: Record, shape: Shape) -> list[str]:
    """Returns the title of a shape, with times and rates of the bare products."""
    lines = ["", f"### {shape.name}: N {shape.tokens}, V {shape.vocab}, D {shape.hidden}", ""]
    gemms = record.gemms.get(shape.name)
    for mode, name in {"burst": "after idle", "sustained": "steady"}.items():
        times = getattr(gemms, mode, None)
        if times:
            parts = ", ".join(f"{k} {v:.2f} ms ({shape.flop / v / 1e9:.0f} TFLOP/s)" for k, v in times.items())
            lines.append(f"Bare products, {name}: {parts}; sum {sum(times.values()):.2f} ms.")
    return lines


def _time_cells(row: Row) -> list[str]:
    if row.status != "ok":
        return [f"{row.status}: {row.reason}", "", "", ""]
    return [
        number(row.burst_ms),
        number(row.burst_ratio, ".3f"),
        number(row.sustained_ms),
        number(row.sustained_ratio, ".3f") + (f" ({row.reason})" if row.reason else ""),
    ]


def _row_cells(row: Row) -> list[str]:
    beyond = None if row.extra_mib is None else row.extra_mib - row.gradient_mib
    memory = [number(row.extra_mib, ".1f"), number(beyond, ".1f")]
    return [row.method, PASS_WORDS[row.pass_], *_time_cells(row), *memory, row.plan]


def accuracy_lines(items: list[Accuracy]) -> list[str]:
    head = ["data", "method", "pass", "loss error", "entropy error", "dE error", "x baseline", "dC error", "x baseline"]
    head.append("repeats")

    def ratio(error: float | None, baseline: float | None) -> str:
        return number(error / baseline if error is not None and baseline else None)

    rows = [
        [item.data, item.method, PASS_WORDS[item.pass_], item.reason, *[""] * 6]
        if item.reason
        else [
            item.data,
            item.method,
            PASS_WORDS[item.pass_],
            number(item.loss_error, ".1e"),
            number(item.entropy_error, ".1e"),
            number(item.d_hidden_error, ".2e"),
            ratio(item.d_hidden_error, item.baseline_d_hidden),
            number(item.d_weight_error, ".2e"),
            ratio(item.d_weight_error, item.baseline_d_weight),
            "-" if item.repeats is None else str(item.repeats).lower(),
        ]
        for item in items
    ]
    return ["", *markdown(head, rows)] if rows else []


def render(record: Record) -> str:
    """Renders everything: one section per shape, then notes."""
    lines = [f"{name}: {value}" for name, value in record.meta.items()]
    head = ["method", "pass", "after idle, ms", "x bare", "steady, ms", "x bare"]
    head += ["extra MiB", "beyond gradients", "plan, or logits kept"]
    for shape in record.shapes:
        rows = [row for row in record.rows if row.shape == shape.name]
        lines += shape_title(record, shape)
        if rows:
            lines += ["", *markdown(head, [_row_cells(row) for row in rows])]
        lines += accuracy_lines([item for item in record.accuracy if item.shape == shape.name])
    if record.notes:
        lines += ["", "### Left out", "", *(f"- {note}" for note in record.notes)]
    return "\n".join(lines)


def host_table(record: Record) -> list[str]:
    """Renders a row per head: milliseconds back to back, and the host's microseconds in brackets, by method."""
    passes = {"gradients": "", "loss": ", loss"}  # behind a method
    by_key = {(row.shape, row.method, row.pass_): row for row in record.rows if row.pass_ in passes}
    columns = sorted(dict.fromkeys(key[1:] for key in by_key), key=lambda key: list(passes).index(key[1]))

    def cell(row: Row | None) -> str:
        if row is None or row.status != "ok":
            return "" if row is None else row.status
        return f"{number(row.back_to_back_ms)} ({number(row.host_us, '.0f')})"

    head = [in_words(method) + passes[pass_] for method, pass_ in columns]
    lines = [[shape.name, *(cell(by_key.get((shape.name, *key))) for key in columns)] for shape in record.shapes]
    return markdown(["head", *head], lines)
