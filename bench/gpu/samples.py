#!/usr/bin/env python3
"""Sampling from a head: logitless.sample beside its own loss and PyTorch's ways with whole logits.

    python bench/gpu/samples.py [N,V,D ...] [--rounds 9] [--calls 10] [--graphs]

A round times every call once, in random order, as several in one queue. Prints medians in ms for bf16 operands. With
--graphs the calls are replays of CUDA graphs, as in a server's decode step, and rates follow: GB/s of reading the
weight once, beside those of a copy of it, which reads and writes.
"""

from __future__ import annotations

import argparse
import functools
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


def graph_of(call: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="N,V,D")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=10, help="of each method in a round")
    parser.add_argument("--graphs", action="store_true", help="time replays of CUDA graphs, and print rates")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    clock = Clock(args.device)
    for shape in args.shapes:
        tokens, vocab, hidden_size = (int(size) for size in shape.split(","))
        calls = calls_of(tokens, vocab, hidden_size, device=args.device)
        if args.graphs:
            calls = {name: graph_of(call) for name, call in calls.items()}
            source = torch.empty(vocab, hidden_size, device=args.device, dtype=torch.bfloat16)
            calls["copy"] = functools.partial(torch.empty_like(source).copy_, source)
        for call in calls.values():
            call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.rounds):
            for name in random.sample(list(calls), len(calls)):
                times[name].append(clock.together_ms(calls[name], args.calls))
        medians = {name: statistics.median(of) for name, of in times.items()}
        print(shape, {name: round(ms, 3) for name, ms in medians.items()}, flush=True)
        if args.graphs:
            moved = 2e-6 * vocab * hidden_size
            rates = {name: round(moved * (1 + (name == "copy")) / ms) for name, ms in medians.items()}
            print(f"{shape}, GB/s", rates, flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
