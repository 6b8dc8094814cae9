"""Predicts the times of products and exchanges of a head whose vocabulary is shared by a group of ranks.

    python -m logitless.cost_model.groups        # the table of docs/distributed.md

The library's planner predicts the products, for the largest shard. An exchange takes ``CALL_SECONDS``, and the time to
send its bytes over a rank's links in rings. Both constants are fitted to bare collectives of NCCL between two H200s
joined by NVLink (MEASURED). Rings across whole nodes are assumed to leave each node by all of its NICs, at the same
share of their peak. The latency of a hop is left out, so groups across nodes take longer than predicted.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence

from .. import native
from .. import options as _options

CALL_SECONDS = 60e-6
NVLINK_SHARE = 268e9 / 450e9  # measured share of the peak
NVLINK_PEAK = 450e9  # bytes a second each way: NVLink 4, 900 GB/s both ways (NVIDIA H200 data sheet)
NIC_PEAK = 50e9  # 400 Gb/s a GPU: ConnectX-7 (NVIDIA DGX H200 user guide)
RANKS_OF_NODE = 8

HEADS = ((4096, 256_000, 2304), (8192, 131_072, 4096), (16_384, 128_000, 2048))
LINKED = ("h100", "h200")  # joined by NVLink 4, in nodes with a network adapter of 50 GB/s for each GPU
# Each exchange between two ranks: the least and the most ms over HEADS, and its bytes and passes for N and D.
MEASURED: dict[str, tuple[float, float, Callable[[int, int], tuple[int, int]]]] = {
    "all-gather of statistics": (0.06, 0.06, lambda n, d: (2 * 3 * 4 * n, 1)),
    "all-reduce of d_hidden, bf16": (0.13, 0.31, lambda n, d: (2 * n * d, 2)),
    "all-reduce of d_hidden, float32": (0.20, 0.56, lambda n, d: (4 * n * d, 2)),
    "reduce-scatter of d_hidden, float32": (0.14, 0.36, lambda n, d: (4 * n * d, 1)),
    "all-gather of hidden, bf16": (0.10, 0.19, lambda n, d: (2 * n * d, 1)),
}


def bandwidth(ranks: int) -> float:
    """Returns the bytes a second that a rank sends in rings."""
    return NVLINK_SHARE * (NVLINK_PEAK if ranks <= RANKS_OF_NODE else min(NVLINK_PEAK, RANKS_OF_NODE * NIC_PEAK))


def exchange_seconds(ranks: int, size: float, passes: int = 1) -> float:
    """Returns the time of an exchange.

    Args:
        ranks: The number of ranks.
        size: Bytes of all ranks' parts together.
        passes: 1 for an all-gather or a reduce-scatter, 2 for an all-reduce.
    """
    return 0.0 if ranks == 1 else CALL_SECONDS + passes * size * (ranks - 1) / ranks / bandwidth(ranks)


@dataclasses.dataclass(frozen=True)
class GroupCost:
    """The predicted cost of one rank."""

    ranks: int  # ranks of the group
    product_seconds: float  # forward and backward of the largest shard, as the planner predicts it
    statistics_seconds: float  # all-gathers of row statistics
    reduction_seconds: float  # sum of d_hidden over ranks
    gather_seconds: float  # all-gather of hidden, with sequence_parallel
    workspace_bytes: int  # the plan's workspace

    @property
    def seconds(self) -> float:
        """The sum of all times: the library does not overlap exchanges with products."""
        return self.product_seconds + self.statistics_seconds + self.reduction_seconds + self.gather_seconds


def group_cost(
    tokens: int,
    vocab: int,
    hidden: int,
    ranks: int,
    *,
    sequence_parallel: bool = False,
    max_workspace_bytes: int | str | None = "fastest",
    device: str = "h200",
) -> GroupCost:
    """Predicts the cost of a bf16 head whose vocabulary is shared by ``ranks`` GPUs, in nodes of eight.

    Args:
        tokens: N.
        vocab: V.
        hidden: D.
        ranks: The number of GPUs.
        sequence_parallel: Whether each rank has the hidden states of its own tokens only.
        max_workspace_bytes: As in :func:`logitless.linear_cross_entropy`.
        device: ``h100`` or ``h200``.

    Raises:
        ValueError: There are fewer columns than ranks, or the device's links are not known here.
    """
    if device not in LINKED:
        raise ValueError(f"device: expected one of {', '.join(LINKED)} (their links are known), got {device}")
    if not 1 <= ranks <= vocab:
        raise ValueError(f"ranks: expected a number in [1, {vocab}] (at most one for each column), got {ranks}")
    shard = -(-vocab // ranks)
    names = ("hidden", "weight", "d_hidden", "d_weight")
    spec = native.spec(
        (tokens, shard, hidden),
        dict.fromkeys(names, _options.BF16) | {"targets": _options.I64},
        pass_=_options.FORWARD_BACKWARD,
        vocab_total=vocab,
        group_size=ranks,
        group_vocab=shard,
        max_workspace_bytes=_options.budget(max_workspace_bytes),
    )
    plan = native.plan_of(spec, 0, None, device).info
    size = 2.0 * tokens * hidden
    statistics = plan.gathers * exchange_seconds(ranks, plan.gathered_bytes / max(plan.gathers, 1))
    reduction = exchange_seconds(ranks, size, 1 if sequence_parallel else 2)
    gather = exchange_seconds(ranks, size) if sequence_parallel else 0.0
    return GroupCost(ranks, plan.predicted_seconds, statistics, reduction, gather, plan.workspace_bytes)


def fitted() -> dict[str, tuple[float, float]]:
    """Returns the formula's least and most ms for each exchange of MEASURED."""
    times = {}
    for name, (_, _, exchange) in MEASURED.items():
        ms = [1e3 * exchange_seconds(2, *exchange(n, d)) for n, _, d in HEADS]
        times[name] = (min(ms), max(ms))
    return times


def table(ranks: Sequence[int] = (1, 2, 8, 64, 1024), device: str = "h200") -> str:
    """Returns the table of docs/distributed.md in Markdown."""
    lines = [
        "| N x V x D | GPUs | products, ms | exchanges, ms | together, ms | times one GPU's speed |",
        "|---|---|---|---|---|---|",
    ]
    for head in HEADS[1:2] + HEADS[:1] + HEADS[2:]:
        alone = group_cost(*head, 1, device=device)
        for count in ranks:
            cost = group_cost(*head, count, device=device)
            milliseconds = (cost.product_seconds, cost.seconds - cost.product_seconds, cost.seconds)
            cells = " | ".join(f"{1e3 * each:.2f}" for each in milliseconds)
            name = " x ".join(map(str, head))
            lines.append(f"| {name} | {count} | {cells} | {alone.seconds / cost.seconds:.1f} |")
    return "\n".join(lines)


def _main() -> None:
    parser = argparse.ArgumentParser(description="Predicted times of a head whose vocabulary ranks share.")
    parser.add_argument("--device", default="h200", help=" or ".join(LINKED))
    parser.add_argument("--ranks", default="1,2,8,64,1024", help="numbers of ranks, separated by commas")
    arguments = parser.parse_args()
    print(table([int(count) for count in arguments.ranks.split(",")], arguments.device))
    print("\nTwo ranks, ms: measured, and by the formula")
    for name, (least, most) in fitted().items():
        print(f"{name}: {MEASURED[name][0]:.2f} to {MEASURED[name][1]:.2f}, {least:.2f} to {most:.2f}")


if __name__ == "__main__":
    _main()
