"""Compares a head shared by GPUs with the same head on one GPU.

It measures vocabulary parallel and sequence parallel heads, the loss alone, and sparsified gradients of flat and peaked
data.

    python bench/gpu/parallel.py [--ranks 2] [--shapes 8192x131072x4096,...] [--rounds 7] [--minutes 6] [--json FILE]
    python bench/gpu/parallel.py --show FILE
    python bench/gpu/parallel.py --device cpu --shapes 64x100x32 --rounds 1      tries it out, with gloo

Every rank is a process with its own GPU; for the single-GPU case rank 0 works and the others wait. All ways take turns
in random order in each round, timed in two modes. "After idle" is one call after a short idle, when clocks are high;
all ranks begin it together. "Steady" is calls for 0.6 s, back to back after as many more, when the GPUs are as warm as
in training. A way's time is the maximum over ranks; its ratio is to one GPU in the same round. "Shards alone" treats
each rank's part of the vocabulary as a head of its own, without exchange. Memory is the allocator's peak above inputs,
the maximum over ranks. LOGITLESS_LIBRARY names liblogitless.so.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

from harness import parser
from ranks import in_turns, main, of_all, out_of_time
from shapes import Shape
from table import markdown, number

SHAPES = "8192x131072x4096,4096x256000x2304,16384x128000x2048"
IDLE_SECONDS = 0.1
STEADY_SECONDS, STEADY_ROUNDS = 0.6, 2
SPARSIFIED = {"flat": "std1", "peaked": "peaked"}  # data of each
ONE = dict.fromkeys(("shards alone", "vocabulary parallel", "sequence parallel"), "one GPU")
ONE |= {"loss, vocabulary parallel": "loss, one GPU"}
ONE |= {f"sparsified, {data}, vocabulary parallel": f"sparsified, {data}, one GPU" for data in SPARSIFIED}
NOT_STEADY = {"all-reduce of d_hidden"}
Call = Callable[[], Any]


def ways(shape: Shape, device: str, rank: int, ranks: int) -> dict[str, Call | None]:
    """Returns each way's call on this rank, or None if the rank is idle. Every call but the bare collective returns a
    loss."""
    import logitless
    import logitless.distributed
    import torch
    import torch.distributed as dist

    from data import make_inputs

    whole = make_inputs(shape, "std3", device)
    rows = [shape.vocab * i // ranks for i in range(ranks + 1)]
    shard = whole.weight[rows[rank] : rows[rank + 1]].clone()
    if shape.tokens % ranks:
        raise ValueError(f"--shapes: expected tokens that {ranks} ranks can share, got {shape.name}")
    tokens = shape.tokens // ranks
    part = whole.hidden[rank * tokens : (rank + 1) * tokens].clone()

    def call(
        function: Callable[..., Any], hidden: Any, weight: Any, target: Any = whole.target, **options: Any
    ) -> Call:
        def both() -> Any:
            leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = function(*leaves, target, **options)
            loss.backward()
            return loss.detach()

        return both

    def loss_of(function: Callable[..., Any], weight: Any) -> Call:
        def loss() -> Any:
            with torch.no_grad():
                return function(whole.hidden, weight, whole.target)

        return loss

    one, group = logitless.linear_cross_entropy, logitless.distributed.linear_cross_entropy
    sparsified: dict[str, Call | None] = {}
    for name, kind in SPARSIFIED.items():
        inputs = make_inputs(shape, kind, device)  # the weight is the same for every kind
        options = {"target": inputs.target, "gradient": "always-sparsified", "threshold": 2.0**-9, "seed": 1}
        sparsified[f"sparsified, {name}, one GPU"] = (
            call(one, inputs.hidden, whole.weight, **options) if rank == 0 else None
        )
        sparsified[f"sparsified, {name}, vocabulary parallel"] = call(group, inputs.hidden, shard, **options)
    summed = torch.zeros_like(whole.hidden)
    alone = call(one, whole.hidden, shard, whole.target % shard.shape[0])

    def shards_alone() -> None:  # its losses differ from the shared head's
        alone()

    return {
        "one GPU": call(one, whole.hidden, whole.weight) if rank == 0 else None,
        "shards alone": shards_alone,
        "vocabulary parallel": call(group, whole.hidden, shard),
        "sequence parallel": call(group, part, shard, sequence_parallel=True),
        "loss, one GPU": loss_of(one, whole.weight) if rank == 0 else None,
        "loss, vocabulary parallel": loss_of(group, shard),
        **sparsified,
        "all-reduce of d_hidden": lambda: dist.all_reduce(summed),
    }


def burst_ms(call: Call | None, device: str, clock: Any, together: bool) -> float:
    """Times one call, which the participating ranks begin together."""
    import torch
    import torch.distributed as dist

    ready = torch.zeros(1, device=device)
    if device != "cpu":
        clock.wait()
        time.sleep(IDLE_SECONDS)
    dist.barrier()
    if call is None:
        return 0.0
    meet = [lambda: dist.all_reduce(ready)] if together else []
    return float(clock.back_to_back_ms([*meet, call])[-1])


def steady_ms(call: Call | None, clock: Any, one_ms: float) -> float:
    """Returns a call's time among calls for STEADY_SECONDS, after as many more. ``one_ms`` estimates it."""
    import torch.distributed as dist

    clock.wait()
    dist.barrier()
    if call is None:
        return 0.0
    calls = max(3, round(1e3 * STEADY_SECONDS / one_ms))
    for _ in range(calls):
        call()
    return float(clock.together_ms(call, calls))


