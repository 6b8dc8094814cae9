"""The figures that the CUDA backend is meant to reach, held against a record."""

from __future__ import annotations

from typing import NamedTuple

from record import Accuracy, Record, Row
from shapes import Shape

TOKEN_BYTES = 64
LOSS_MIB = 8.0
OUTPUT_MIB = 1.0 / 64  # the loss and the counters, each rounded up by the allocator
LOSS_ERROR = 1e-5
GRADIENT_BARS = {None: (1.03, 1 << 62), 2560: (1.08, 16384), 160: (1.40, 1 << 62)}  # budget: ratio to 3F, largest N


# Thinned gradients: ratio to 3F by data and threshold, MiB beyond gradients for 8192 tokens, errors of one draw on a
# trained head.
THINNED_BARS = {("trained", 2.0**-9): 0.44, ("trained", 2.0**-8): 0.40, ("peaked", 2.0**-9): 0.40}
THINNED_BARS |= {(kind, 2.0**-9): 0.60 for kind in ("std0.1", "std1")}  # all but uniform
THINNED_MIB = {2.0**-8: 128.0, 2.0**-9: 128.0}
THINNED_ERRORS = {2.0**-9: (0.03, 0.006)}


class Verdict(NamedTuple):
    shape: str
    what: str
    got: str
    bar: str
    met: bool


def loss_bar(hidden: int) -> float:
    return 1.01 if hidden >= 2048 else 0.94


def _time_verdict(row: Row, what: str, ratio_bar: float, unit: str) -> list[Verdict]:
    if row.burst_ratio is None:
        return []
    sustained = "-" if row.sustained_ratio is None else f"{row.sustained_ratio:.3f}"
    got = f"{row.burst_ratio:.3f} burst, {sustained} sustained"
    worst = max(row.burst_ratio, row.sustained_ratio or 0.0)
    return [Verdict(row.shape, what, got, f"{ratio_bar:.2f} {unit}", worst <= ratio_bar)]


def row_verdicts(row: Row, shape: Shape) -> list[Verdict]:
    """Time and memory of one of our rows."""
    if row.status != "ok":
        return [Verdict(shape.name, f"{row.method} ({row.pass_})", row.status, row.reason or "runs", False)]
    found: list[Verdict] = []
    if row.pass_ == "loss":
        found += _time_verdict(row, f"{row.method}: time", loss_bar(shape.hidden), "F")
        allowed = LOSS_MIB + TOKEN_BYTES * shape.tokens / 2**20
    elif row.threshold is not None:
        bar_3f = THINNED_BARS.get((row.data, row.threshold))
        found += [] if bar_3f is None else _time_verdict(row, f"{row.method}: time on {row.data}", bar_3f, "x 3F")
        of_tokens = THINNED_MIB.get(row.threshold, float("inf")) * max(1.0, shape.tokens / 8192)
        allowed = row.gradient_mib + OUTPUT_MIB + of_tokens
    else:
        bar, most_tokens = GRADIENT_BARS.get(row.budget_mib, (0.0, 0))
        if shape.tokens <= most_tokens:
            found += _time_verdict(row, f"{row.method}: time", bar, "x 3F")
        allowed = row.gradient_mib + OUTPUT_MIB + (float("inf") if row.budget_mib is None else row.budget_mib)
    if row.extra_mib is not None and allowed != float("inf"):
        met = row.extra_mib <= allowed
        found.append(
            Verdict(shape.name, f"{row.method}: memory", f"{row.extra_mib:.2f} MiB", f"{allowed:.2f} MiB", met)
        )
    return found


def _error_verdict(item: Accuracy, name: str, got: float | None, baseline: float | None, bar: float) -> list[Verdict]:
    if got is None or not baseline:
        return []
    text = f"{got:.2e} ({got / baseline:.2f} x {baseline:.2e})"
    return [Verdict(item.shape, f"{item.method}: {name} on {item.data}", text, f"{bar} x", got <= bar * baseline)]


def _draw_verdicts(item: Accuracy) -> list[Verdict]:
    """Of one draw on a trained model's head."""
    if item.data != "trained" or item.threshold not in THINNED_ERRORS:
        return []
    errors = (item.d_hidden_error, item.d_weight_error)
    return [
        Verdict(item.shape, f"{item.method}: {name} on {item.data}", f"{got:.2%}", f"{bar:.1%}", got <= bar)
        for name, got, bar in zip(("dE", "dC"), errors, THINNED_ERRORS[item.threshold])
        if got is not None
    ]


def accuracy_verdicts(item: Accuracy) -> list[Verdict]:
    """Plans of 3 F keep rounded exponentials, which may cost more accuracy than those of 4 F."""
    what = f"{item.method}: {item.data}"
    if item.reason:
        return [Verdict(item.shape, what, item.reason, "runs", False)]
    if item.threshold is not None:
        found = _draw_verdicts(item)
    else:
        bar = 1.5 if "4 F" in item.plan else 2.5
        found = _error_verdict(item, "dE", item.d_hidden_error, item.baseline_d_hidden, bar)
        found += _error_verdict(item, "dC", item.d_weight_error, item.baseline_d_weight, bar)
    if item.loss_error is not None:
        met = item.loss_error <= LOSS_ERROR
        found.append(Verdict(item.shape, f"{what}: loss", f"{item.loss_error:.1e}", f"{LOSS_ERROR:.0e}", met))
    if item.repeats is not None:
        text = "same bits" if item.repeats else "other bits"
        found.append(Verdict(item.shape, f"{what}: repeat", text, "same bits", item.repeats))
    return found


def peer_verdicts(rows: list[Row]) -> list[Verdict]:
    """Per peer: whether one single row of ours is faster and smaller. ``rows`` are of one shape and pass."""
    ours = [row for row in rows if row.ours and row.threshold is None and row.burst_ms is not None]
    found = []
    for peer in rows:
        if peer.ours or peer.burst_ms is None or not ours:
            continue
        better = [row for row in ours if (row.burst_ms or 0.0) < peer.burst_ms and _smaller(row, peer)]
        shown = min(better or ours, key=lambda row: row.burst_ms or 0.0)
        got = f"{shown.method}: {shown.burst_ms:.2f} ms, {shown.extra_mib or 0:.0f} MiB"
        bar = f"{peer.burst_ms:.2f} ms, {peer.extra_mib or 0:.0f} MiB"
        found.append(Verdict(peer.shape, f"against {peer.method} ({peer.pass_})", got, bar, bool(better)))
    return found


def _smaller(row: Row, peer: Row) -> bool:
    """Apple's loss holds nothing but its statistics, so that only its time is compared."""
    if row.extra_mib is None or peer.extra_mib is None or (peer.pass_ == "loss" and peer.method.startswith("apple")):
        return True
    return row.extra_mib < peer.extra_mib


def verdicts(record: Record) -> list[Verdict]:
    """All bars of a record, shape by shape."""
    found: list[Verdict] = []
    for shape in record.shapes:
        rows = [row for row in record.rows if row.shape == shape.name]
        for row in rows:
            if row.ours:
                found += row_verdicts(row, shape)
        for item in record.accuracy:
            if item.ours and item.shape == shape.name:
                found += accuracy_verdicts(item)
        for pass_ in ("loss", "gradients"):
            found += peer_verdicts([row for row in rows if row.pass_ == pass_])
    return found
