"""Does the sum of d_hidden over ranks hide behind d_classifier's product? The product alone, the all-reduce alone, one
after the other, and beside each other: whole or in eight parts, NCCL's stream of the same priority or of a higher one.

    python bench/gpu/overlap.py [--shapes 8192x131072x4096,...] [--rounds 7] [--json FILE]
    python bench/gpu/overlap.py --show FILE

Two ranks, each with a GPU and half of the vocabulary. Times are medians of rounds in which all ways take turns, of one
call after a short idle, the larger of the ranks'.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from clock import Clock  # noqa: E402
from parallel import SHAPES, burst_ms  # noqa: E402
from ranks import of_all, record_of  # noqa: E402
from shapes import Shape, parse_shapes  # noqa: E402
from table import markdown, number  # noqa: E402

RANKS, PARTS = 2, 8


def ways(shape: Shape, device: str, high: Any) -> dict[str, Callable[[], Any]]:
    rows = shape.vocab // RANKS // PARTS * PARTS
    dz = torch.randn(shape.tokens, rows, device=device, dtype=torch.bfloat16)
    hidden = torch.randn(shape.tokens, shape.hidden, device=device, dtype=torch.bfloat16)
    d_classifier, d_hidden = torch.empty(rows, shape.hidden, device=device, dtype=hidden.dtype), hidden.clone()

    def product(parts: int = 1) -> None:
        for part, into in zip(dz.chunk(parts, 1), d_classifier.chunk(parts)):
            torch.mm(part.t(), hidden, out=into)

    def beside(group: Any, parts: int) -> Callable[[], None]:
        def both() -> None:
            work = dist.all_reduce(d_hidden, group=group, async_op=True)
            product(parts)
            assert work is not None
            work.wait()

        return both

    def in_turn() -> None:
        product()
        dist.all_reduce(d_hidden)

    return {
        "the product": product,
        "the all-reduce": lambda: dist.all_reduce(d_hidden),
        "one after the other": in_turn,
        "beside each other": beside(None, 1),
        "the same, in eight parts": beside(None, PARTS),
        "beside, NCCL's stream first": beside(high, 1),
        "the same, in eight parts, NCCL's stream first": beside(high, PARTS),
    }


def work(rank: int, asked: argparse.Namespace, store: str) -> None:
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=RANKS)
    first: Any = vars(dist)["ProcessGroupNCCL"].Options(is_high_priority_stream=True)
    high, clock, shuffle = dist.new_group(backend="nccl", pg_options=first), Clock(device), random.Random(0)
    found: dict[str, dict[str, list[float]]] = {}
    for shape in parse_shapes(asked.shapes):
        calls = ways(shape, device, high)
        for call in calls.values():
            call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(asked.rounds):
            for name in shuffle.sample(list(calls), len(calls)):
                times[name].append(max(of_all(burst_ms(calls[name], device, clock, True), RANKS)))
        found[shape.name] = times
        del calls
        torch.cuda.empty_cache()
    if rank == 0:
        asked.partial.write_text(json.dumps({"shapes": found}))
    dist.destroy_process_group()


def show(record: dict[str, Any]) -> None:
    for facts in ("date", "device", "command"):
        print(f"{facts}: {record[facts]}")
    shapes = record["shapes"]
    ways_of_first = next(iter(shapes.values()))
    rows = [[way, *(number(statistics.median(of[way]), ".3f") for of in shapes.values())] for way in ways_of_first]
    print("\n" + "\n".join(markdown(["ms", *shapes], rows)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--show", type=pathlib.Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.show:
        show(json.loads(asked.show.read_text()))
        return 0
    if torch.cuda.device_count() < RANKS:
        print(f"needs {RANKS} GPUs, got {torch.cuda.device_count()}", file=sys.stderr)
        return 2
    show(record_of(work, asked, RANKS, "cuda"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
