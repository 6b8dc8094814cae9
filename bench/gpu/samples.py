#!/usr/bin/env python3
"""Sampling from a head: logitless.sample beside its own loss, PyTorch's ways with whole logits, and other libraries.

    python bench/gpu/samples.py [N,V,D ...] [--rounds 9] [--calls 10] [--graphs]

A round times every call once, in random order, as several in one queue. Prints medians in ms for bf16 operands, and
each sampler's median ratio to logitless.sample with its arguments. With --graphs the calls are replays of CUDA graphs,
as in a server's decode step. Rates follow: GB/s of reading the weight once, beside those of a copy of it, which reads
and writes.

Before it is timed, a sampler's ids are checked against the softmax. A peer that is missing, fails or draws from another
distribution is left out, with the reason. requirements-peers.txt has FlashInfer and FlashSampling.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from clock import Call, Clock
from harness import describe, ratio_of

SHAPES = [
    "8192,128256,4096",
    "8192,131072,2048",
    "256,128256,4096",
    "64,128256,4096",
    "8,128256,4096",
    "1,128256,4096",
]

TOP_K = 50
TRUNCATED = f", top-k {TOP_K}"  # the end of a truncating sampler's name
OURS = "sample"
NO_SAMPLERS = ("one matmul", "loss", "top 8", "copy")
OURS_TRUNCATED = OURS + TRUNCATED
# A sum of log-probabilities is nearly normal, and is further off than this once in 500 million samplers.
STANDARD_ERRORS = 6.0


def calls_of(hidden: Tensor, weight: Tensor) -> dict[str, Call]:
    import logitless

    targets = torch.randint(len(weight), (len(hidden),), device=hidden.device)
    seed = torch.zeros((), dtype=torch.int64, device=hidden.device)

    def race() -> Tensor:
        z = (hidden @ weight.T).float()
        return (z - torch.empty_like(z).exponential_().log()).argmax(-1)

    return {
        "one matmul": lambda: hidden @ weight.T,
        "softmax, multinomial": lambda: torch.multinomial(torch.softmax((hidden @ weight.T).float(), -1), 1),
        "exponential race": race,
        "loss": lambda: logitless.linear_cross_entropy(hidden, weight, targets, reduction="none"),
        OURS: lambda: logitless.sample(hidden, weight, seed=seed).ids,
        "4 samples": lambda: logitless.sample(hidden, weight, seed=seed, num_samples=4).ids,
        OURS_TRUNCATED: lambda: logitless.sample(hidden, weight, seed=seed, top_k=TOP_K).ids,
        "top 8": lambda: logitless.linear_top_k(hidden, weight, 8),
    }


def flashinfer(hidden: Tensor, weight: Tensor) -> dict[str, Call]:
    from flashinfer.sampling import sampling_from_logits, top_k_sampling_from_probs

    # Numbers would be read from the generator on the host, which no graph captures.
    seed, offset = torch.zeros(2, 1, dtype=torch.int64, device=hidden.device)
    return {
        "FlashInfer": lambda: sampling_from_logits(hidden @ weight.T, seed=seed, offset=offset),
        "FlashInfer" + TRUNCATED: lambda: top_k_sampling_from_probs(
            torch.softmax((hidden @ weight.T).float(), -1), TOP_K, seed=seed, offset=offset
        ),
    }


def flash_sampling(hidden: Tensor, weight: Tensor) -> dict[str, Call]:
    from fused_mm_sampling.core import fused_mm_sample_triton

    divisor = torch.ones((), device=hidden.device)  # of the logits
    return {"FlashSampling": lambda: fused_mm_sample_triton(weight, hidden, 1, divisor, seed=0)}


PEERS: dict[str, Callable[[Tensor, Tensor], dict[str, Call]]] = {
    "FlashInfer": flashinfer,
    "FlashSampling": flash_sampling,
}


def truncated(p: Tensor) -> Tensor:
    """Keeps the TOP_K largest probabilities."""
    largest, ids = p.topk(min(TOP_K, p.shape[1]))
    return torch.zeros_like(p).scatter_(1, ids, largest / largest.sum(-1, keepdim=True))


def standard_errors(ids: Tensor, log_p: Tensor, p: Tensor) -> float:
    """Returns how far the sum of the ids' log_p is from what ids drawn from p would have, in its standard errors."""
    ids = ids.reshape(len(log_p), -1).long()
    if bool(((ids < 0) | (ids >= log_p.shape[1])).any()):
        return float("inf")
    mean = (p * log_p).sum(-1, keepdim=True)
    variance = (p * (log_p - mean).square_()).sum(-1, dtype=torch.float64)
    off = (log_p.gather(1, ids) - mean).sum(dtype=torch.float64)
    return float(off.abs() / (ids.shape[1] * variance.sum()).sqrt())


