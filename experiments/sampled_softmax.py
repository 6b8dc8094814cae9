"""Gradients of a trained head by a sampled softmax and by sparsification, from as many elements: bias and deviation.

    python experiments/convergence/run.py prepare --data FOLDER --text PATH ...
    python experiments/convergence/run.py hidden --data FOLDER --file HEAD.pt --device cpu ...
    python experiments/sampled_softmax.py --data FOLDER --trained HEAD.pt [--rows 512] [--draws 200]

The truth is the gradient of the mean cross entropy over the vocabulary, in float64. Draws are the library's, in float32
on the CPU. A sampled softmax gets as many ids a row as sparsification keeps elements on average, the target included.
Errors are relative to the norm of the true gradient of all rows. LOGITLESS_LIBRARY names liblogitless.so.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "experiments" / "convergence"), str(ROOT / "bench" / "gpu")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import harness  # noqa: E402, F401  # which finds this tree's package

# isort: split
import logitless  # noqa: E402
from logitless.candidates import Sampler, with_negatives  # noqa: E402

from table import markdown  # noqa: E402
from tokens import load  # noqa: E402

GROUPS = 10  # of draws, whose means are compared
Gradients = tuple[Tensor, Tensor]
Draw = Callable[[], Gradients]


class Head(NamedTuple):
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    target: Tensor  # [N]

    def gradients(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Gradients:
        """Returns gradients of hidden states and weight. loss: a function of both."""
        leaves = [tensor.detach().requires_grad_() for tensor in (self.hidden, self.weight)]
        d_hidden, d_weight = torch.autograd.grad(loss(*leaves), leaves)
        return d_hidden, d_weight


class Errors(NamedTuple):
    """Errors of an estimate over the norm of the truth.

    Attributes:
        bias: The norm of the mean's error.
        resolution: A bias that this number of draws could not tell from 0.
        deviation: The root of one draw's mean squared distance from the mean.
    """

    bias: float
    resolution: float
    deviation: float

    def cells(self) -> list[str]:
        return [percent(self.bias, self.resolution), percent(self.deviation)]


def percent(share: float, least: float = 0.0) -> str:
    """Writes a share, with two digits at least, or that it is below the least that can be told."""
    shown = max(share, least)
    return ("< " if share < least else "") + format(shown, ".0%" if shown >= 1 else ".1%" if shown >= 0.001 else ".2%")


class Sums:
    """Sums of draws of one gradient, in groups."""

    def __init__(self, truth: Tensor, draws: int) -> None:
        self.truth, self.size = truth, draws // GROUPS
        self.means = [torch.zeros_like(truth) for _ in range(GROUPS)]
        self.squares = self.count = 0.0

    def add(self, draw: Tensor) -> None:
        error = draw.double() - self.truth
        self.means[int(self.count) // self.size] += error / self.size
        self.squares += float(error.square().sum())
        self.count += 1

    def errors(self) -> Errors:
        """The product of two groups' errors has the squared bias as its mean. All pairs give it, and its error."""
        norm = float(self.truth.square().sum())
        total = torch.stack(self.means).sum(0)
        of_groups = [float(mean.square().sum()) for mean in self.means]
        whole = float(total.square().sum())

        def squared_bias(left_out: int | None) -> float:
            square, own, groups = whole, sum(of_groups), GROUPS
            if left_out is not None:
                square -= 2 * float((total * self.means[left_out]).sum()) - of_groups[left_out]
                own, groups = own - of_groups[left_out], groups - 1
            return (square - own) / (groups * (groups - 1)) / norm

        left_out = [squared_bias(group) for group in range(GROUPS)]
        centre = sum(left_out) / GROUPS
        error = math.sqrt((GROUPS - 1) / GROUPS * sum((value - centre) ** 2 for value in left_out))
        bias = squared_bias(None)
        variance = (self.squares / self.count - whole / GROUPS**2) / norm * self.count / (self.count - 1)
        return Errors(math.sqrt(max(0.0, bias)), math.sqrt(2 * error), math.sqrt(max(0.0, variance)))


def exact(head: Head) -> Gradients:
    """Computes the gradients over the vocabulary in float64."""
    wide = Head(head.hidden.double(), head.weight.double(), head.target)
    return wide.gradients(lambda h, w: torch.nn.functional.cross_entropy(h @ w.T, head.target))


