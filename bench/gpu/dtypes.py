"""Dtypes that are not one and the same: mixed ones, TF32, and float32 weights under autocast beside bf16 weights.

    python bench/gpu/dtypes.py [--mixed 4096x128256x2048] [--autocast 8192x128256x4096] [--rounds 3] [--device cuda]

LOGITLESS_LIBRARY names liblogitless.so. Each round runs all cases of a shape, shuffled; times are medians of calls
after a short idle, ratios those to the case named in the head of the column, of the same round. Memory is the peak of
PyTorch's allocator over the inputs, without the gradients.
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
if os.environ.get("LOGITLESS_LIBRARY"):
    sys.path.insert(0, str(HERE.parents[1] / "python"))

import torch  # noqa: E402

from clock import MIB, Clock  # noqa: E402
from data import Inputs, make_inputs  # noqa: E402
from methods import budget_name, budget_of  # noqa: E402
from shapes import Shape, parse_shapes  # noqa: E402
from table import markdown  # noqa: E402
from timing import gemm_cells  # noqa: E402

Case = tuple[str, Callable[[], None], int]  # name, call, bytes of its gradients
BUDGETS = (None, 2560, 1280, 160)


def calls_of(
    name: str, inputs: Inputs, budget: int | None = None, autocast: bool = False, loss: bool = True
) -> list[Case]:
    """Loss and gradients, and the loss alone."""
    import logitless

    leaves = inputs.leaves()
    device = leaves.hidden.device.type
    limit = budget_of(budget)

    def forward(given: Inputs) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            found: torch.Tensor = logitless.linear_cross_entropy(*given, max_workspace_bytes=limit)
            return found

    def both() -> None:
        leaves.hidden.grad = leaves.weight.grad = None
        forward(leaves).backward()
        leaves.hidden.grad = leaves.weight.grad = None

    def alone() -> None:
        with torch.no_grad():
            forward(inputs)

    gradients = sum(t.numel() * t.element_size() for t in (inputs.hidden, inputs.weight))
    return [(name, both, gradients), *([(f"{name}, loss", alone, 0)] if loss else [])]


def with_tf32(case: Case) -> Case:
    name, call, gradients = case

    def allowed() -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            call()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    return f"{name}, TF32", allowed, gradients


def products(name: str, inputs: Inputs) -> list[Case]:
    cells = gemm_cells(inputs)

    def all_three() -> None:
        for cell in cells:
            cell.call()

    return [(name, all_three, 0), (f"{name}, one", cells[0].call, 0)]


def in_float32(inputs: Inputs) -> Inputs:
    return Inputs(inputs.hidden.float(), inputs.weight.float(), inputs.target)


def mixed_cases(inputs: Inputs) -> list[Case]:
    wide = in_float32(inputs)
    mixed = Inputs(wide.hidden, inputs.weight, inputs.target)
    both = calls_of("float32", wide)
    return [
        *products("products in float32", wide),
        *calls_of("float32 hidden, bf16 weight", mixed),
        *both,
        *map(with_tf32, both),
    ]


def autocast_cases(inputs: Inputs) -> list[Case]:
    wide, found = in_float32(inputs), products("products in bf16", inputs)
    for budget in BUDGETS:
        found += calls_of(f"bf16, {budget_name(budget)}", inputs, budget, loss=budget is None)
        found += calls_of(f"autocast, {budget_name(budget)}", wide, budget, True, loss=budget is None)
    return found


def measure(clock: Clock, shape: Shape, cases: list[Case], rounds: int) -> str:
    """The ratio is to the products: of a loss alone to one of them."""
    times: dict[str, list[float]] = {name: [] for name, _, _ in cases}
    peaks = {}
    for name, call, gradients in cases:
        call()
        peak = clock.peak_bytes(call)
        peaks[name] = "-" if peak is None else f"{(peak - gradients) / MIB:.0f}"
    order = random.Random(0)
    for _ in range(rounds):
        shuffled = list(cases)
        order.shuffle(shuffled)
        for name, call, _ in shuffled:
            times[name].append(clock.burst_ms(call))
    base = cases[0][0]
    rows = []
    for name in times:
        against = times[f"{base}, one"] if name.endswith((", loss", ", one", ", loss, TF32")) else times[base]
        ratio = statistics.median(own / other for own, other in zip(times[name], against))
        rows.append([name, f"{statistics.median(times[name]):.2f}", f"{ratio:.3f}", peaks[name]])
    title = f"### {shape.tokens} x {shape.vocab} x {shape.hidden}"
    return "\n".join([title, "", *markdown(["case", "ms", f"x {base}", "MiB beyond gradients"], rows), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixed", default="4096x128256x2048", help="NxVxD")
    parser.add_argument("--autocast", default="8192x128256x4096", help="NxVxD")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    clock = Clock(args.device)
    for text, cases_of in ((args.mixed, mixed_cases), (args.autocast, autocast_cases)):
        for shape in parse_shapes(text):
            inputs = make_inputs(shape, "std1", args.device)
            print(measure(clock, shape, cases_of(inputs), args.rounds), flush=True)
            del inputs
            clock.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
