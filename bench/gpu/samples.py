#!/usr/bin/env python3
"""Sampling from a head: logitless.sample beside its own loss and PyTorch's ways with whole logits.

    python bench/gpu/samples.py [N,V,D ...] [--rounds 9] [--calls 10]

A round times every call once, in random order, as several in one queue. Prints medians in ms for bf16 operands.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable

import torch

import harness  # noqa: F401  # finds this tree's package
from clock import Clock

SHAPES = [
    "8192,128256,4096",
    "8192,131072,2048",
    "256,128256,4096",
    "64,128256,4096",
    "8,128256,4096",
    "1,128256,4096",
]


def calls_of(tokens: int, vocab: int, hidden_size: int, device: str) -> dict[str, Callable[[], object]]:
    import logitless

    def make(rows: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, hidden_size, device=device) * scale).bfloat16()

    hidden, weight = make(tokens, 1.0), make(vocab, hidden_size**-0.5)
    targets = torch.randint(vocab, (tokens,), device=device)
    seed = torch.zeros((), dtype=torch.int64, device=device)

    def race() -> torch.Tensor:
        z = (hidden @ weight.T).float()
        return (z - torch.empty_like(z).exponential_().log()).argmax(-1)

    return {
        "one matmul": lambda: hidden @ weight.T,
        "softmax, multinomial": lambda: torch.multinomial(torch.softmax((hidden @ weight.T).float(), -1), 1),
        "exponential race": race,
        "loss": lambda: logitless.linear_cross_entropy(hidden, weight, targets, reduction="none"),
        "sample": lambda: logitless.sample(hidden, weight, seed=seed),
        "4 samples": lambda: logitless.sample(hidden, weight, seed=seed, num_samples=4),
        "top 8": lambda: logitless.linear_top_k(hidden, weight, 8),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="N,V,D")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=10, help="of each method in a round")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    clock = Clock(args.device)
    for shape in args.shapes:
        calls = calls_of(*(int(size) for size in shape.split(",")), device=args.device)
        for call in calls.values():
            call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.rounds):
            for name in random.sample(list(calls), len(calls)):
                times[name].append(clock.together_ms(calls[name], args.calls))
        print(shape, {name: round(statistics.median(of), 3) for name, of in times.items()}, flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