def measure(shape: Shape, device: str, rank: int, ranks: int, rounds: int, end: float) -> dict[str, Any]:
    from clock import Clock

    clock = Clock(device)
    calls = ways(shape, device, rank, ranks)
    record: dict[str, Any] = {}
    for name, call in calls.items():
        peak = clock.peak_bytes(call) if call else None
        loss = call() if call else None
        values = of_all(None if loss is None else loss.double().item(), ranks)
        peaks, losses = of_all(peak, ranks), [value for value in values if value is not None]
        record[name] = {
            "peak_bytes": max((value for value in peaks if value is not None), default=None),
            "loss": losses[0] if losses else None,
            "same_on_all_ranks": len(set(losses)) <= 1,
            "ms": [],
            "steady_ms": [],
        }
    one_gpu = set(ONE.values())
    shuffle = random.Random(0)  # same order on all ranks
    for turn in range(rounds):
        steady = turn < STEADY_ROUNDS and device != "cpu"
        for name in shuffle.sample(list(calls), len(calls)):
            if out_of_time(end, ranks):
                return record
            ms = max(of_all(burst_ms(calls[name], device, clock, name not in one_gpu), ranks))
            record[name]["ms"].append(ms)
            if steady and name not in NOT_STEADY:
                record[name]["steady_ms"].append(max(of_all(steady_ms(calls[name], clock, ms), ranks)))
    return record


def measure_all(asked: argparse.Namespace, device: str, rank: int, end: float, save: Callable[[Any], None]) -> None:
    record: dict[str, Any] = {"ranks": asked.ranks, "shapes": {}}
    save(record)
    for shape in asked.shapes:
        if out_of_time(end, asked.ranks):
            break
        record["shapes"][shape.name] = measure(shape, device, rank, asked.ranks, asked.rounds, end)
        save(record)


def show(record: dict[str, Any]) -> None:
    for facts in ("date", "device", "command"):
        print(f"{facts}: {record[facts]}")
    for name, ways_of in record["shapes"].items():
        rows = []
        for way, of_way in ways_of.items():
            one = ways_of[ONE[way]] if way in ONE else None
            (ms, ratio), (steady, steady_ratio) = (in_turns(of_way, one, which) for which in ("ms", "steady_ms"))
            peak = of_way["peak_bytes"]
            mib = None if peak is None else peak / 2**20
            same = "yes" if of_way["same_on_all_ranks"] else "**no**"
            times = [number(ms), number(ratio, ".3f"), number(steady), number(steady_ratio, ".3f")]
            rows.append([way, *times, number(mib, ".0f"), number(of_way["loss"], ".9g"), same])
        print(f"\n{name}, {record['ranks']} ranks, {len(ways_of['one GPU']['ms'])} rounds\n")
        titles = [
            "way",
            "after idle, ms",
            "of one GPU",
            "steady, ms",
            "of one GPU",
            "MiB",
            "loss",
            "the same on all ranks",
        ]
        print("\n".join(markdown(titles, rows)))


if __name__ == "__main__":
    options = parser(__doc__, ranks=2, minutes=6.0, json=None, show=None, shapes=SHAPES, rounds=7)
    raise SystemExit(main(options, measure_all, show))
