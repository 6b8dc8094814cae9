"""Compares Logitless's rows of a run with those of a record: none may be missing, slower, or take more memory.

Ratios to bare products carry over between GPUs of one kind, milliseconds do not. Rows of other libraries are left out.
"""

from __future__ import annotations

import math
import pathlib
import shlex
from typing import NamedTuple

from record import Record, Row, command_of, load
from shapes import Shape
from table import markdown, number

RUN = ["python", "bench/gpu/run.py"]
MEMORY_MIB, MEMORY_SHARE = 1.0, 0.01


class Within(NamedTuple):
    """The largest share by which a ratio may exceed the record's.

    Between two runs of bench/records on one kind of device, ratios of one row differ by at most 4.4% after idle and
    18.3% steady, both of a loss alone. A test computes that again. Between an H100 and an H200 they differ by up to
    13%.
    """

    idle: float = 0.05
    steady: float = 0.19


def parse_within(text: str) -> Within:
    """Parses ``5%`` for both, or ``5%,19%`` for after idle and steady."""
    try:
        shares = [float(word.strip().removesuffix("%")) / 100 for word in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) not in (1, 2) or not all(0 <= share < math.inf for share in shares):
        raise ValueError(f"expected percents such as 5% or 5%,19%, got {text!r}")
    return Within(shares[0], shares[-1])


def rows_of(record: Record) -> dict[tuple[Shape, str, str, str], Row]:
    """Returns Logitless's rows by what they measure."""
    shapes = {shape.name: shape for shape in record.shapes}
    return {(shapes[row.shape], row.method, row.pass_, row.data): row for row in record.rows if row.ours}


def is_bar(row: Row) -> bool:
    return row.burst_ratio is not None or row.sustained_ratio is not None


def read(path: pathlib.Path) -> Record:
    try:
        return load(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected a record of {' '.join(RUN)}, got {path} ({type(error).__name__}: {error})"
        ) from error


def bars_in(path: pathlib.Path) -> Record:
    """Reads a record that has ratios to compare with."""
    record = read(path)
    if not any(map(is_bar, rows_of(record).values())):
        raise ValueError(f"--against: expected a record with ratios of Logitless, got {path}, which has none")
    return record


def words_of(record: Record) -> list[str]:
    """Returns the command's words that measure the record's own rows again, without other libraries and errors."""
    command = shlex.split(command_of(record.meta))
    if command[:2] != RUN:
        raise ValueError(
            f"--against: expected a record of {' '.join(RUN)}, got one of {' '.join(command) or 'nothing'}"
        )
    return [*command[2:], "--peers", "none", "--data", "none"]


def beyond_mib(row: Row) -> float | None:
    return None if row.extra_mib is None else row.extra_mib - row.gradient_mib


def quotient(bar: float | None, ratio: float | None) -> float | None:
    return None if bar is None or ratio is None else ratio / bar


def faults_of(bar: Row, row: Row | None, within: Within) -> list[str]:
    """Returns why a row fails: nothing if it does not."""
    if row is None:
        return ["missing"]
    if row.status != "ok":
        return [f"{row.status}: {row.reason}"]
    faults = []
    for name, old, new, share in (
        ("after idle", bar.burst_ratio, row.burst_ratio, within.idle),
        ("steady", bar.sustained_ratio, row.sustained_ratio, within.steady),
    ):
        slower = quotient(old, new)
        if old is not None and slower is None:
            faults.append(f"{name} not measured")
        elif slower is not None and not slower <= 1 + share:
            faults.append(f"{name} slower")
    old_mib, new_mib = beyond_mib(bar), beyond_mib(row)
    if old_mib is not None and new_mib is None:
        faults.append("memory not measured")
    elif old_mib is not None and new_mib is not None and new_mib > old_mib * (1 + MEMORY_SHARE) + MEMORY_MIB:
        faults.append("more memory")
    return faults


def compared(against: Record, run: Record, within: Within) -> tuple[str, bool]:
    """Returns a table with a row per bar and a line per fault, and whether there is no fault."""
    rows, lines, faulty = rows_of(run), [], []
    for key, bar in rows_of(against).items():
        if not is_bar(bar):
            continue
        shape, method, pass_, _ = key
        faults = "; ".join(faults_of(bar, rows.get(key), within))
        row = rows.get(key) or Row(shape.name, method, pass_)
        cells = [shape.name, method, pass_]
        for old, new in ((bar.burst_ratio, row.burst_ratio), (bar.sustained_ratio, row.sustained_ratio)):
            cells += [number(value, ".3f") for value in (old, new, quotient(old, new))]
        cells += [number(value, ".1f") for value in (beyond_mib(bar), beyond_mib(row))]
        lines.append([*cells, faults])
        if faults:
            faulty.append(f"fails: {shape.name}, {method}, {pass_}: {faults}")
    devices = [str(record.meta.get("device")) for record in (against, run)]
    text = [f"record: {devices[0]}, {against.meta.get('date')}", f"run: {devices[1]}, {run.meta.get('date')}"]
    if devices[0] != devices[1]:
        text.append("note: the devices differ; between an H100 and an H200 ratios differ by up to 13%")
    head = ["head", "method", "pass", "after idle: record", "run", "quotient", "steady: record", "run", "quotient"]
    text += ["", *markdown([*head, "MiB beyond gradients: record", "run", "fails"], lines), "", *faulty]
    limits = f"{100 * within.idle:g}% after idle and {100 * within.steady:g}% steady"
    text.append(f"{len(faulty)} of {len(lines)} rows fail; ratios may grow by {limits}")
    return "\n".join(text), not faulty
