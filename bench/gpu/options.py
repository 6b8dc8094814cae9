"""What options of the head cost: statistics of rows, top-k, temperatures of rows, batch_invariant.

    python bench/gpu/options.py [--shapes 8192x128256x4096] [--dtype bfloat16] [--rounds 9] [--only top_k]

Each round runs the plain head, every option and the logits' bare product F, shuffled. LOGITLESS_LIBRARY names
liblogitless.so. Times are medians of calls after a short idle, ratios medians of those of the rounds; memory is the
peak of PyTorch's allocator over the inputs, without the gradients.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import statistics
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
if os.environ.get("LOGITLESS_LIBRARY"):
    sys.path.insert(0, str(HERE.parents[1] / "python"))

import torch  # noqa: E402

from clock import MIB, Call, Clock  # noqa: E402
from data import Inputs, make_inputs  # noqa: E402
from shapes import parse_shapes  # noqa: E402
from table import markdown  # noqa: E402

STATISTICS = ("entropy", "argmax", "target_logit", "mean_logit", "log_sum_sq_probs", "is_top1", "max_logit")
HEAD = ("option", "pass", "ms", "over plain", "over F", "MiB")
PRODUCT, PLAIN = "F", "plain"
Case = tuple[str, str]  # option, pass


def forward_calls(inputs: Inputs) -> dict[str, Call]:
    """Without gradients."""
    import logitless

    temperature = torch.full(inputs.target.shape, 0.8, device=inputs.hidden.device)
    options: dict[str, dict[str, Any]] = {PLAIN: {}}
    options |= {name: {"return_stats": (name,)} for name in STATISTICS}
    options["all statistics"] = {"return_stats": STATISTICS}
    options["temperature of rows"] = {"temperature": temperature}
    options["batch_invariant"] = {"batch_invariant": True}

    def loss(given: dict[str, Any]) -> Call:
        def call() -> None:
            with torch.no_grad():
                logitless.linear_cross_entropy(*inputs, **given)

        return call

    def top(k: int) -> Call:
        return lambda: logitless.linear_top_k(inputs.hidden, inputs.weight, k)

    calls = {name: loss(given) for name, given in options.items()}
    return calls | {f"top_k {k}": top(k) for k in (1, 8, 64)}


def gradient_calls(inputs: Inputs) -> dict[str, Call]:
    """Forward and backward."""
    import logitless

    leaves = inputs.leaves()

    def loss(given: dict[str, Any]) -> Call:
        def call() -> None:
            leaves.hidden.grad = leaves.weight.grad = None
            logitless.linear_cross_entropy(*leaves, **given).backward()
            leaves.hidden.grad = leaves.weight.grad = None

        return call

    return {PLAIN: loss({}), "batch_invariant": loss({"batch_invariant": True})}


def product_call(inputs: Inputs) -> Call:
    """The logits' product, of up to 8 GiB of logits at a time."""
    columns = max(1, min(inputs.weight.shape[0], (8 << 30) // (2 * max(1, inputs.hidden.shape[0]))))
    parts = inputs.weight.split(columns)

    def call() -> None:
        for part in parts:
            torch.mm(inputs.hidden, part.T)

    return call


def rows_of(clock: Clock, inputs: Inputs, rounds: int, only: str) -> list[list[str]]:
    cases: dict[Case, Call] = {(name, "loss"): call for name, call in forward_calls(inputs).items()}
    cases |= {(name, "gradients"): call for name, call in gradient_calls(inputs).items()}
    cases = {case: call for case, call in cases.items() if case[0] == PLAIN or only in case[0]}
    cases[PRODUCT, "loss"] = product_call(inputs)
    gradients = sum(t.numel() * t.element_size() for t in (inputs.hidden, inputs.weight))
    peaks = {}
    for case, call in cases.items():
        call()
        peaks[case] = ((clock.peak_bytes(call) or 0) - gradients * (case[1] == "gradients")) / MIB
        clock.release()
    times: dict[Case, list[float]] = {case: [] for case in cases}
    order = random.Random(0)
    for _ in range(rounds):
        for case in order.sample(sorted(cases), len(cases)):
            times[case].append(clock.burst_ms(cases[case]))

    def ratio(case: Case, base: Case) -> str:
        return f"{statistics.median(a / b for a, b in zip(times[case], times[base])):.3f}"

    return [
        [*case, f"{statistics.median(times[case]):.2f}", ratio(case, (PLAIN, case[1])), ratio(case, (PRODUCT, "loss"))]
        + [f"{peaks[case]:.0f}"]
        for case in cases
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8192x128256x4096,8192x256000x2304,1024x128256x4096", help="NxVxD")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="options whose name contains this")
    args = parser.parse_args()
    clock = Clock(args.device)
    for shape in parse_shapes(args.shapes):
        inputs = make_inputs(shape, "std1", args.device)
        if args.dtype == "float32":
            inputs = Inputs(inputs.hidden.float(), inputs.weight.float(), inputs.target)
        print(f"### {shape.tokens} x {shape.vocab} x {shape.hidden}, {args.dtype}\n")
        print("\n".join(markdown(list(HEAD), rows_of(clock, inputs, args.rounds, args.only))) + "\n", flush=True)
        del inputs
        clock.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
