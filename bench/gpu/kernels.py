"""What a call of the head runs on the device: every kernel with its time, beside the bare products.

    python bench/gpu/kernels.py [--shapes 5094x59508x2099] [--budgets unlimited,160]
        [--passes loss,gradients] [--calls 10]

LOGITLESS_LIBRARY names liblogitless.so. Times are of PyTorch's profiler (CUPTI), means over the calls; recordings of
runs that come again are off, as a graph's kernels have no names of their own.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
if os.environ.get("LOGITLESS_LIBRARY"):
    sys.path.insert(0, str(HERE.parents[1] / "python"))

import torch  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402

from clock import Call  # noqa: E402
from data import make_inputs  # noqa: E402
from host_parts import without_recordings  # noqa: E402
from methods import Method, budget_name, budget_of  # noqa: E402
from shapes import Shape, parse_budgets, parse_shapes  # noqa: E402
from table import markdown  # noqa: E402
from timing import pass_call  # noqa: E402

LONGEST = 60  # characters of a kernel's name


def short(name: str) -> str:
    """Without the namespaces and arguments of a C++ function."""
    return re.sub(r"^void |\(anonymous namespace\)::|logitless::cuda::|\(.*$", "", name)[:LONGEST]


def kernels_of(call: Call, calls: int) -> list[tuple[str, float, float]]:
    """Name, launches a call and microseconds a call, of each kernel, the longest first."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in profile.events():
        if event.device_type == DeviceType.CUDA:
            times[event.name].append(event.device_time)
    found = [(short(name), len(each) / calls, sum(each) / calls) for name, each in times.items()]
    return sorted(found, key=lambda row: -row[2])


def show_shape(shape: Shape, budgets: list[int | None], passes: list[str], calls: int) -> None:
    import logitless

    inputs = make_inputs(shape, "std1", "cuda")
    product = sum(us for _, _, us in kernels_of(lambda: inputs.hidden @ inputs.weight.T, calls))
    print(f"### {shape.tokens} x {shape.vocab} x {shape.hidden}: product {product:.0f} us\n")
    for budget in budgets:
        limit = budget_of(budget)

        def loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = logitless.linear_cross_entropy(hidden, weight, target, max_workspace_bytes=limit)
            return found

        for pass_ in passes:
            with without_recordings():
                rows = kernels_of(pass_call(Method("logitless", loss), inputs, pass_), calls)
            total = sum(us for _, _, us in rows)
            print(f"{pass_}, {budget_name(budget)}: {total:.0f} us\n")
            table = [[name, f"{launches:g}", f"{us:.1f}"] for name, launches, us in rows]
            print("\n".join(markdown(["kernel", "launches", "us"], table)) + "\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="5094x59508x2099", help="NxVxD")
    parser.add_argument("--budgets", default="unlimited", help="MiB or unlimited")
    parser.add_argument("--passes", default="loss,gradients")
    parser.add_argument("--calls", type=int, default=10)
    args = parser.parse_args()
    for shape in parse_shapes(args.shapes):
        show_shape(shape, parse_budgets(args.budgets), args.passes.split(","), args.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
