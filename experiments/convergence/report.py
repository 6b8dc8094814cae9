"""The logs of a folder as a table."""

from __future__ import annotations

import json
import pathlib
import statistics
from typing import Any

from table import markdown

WARM = 40  # first steps, left out of the time of a step


class Run:
    """One log: MODEL--HEAD.jsonl."""

    def __init__(self, path: pathlib.Path) -> None:
        self.model, _, self.head = path.stem.partition("--")
        records: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
        self.loss = {r["step"]: r["loss"] for r in records if "loss" in r}
        self.validation = {r["step"]: r["validation"] for r in records if "validation" in r}
        timed = [r for r in records if "step_seconds" in r]
        self.milliseconds = [1e3 * r["step_seconds"] for r in timed if r["step"] > WARM] or [float("nan")]
        self.peak_mib = max((r["peak_mib"] for r in timed), default=float("nan"))


def load(folder: pathlib.Path) -> list[Run]:
    return [Run(path) for path in sorted(folder.glob("*--*.jsonl"))]


def table(runs: list[Run]) -> str:
    """Renders the last validation loss, its difference from exact at the same step, time and memory."""
    lines = []
    for run in (run for run in runs if run.validation):
        step, exact = max(run.validation), next((r for r in runs if r.model == run.model and r.head == "exact"), None)
        common = [] if exact is None else [s for s in run.validation if s in exact.validation]
        differences = [run.validation[s] - exact.validation[s] for s in common] if exact is not None else []
        shown = [f"{differences[-1]:+.4f}", f"{max(differences, key=abs):+.4f}"] if differences else ["-", "-"]
        line = [run.model, run.head, str(step), f"{run.validation[step]:.4f}", *shown]
        lines.append([*line, f"{statistics.median(run.milliseconds):.1f}", f"{run.peak_mib:.0f}"])
    head = "model | head | steps | validation loss | minus exact | largest difference | ms a step | peak MiB"
    return "\n".join(markdown(head.split(" | "), lines))