def sparsified(head: Head, threshold: float, seeds: Iterator[int]) -> tuple[Draw, float]:
    """Returns a function that draws, and the mean number of elements a row."""
    options = {"gradient": "always-sparsified", "threshold": threshold}
    leaf = head.hidden.detach().requires_grad_()
    out = logitless.linear_cross_entropy(
        leaf, head.weight, head.target, return_stats=("kept_count",), seed=0, **options
    )

    def draw() -> Gradients:
        seed = next(seeds)
        return head.gradients(lambda h, w: logitless.linear_cross_entropy(h, w, head.target, seed=seed, **options))

    return draw, float(out.kept_count.double().mean())


def sampled(head: Head, sampler: Sampler, ids: Tensor | None, shape: tuple[int, ...]) -> Draw:
    """Returns a function that draws. ids: of the sampler's places. shape: ``[N, K]``, or ``[K]`` for all rows."""
    log_q = sampler.log_q if ids is None else torch.empty_like(sampler.log_q).index_copy(0, ids, sampler.log_q)

    def draw() -> Gradients:
        places = sampler.sample(shape)
        lists, weights = with_negatives(head.target, places if ids is None else ids[places], log_q)
        more = {"log_weights": weights.float(), "targets": head.target}
        return head.gradients(lambda h, w: logitless.linear_candidates(h, w, lists, **more).loss)

    return draw


def measure(head: Head, truth: Gradients, draw: Draw, draws: int) -> list[str]:
    """Returns bias and deviation of both gradients."""
    sums = [Sums(gradient, draws) for gradient in truth]
    for _ in range(draws // GROUPS * GROUPS):
        for each, gradient in zip(sums, draw()):
            each.add(gradient)
    return [cell for each in sums for cell in each.errors().cells()]


def table(head: Head, counts: Tensor, thresholds: list[int], draws: int) -> list[str]:
    """counts: how often each id occurs in the training text."""
    truth, rows, seeds = exact(head), [], iter(range(1, 1 << 30))
    vocab = head.weight.shape[0]
    samplers = {
        "uniform": (Sampler.uniform(vocab), None),
        "log-uniform": (Sampler.log_uniform(vocab), counts.argsort(descending=True, stable=True)),
        "frequency": (Sampler(counts + 1.0), None),
    }
    for power in thresholds:
        draw, kept = sparsified(head, 2.0**-power, seeds)
        size = max(1, round(kept) - 1)
        found = [("sparsified", draw)]
        for name, (sampler, ids) in samplers.items():
            found.append((f"sampled, {name}", sampled(head, sampler, ids, (len(head.target), size))))
            found.append((f"sampled, {name}, one list", sampled(head, sampler, ids, (size,))))
        for name, draw in found:
            rows.append([f"{name}, 2^-{power}" if name == "sparsified" else name, f"{kept:.0f}"])
            rows[-1] += measure(head, truth, draw, draws)
            print(" | ".join(rows[-1]), flush=True)
    of = [f"`{name}`: {what}" for name in ("d_hidden", "d_weight") for what in ("bias", "deviation")]
    return markdown(["Estimate", "Elements a row", *of], rows)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=pathlib.Path, required=True)
    arguments.add_argument("--trained", type=pathlib.Path, required=True)
    arguments.add_argument("--rows", type=int, default=512)
    arguments.add_argument("--draws", type=int, default=200)
    arguments.add_argument("--thresholds", type=int, nargs="+", default=[7, 9], metavar="K", help="2^-K")
    args = arguments.parse_args()
    if args.draws < GROUPS:
        arguments.error(f"--draws: expected at least {GROUPS}, got {args.draws}")
    torch.manual_seed(0)
    dump = torch.load(args.trained, weights_only=True)
    head = Head(dump["hidden"][: args.rows].float(), dump["weight"].float(), dump["target"][: args.rows])
    text = torch.from_numpy(load(args.data).train.astype("int64"))
    counts = torch.bincount(text, minlength=head.weight.shape[0])
    print(f"N {len(head.target)}, V {len(counts)}, D {head.hidden.shape[1]}, {args.draws} draws; "
          f"held-out loss {float(dump['validation']):.2f}")  # fmt: skip
    print("\n".join(table(head, counts, args.thresholds, args.draws)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
