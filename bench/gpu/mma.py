"""Compares the mma.sync engine with the instruction's peak rate, and with Triton's product of the same instructions.

    python bench/gpu/mma.py [--program build/dev/tests/gpu/logitless_gpu_mma_times]
        [--shapes 8192x128256x4096,8192x256000x2304,8192x151936x1024] [--rounds 4] [--minutes 6] [--json FILE]
    python bench/gpu/mma.py --show FILE

In each round the program (tests/gpu/mma_times.cu) and Triton take turns; the program shuffles its own measurements.
"After idle" is a launch after a rest of 0.1 s, when clocks are high. "Steady" launches are back to back. Figures are
medians, as shares of the ceiling in the same round and mode. The ceiling is register-only mma.sync on as many thread
blocks with as many FLOP; "half the warps" has one warp per scheduler. "a100" and "rtx-4090" are this device restricted
to the processors and shared memory of those; groups of rows are sized for their L2.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import time
from typing import Any

from harness import ROOT, START, has_device, parser
from machine import describe_machine
from record import read_json, write_json
from shapes import Shape
from table import markdown

PROGRAM = ROOT / "build" / "dev" / "tests" / "gpu" / "logitless_gpu_mma_times"
SHAPES = "8192x128256x4096,8192x256000x2304,8192x151936x1024"
LAUNCHES = 10  # launches of Triton's product per round and mode
WAYS = {"burst_seconds": "after idle", "seconds": "steady"}


def measured(program: pathlib.Path, shape: Shape, seconds: float) -> list[dict[str, Any]]:
    """Parses the program's output, one measurement per line."""
    sizes = [shape.tokens, shape.vocab, shape.hidden, seconds]
    process = subprocess.run(
        [str(program), *map(str, sizes)], capture_output=True, text=True, timeout=120 + 10 * seconds, check=False
    )
    if process.returncode != 0:
        raise SystemExit(f"{program}: exit status {process.returncode}: {process.stderr.strip()}")
    return [json.loads(line) for line in process.stdout.splitlines()]


def triton_product(shape: Shape) -> dict[str, Any]:
    """Times bf16 logits by Triton without Hopper's instructions, or returns that it used them."""
    os.environ["DISABLE_MMA_V3"] = "1"
    import mma_triton

    return mma_triton.measure(shape.tokens, shape.vocab, shape.hidden, LAUNCHES)


def rates(round_: list[dict[str, Any]], way: str) -> dict[tuple[str, str], float]:
    """Returns FLOP per second by measurement and device; ``way`` is a key of WAYS."""
    return {(m["what"], m["device"]): m["flop"] / statistics.median(m[way]) for m in round_ if m.get(way)}


def shares(rounds: list[list[dict[str, Any]]]) -> list[list[str]]:
    """Returns a row per device and measurement: TFLOP/s, share of the ceiling and time over the loss's, by mode."""
    cells: dict[tuple[str, str], list[str]] = {}
    for number, way in enumerate(WAYS):
        values_of: dict[tuple[str, str], list[tuple[float, ...]]] = {}
        for round_ in rounds:
            by = rates(round_, way)
            for (what, device), rate in by.items():
                values = (rate * 1e-12, rate / by["ceiling", device], by["loss", device] / rate)
                values_of.setdefault((device, what), []).append(values)
        for key, values in values_of.items():
            rate, share, of_loss = (statistics.median(value[i] for value in values) for i in range(3))
            row = cells.setdefault(key, ["-"] * (3 * len(WAYS)))
            row[3 * number : 3 * number + 3] = [f"{rate:.0f}", f"{share:.3f}", f"{of_loss:.3f}"]
    return [[*key, *row] for key, row in cells.items()]


def show(record: dict[str, Any]) -> None:
    for facts in ("date", "device", "command"):
        print(f"{facts}: {record[facts]}")
    for name, rounds in record["shapes"].items():
        print(f"\n{name}, {len(rounds)} rounds\n")
        figures = ("TFLOP/s", "of the ceiling", "of the loss's time")
        titles = [f"{figure}, {way}" for way in WAYS.values() for figure in figures]
        print("\n".join(markdown(["device", "what", *titles], shares(rounds))))
        for note in sorted({m["why_not"] for round_ in rounds for m in round_ if m.get("why_not")}):
            print(note)


def main() -> int:
    options = parser(__doc__, shapes=SHAPES, rounds=4, minutes=6.0, json=None, show=None)
    options.add_argument("--program", type=pathlib.Path, default=PROGRAM)
    asked = options.parse_args()
    if asked.show:
        show(read_json(asked.show))
        return 0
    if not has_device(asked):
        return 2
    record: dict[str, Any] = {**describe_machine("cuda"), "shapes": {}}
    end = START + 60 * asked.minutes
    seconds = max(1.0, 60 * asked.minutes / (4 * asked.rounds * len(asked.shapes)))
    for _ in range(asked.rounds):
        for shape in asked.shapes:
            if time.monotonic() > end:
                break
            round_ = measured(asked.program, shape, seconds)
            round_.append(triton_product(shape))
            record["shapes"].setdefault(shape.name, []).append(round_)
            if asked.json:
                write_json(asked.json, record)
    show(record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
