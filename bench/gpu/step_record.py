"""Whole training steps: their record, its table and its plots."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from plots import COLORS, MARKERS, legend_below, new_axes, save_figure
from record import Record, read_json
from table import markdown, number
from terms import in_words, plain

GIB = 1 << 30


@dataclasses.dataclass
class ModelRow:
    """A model as built, with the size of its weights, gradients and optimizer state."""

    model: str
    sequences: int
    length: int
    vocab: int
    hidden: int
    layers: int
    parameters: int = 0
    weights_gib: float = 0.0  # gradients take as much again
    optimizer_gib: float | None = None

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


@dataclasses.dataclass
class StepRow:
    """Whole steps of one model with one head."""

    model: str
    head: str
    ours: bool = False
    status: str = "ok"  # or "skipped", "failed"
    reason: str = ""  # or a remark if the status is ok
    loss: float | None = None
    gradient_difference: float | None = None  # relative, of the last norm's weight, to the stock head's
    rounds: int = 0
    ms: float | None = None
    ms_least: float | None = None
    ms_most: float | None = None
    ratio: float | None = None  # to the stock head's step of the same round
    tokens_per_second: float | None = None
    peak_gib: float | None = None
    beyond_gib: float | None = None  # peak beyond weights and optimizer, including gradients


class StepRecord(Record):
    """A record whose ``steps`` are the rows. The lists for single heads stay empty and are not written."""

    def __init__(self, path: str | pathlib.Path | None, meta: dict[str, Any]) -> None:
        super().__init__(path, meta)
        self.models: list[ModelRow] = []
        self.steps: list[StepRow] = []

    def to_json(self) -> dict[str, Any]:
        return {
            "meta": self.meta,
            "models": [dataclasses.asdict(row) for row in list(self.models)],
            "steps": [dataclasses.asdict(row) for row in list(self.steps)],
            "notes": list(self.notes),
        }


def load_steps(path: pathlib.Path) -> StepRecord:
    """Loads a record that ``save`` wrote."""
    content = read_json(path)
    record = StepRecord(None, content["meta"])
    record.models = [ModelRow(**row) for row in content["models"]]
    record.steps = [StepRow(**row) for row in content["steps"]]
    record.notes = content["notes"]
    return record


def _sizes(row: ModelRow) -> str:
    return f"{row.model}: {row.sequences} x {row.length} tokens, V {row.vocab}, D {row.hidden}, {row.layers} layers"


def _title(row: ModelRow) -> list[str]:
    state = f"weights {row.weights_gib:.2f} GiB, gradients as much"
    if row.optimizer_gib is not None:
        state += f", AdamW's state {row.optimizer_gib:.2f} GiB"
    return ["", f"### {_sizes(row)}", "", f"{row.parameters / 1e6:.0f} million parameters; {state}.", ""]


def _cells(row: StepRow) -> list[str]:
    if row.status != "ok":
        return [row.head, f"{row.status}: {row.reason}", *[""] * 7]
    spread = "" if row.ms is None else f" ({number(row.ms_least, '.1f')} to {number(row.ms_most, '.1f')})"
    return [
        row.head + (f" ({row.reason})" if row.reason else ""),
        number(row.tokens_per_second, ",.0f"),
        number(row.ms, ".1f") + spread,
        number(row.ratio, ".3f"),
        number(row.peak_gib),
        number(row.beyond_gib),
        number(row.loss, ".4f"),
        number(row.gradient_difference, ".1e"),
        str(row.rounds),
    ]


HEADINGS = ["head", "tokens/s", "ms a step", "x stock", "peak GiB", "GiB beyond *", "loss", "gradient", "rounds"]
# On a page, the text says which memory the column counts.
PUBLISHED = ["head", "tokens/s", "ms a step", "x stock", "peak, GiB", "beyond weights and optimizer, GiB"]
FOOTNOTE = (
    "\\* Beyond weights and optimizer; gradients are in it as they come. Times are medians (least to most), ratios are "
    "to the stock head's step of the same round. The loss is that of the first step; gradient: how far that of the "
    "last norm's weight is from the one with the stock head, relative to it."
)


def render_steps(record: StepRecord) -> str:
    """Renders a section per model, then everything that was left out."""
    lines = [f"{name}: {value}" for name, value in record.meta.items()]
    for model in record.models:
        rows = [row for row in record.steps if row.model == model.model]
        lines += _title(model) + markdown(HEADINGS, [_cells(row) for row in rows])
    if record.models:
        lines += ["", FOOTNOTE]
    if record.notes:
        lines += ["", "### Left out", "", *(f"- {note}" for note in record.notes)]
    return "\n".join(lines)


def published_steps(record: StepRecord) -> list[str]:
    """Renders the tables without the columns that only verify a run."""
    lines: list[str] = []
    for model in record.models:
        lines += ["", _sizes(model) + ":", ""] if lines else [_sizes(model) + ":", ""]
        rows = [row for row in record.steps if row.model == model.model]
        cells = [[_cells(row)[0].replace(row.head, in_words(row.head), 1), *_cells(row)[1:6]] for row in rows]
        lines += markdown(PUBLISHED, cells)
    return lines


def plot_steps(record: StepRecord, model: ModelRow, folder: pathlib.Path) -> pathlib.Path:
    """Plots speed against memory, one point per head. Up and to the left is better."""
    rows = [r for r in record.steps if r.model == model.model and r.tokens_per_second and r.beyond_gib is not None]
    title = f"{model.model}: whole steps of {model.sequences} x {model.length:,} tokens, vocabulary {model.vocab:,}"
    figure, axes = new_axes(title, "peak memory beyond weights and optimizer, GiB", "tokens a second")
    own = other = 0
    for row in rows:
        if row.ours:
            style = {"marker": "o", "color": COLORS[own % 2], "fillstyle": ("full", "none")[own // 2 % 2]}
            own += 1
        else:
            style = {"marker": MARKERS[other % len(MARKERS)], "color": COLORS[2 + other % 5]}
            other += 1
        style |= {"linestyle": "none", "markersize": 9, "label": plain(in_words(row.head))}
        axes.plot([row.beyond_gib], [row.tokens_per_second], **style)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    speeds = [row.tokens_per_second or 0.0 for row in rows]
    axes.set_ylim(0.9 * min(speeds), 1.05 * max(speeds))
    legend_below(figure)
    return save_figure(figure, folder, f"steps-{model.model}")
