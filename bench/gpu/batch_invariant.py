"""What ``batch_invariant`` costs: each call with and without it in one round, shuffled.

    python bench/gpu/batch_invariant.py [--shapes 8192x128256x4096,8192x256000x2304] [--dtype bfloat16] [--rounds 9]

HEADROOM_LIBRARY names libheadroom.so. Times are medians of calls after a short idle, ratios medians of those of the
rounds; memory is the peak of PyTorch's allocator over the inputs, without the gradients.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import statistics
import sys
from collections.abc import Callable

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
if os.environ.get("HEADROOM_LIBRARY"):
    sys.path.insert(0, str(HERE.parents[1] / "python"))

import torch  # noqa: E402

from clock import MIB, Clock  # noqa: E402
from data import Inputs, make_inputs  # noqa: E402
from shapes import parse_shapes  # noqa: E402
from table import markdown  # noqa: E402


def calls_of(inputs: Inputs, invariant: bool) -> dict[str, Callable[[], None]]:
    import headroom

    leaves = inputs.leaves()

    def alone() -> None:
        with torch.no_grad():
            headroom.linear_cross_entropy(*inputs, batch_invariant=invariant)

    def both() -> None:
        leaves.hidden.grad = leaves.weight.grad = None
        headroom.linear_cross_entropy(*leaves, batch_invariant=invariant).backward()
        leaves.hidden.grad = leaves.weight.grad = None

    return {"loss": alone, "loss + gradients": both}


def rows_of(clock: Clock, inputs: Inputs, rounds: int) -> list[list[str]]:
    cases = {(name, on): call for on in (False, True) for name, call in calls_of(inputs, on).items()}
    gradients = sum(t.numel() * t.element_size() for t in (inputs.hidden, inputs.weight))
    peaks: dict[tuple[str, bool], float] = {}
    for (name, on), call in cases.items():
        call()
        peak = clock.peak_bytes(call) or 0
        peaks[name, on] = (peak - (gradients if "gradients" in name else 0)) / MIB
    times: dict[tuple[str, bool], list[float]] = {case: [] for case in cases}
    order = random.Random(0)
    for _ in range(rounds):
        for case in order.sample(sorted(cases), len(cases)):
            times[case].append(clock.burst_ms(cases[case]))
    rows = []
    for name in ("loss", "loss + gradients"):
        off, on = times[name, False], times[name, True]
        ratio = statistics.median(b / a for a, b in zip(off, on))
        row = [name, f"{statistics.median(off):.2f}", f"{statistics.median(on):.2f}", f"{ratio:.3f}"]
        rows.append([*row, f"{peaks[name, False]:.0f}", f"{peaks[name, True]:.0f}"])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8192x128256x4096,8192x256000x2304,1024x128256x4096", help="NxVxD")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    clock = Clock(args.device)
    for shape in parse_shapes(args.shapes):
        inputs = make_inputs(shape, "std1", args.device)
        if args.dtype == "float32":
            inputs = Inputs(inputs.hidden.float(), inputs.weight.float(), inputs.target)
        print(f"### {shape.tokens} x {shape.vocab} x {shape.hidden}, {args.dtype}\n")
        heads = ["pass", "ms", "invariant, ms", "ratio", "MiB", "invariant, MiB"]
        print("\n".join(markdown(heads, rows_of(clock, inputs, args.rounds))) + "\n", flush=True)
        del inputs
        clock.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
