"""A plain bf16 product in Triton: grouped tiles, pointers, no copy engine.

DISABLE_MMA_V3 makes Triton compile it to mma.sync and cp.async, as on an A100.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from clock import Clock

CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": 8}, num_stages=stages, num_warps=8)
    for m, n in ((128, 256), (256, 128), (128, 128))
    for k, stages in ((32, 4), (64, 3))
]


@triton.autotune(configs=CONFIGS, key=["rows", "columns", "depth"])
@triton.jit
def product(
    hidden,
    weight,
    logits,
    rows,
    columns,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    number = tl.program_id(0)
    across = tl.cdiv(columns, BLOCK_N)
    first = number // (GROUP * across) * GROUP
    tall = min(tl.cdiv(rows, BLOCK_M) - first, GROUP)
    i = first + number % (GROUP * across) % tall
    j = number % (GROUP * across) // tall
    row = (i * BLOCK_M + tl.arange(0, BLOCK_M)) % rows
    column = (j * BLOCK_N + tl.arange(0, BLOCK_N)) % columns
    k = tl.arange(0, BLOCK_K)
    a = hidden + row[:, None].to(tl.int64) * depth + k[None, :]
    b = weight + column[None, :].to(tl.int64) * depth + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, tl.cdiv(depth, BLOCK_K)):
        sums = tl.dot(tl.load(a), tl.load(b), sums)
        a += BLOCK_K
        b += BLOCK_K
    row = i * BLOCK_M + tl.arange(0, BLOCK_M)
    column = j * BLOCK_N + tl.arange(0, BLOCK_N)
    out = logits + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(out, sums.to(tl.bfloat16), mask=(row[:, None] < rows) & (column[None, :] < columns))


def measure(rows: int, columns: int, depth: int, launches: int) -> dict[str, Any]:
    """Returns seconds of each launch, after a rest and back to back, or the reason for having none."""
    result: dict[str, Any] = {"what": "Triton's product", "device": "whole", "flop": 2.0 * rows * columns * depth}
    if depth % 64 != 0:
        return {**result, "why_not": "Triton's product is of depths that 64 divides"}
    hidden = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)
    logits = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)

    def launch() -> Any:
        def grid(meta: dict[str, int]) -> tuple[int]:
            return (triton.cdiv(rows, meta["BLOCK_M"]) * triton.cdiv(columns, meta["BLOCK_N"]),)

        return product[grid](hidden, weight, logits, rows, columns, depth)

    code = launch().asm["ptx"]
    if "wgmma" in code or "mma.sync" not in code:
        return {**result, "why_not": "Triton has used Hopper's instructions: no peer"}
    clock = Clock("cuda", idle_seconds=0.1)
    burst = [1e-3 * clock.burst_ms(launch) for _ in range(launches)]
    warm = [1e-3 * milliseconds for milliseconds in clock.back_to_back_ms([launch] * launches)]
    return {**result, "burst_seconds": burst, "seconds": warm}
