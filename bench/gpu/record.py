"""What a run found, kept as JSON that is written again after every step, so that a cut-off run loses nothing."""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
import pathlib
import threading
from typing import Any

from shapes import Shape


def read_json(path: pathlib.Path) -> Any:
    """A file's content. It is compressed where its name ends in .xz."""
    content = path.read_bytes()
    return json.loads(lzma.decompress(content) if path.suffix == ".xz" else content)


def write_json(path: pathlib.Path, content: Any) -> None:
    """As a whole or not at all. The bytes follow from the content alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (json.dumps(content, indent=1) + "\n").encode()
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME) if path.suffix == ".xz" else text)
    os.replace(partial, path)


@dataclasses.dataclass
class Row:
    """One method, one pass (``loss`` without gradients, or ``gradients``: forward and backward)."""

    shape: str
    method: str
    pass_: str
    ours: bool = False
    budget_mib: int | None = None
    threshold: float | None = None  # of sparsified gradients
    data: str = "std1"  # timed with these inputs
    status: str = "ok"  # or "skipped", "failed", "refused"
    reason: str = ""
    rounds: int = 0
    burst_ms: float | None = None
    burst_ratio: float | None = None  # to the bare products of the same round: F, or 3F with gradients
    sustained_ms: float | None = None
    sustained_ratio: float | None = None
    extra_mib: float | None = None  # peak over inputs; gradients are in it
    gradient_mib: float = 0.0
    plan: str = ""
    host_us: float | None = None  # of host.py: to queue a call
    back_to_back_ms: float | None = None


@dataclasses.dataclass
class Gemms:
    """Medians of the three bare products, milliseconds."""

    shape: str
    burst: dict[str, float] = dataclasses.field(default_factory=dict)
    sustained: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Accuracy:
    """Relative errors against fp64, beside those of the same-precision baseline."""

    shape: str
    data: str
    method: str
    ours: bool = False
    plan: str = ""
    reason: str = ""
    loss_error: float | None = None
    d_hidden_error: float | None = None
    d_weight_error: float | None = None
    baseline_d_hidden: float | None = None
    baseline_d_weight: float | None = None
    repeats: bool | None = None  # the same bits twice
    threshold: float | None = None  # of sparsified gradients


class Record:
    """Everything of one run. Methods may be called from the watchdog's thread too."""

    def __init__(self, path: str | pathlib.Path | None, meta: dict[str, Any]) -> None:
        self.path = pathlib.Path(path) if path else None
        self.meta = meta
        self.shapes: list[Shape] = []
        self.gemms: dict[str, Gemms] = {}
        self.rows: list[Row] = []
        self.accuracy: list[Accuracy] = []
        self.notes: list[str] = []
        self._lock = threading.Lock()

    def note(self, text: str) -> None:
        """Something left out, and why: shown now and in the results."""
        self.notes.append(text)
        print(f"note: {text}", flush=True)

    def to_json(self) -> dict[str, Any]:
        return {
            "meta": self.meta,
            "shapes": [shape._asdict() for shape in self.shapes],
            "gemms": [dataclasses.asdict(gemms) for gemms in list(self.gemms.values())],
            "rows": [dataclasses.asdict(row) for row in list(self.rows)],
            "accuracy": [dataclasses.asdict(item) for item in list(self.accuracy)],
            "notes": list(self.notes),
        }

    def save(self) -> None:
        if self.path is None:
            return
        with self._lock:
            write_json(self.path, self.to_json())


def load(path: str | pathlib.Path) -> Record:
    """A record as ``save`` wrote it."""
    content = read_json(pathlib.Path(path))
    record = Record(None, content["meta"])
    record.shapes = [Shape(**shape) for shape in content["shapes"]]
    record.gemms = {item["shape"]: Gemms(**item) for item in content["gemms"]}
    record.rows = [Row(**row) for row in content["rows"]]
    record.accuracy = [Accuracy(**item) for item in content["accuracy"]]
    record.notes = list(content["notes"])
    return record
