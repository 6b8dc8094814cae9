"""A run's results as JSON, written again after every step, so that an interrupted run loses nothing."""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
import pathlib
import re
import threading
from typing import Any

from shapes import Shape


def read_json(path: pathlib.Path) -> Any:
    """Reads a file, decompressed if its name ends in .xz."""
    content = path.read_bytes()
    return json.loads(lzma.decompress(content) if path.suffix == ".xz" else content)


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes a file as a whole or not at all. Its bytes depend on the content alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (json.dumps(content, indent=1) + "\n").encode()
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME) if path.suffix == ".xz" else text)
    os.replace(partial, path)


# The mean loss alone; forward and backward of it; of a loss for each token; of these and entropies.
PASSES = ("loss", "gradients", "tokens", "entropy")
MEAN_PASSES = PASSES[:2]


@dataclasses.dataclass
class Row:
    """One method and one of PASSES."""

    shape: str
    method: str
    pass_: str
    ours: bool = False
    budget_mib: int | None = None
    threshold: float | None = None  # of sparsified gradients
    data: str = "std1"  # inputs of the timing
    status: str = "ok"  # or "skipped", "failed", "refused"
    reason: str = ""
    rounds: int = 0
    burst_ms: float | None = None
    burst_ratio: float | None = None  # to the bare products of the same round: one, or three with gradients
    sustained_ms: float | None = None
    sustained_ratio: float | None = None
    extra_mib: float | None = None  # peak over inputs, including gradients
    gradient_mib: float = 0.0
    plan: str = ""  # of a peer: how it keeps logits
    host_us: float | None = None  # host.py: time to queue a call
    back_to_back_ms: float | None = None


@dataclasses.dataclass
class Gemms:
    """Medians of the three bare products in milliseconds."""

    shape: str
    burst: dict[str, float] = dataclasses.field(default_factory=dict)
    sustained: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Accuracy:
    """Errors relative to fp64, beside those of the same-precision baseline."""

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
    pass_: str = "gradients"
    entropy_error: float | None = None


class Record:
    """Everything of one run. The watchdog's thread may call its methods too."""

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
        """Notes something left out and why, on the screen and in the results."""
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
    """Loads a record that ``save`` wrote."""
    content = read_json(pathlib.Path(path))
    record = Record(None, content["meta"])
    record.shapes = [Shape(**shape) for shape in content["shapes"]]
    record.gemms = {item["shape"]: Gemms(**item) for item in content["gemms"]}
    record.rows = [Row(**row) for row in content["rows"]]
    record.accuracy = [Accuracy(**item) for item in content["accuracy"]]
    record.notes = list(content["notes"])
    return record


def command_of(facts: dict[str, Any]) -> str:
    """Returns the command that made a record, without the file that it wrote."""
    command = facts.get("command") or (f"python bench/gpu/run.py {facts['options']}" if "options" in facts else "")
    return re.sub(r" --json [^\s;]+", "", command)