def check(name: str, call: Call, hidden: Tensor, weight: Tensor) -> None:
    """Raises an error if a sampler's ids are not of the softmax. As many rows are compared as 1 GiB of logits has."""
    ids = call()
    assert isinstance(ids, Tensor)
    rows = slice(0, max(1, 2**28 // len(weight)))
    log_p = torch.log_softmax(hidden[rows].float() @ weight.float().T, -1)
    off = standard_errors(ids[rows], log_p, truncated(log_p.exp()) if TRUNCATED in name else log_p.exp())
    if not off <= STANDARD_ERRORS:
        raise ValueError(
            f"log-probabilities of ids: expected within {STANDARD_ERRORS:g} standard errors, got {off:.3g}"
        )


def peer_calls(hidden: Tensor, weight: Tensor) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for name, peer in PEERS.items():
        try:
            calls |= peer(hidden, weight)
        except Exception as error:  # it may be missing, or its import may fail in any way
            print(f"{name} is left out: {describe(error)}", flush=True)
    return calls


def prepared(
    calls: dict[str, Call], hidden: Tensor, weight: Tensor, graphs: bool, peers: bool = False
) -> dict[str, Call]:
    """Returns checked calls, as graphs where wanted and possible. A failing peer is left out."""
    ready = {}
    for name, call in calls.items():
        try:
            if name not in NO_SAMPLERS:
                check(name, call, hidden, weight)
            ready[name] = graph_of(call) if graphs else call
            ready[name]()
        except Exception as error:
            if not peers:
                raise
            ready.pop(name, None)
            print(f"{name} is left out: {describe(error)}", flush=True)
    return ready


def graph_of(call: Call) -> Call:
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
        hidden = torch.randn(tokens, hidden_size, device=args.device).bfloat16()
        weight = (torch.randn(vocab, hidden_size, device=args.device) * hidden_size**-0.5).bfloat16()
        calls = prepared(calls_of(hidden, weight), hidden, weight, args.graphs)
        calls |= prepared(peer_calls(hidden, weight), hidden, weight, args.graphs, peers=True)
        if args.graphs:
            calls["copy"] = functools.partial(torch.empty_like(weight).copy_, weight)
            calls["copy"]()
        times: dict[str, dict[int, float]] = {name: {} for name in calls}
        for index in range(args.rounds):
            for name in random.sample(list(calls), len(calls)):
                times[name][index] = clock.together_ms(calls[name], args.calls)
        medians = {name: statistics.median(of.values()) for name, of in times.items()}
        print(shape, {name: round(ms, 3) for name, ms in medians.items()}, flush=True)
        ratios = {
            name: round(ratio_of(of, times[OURS_TRUNCATED if TRUNCATED in name else OURS]) or 0.0, 3)
            for name, of in times.items()
            if name not in (OURS, OURS_TRUNCATED)
        }
        print(f"{shape}, of {OURS}", ratios, flush=True)
        if args.graphs:
            moved = 2e-6 * vocab * hidden_size
            rates = {name: round(moved * (1 + (name == "copy")) / ms) for name, ms in medians.items()}
            print(f"{shape}, GB/s", rates, flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
