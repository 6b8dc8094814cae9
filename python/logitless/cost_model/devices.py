"""Rates of devices: what predicted seconds are made of."""

from __future__ import annotations

import dataclasses
import functools

from ..inspection import plan

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Device:
    """A model of GPU; peaks are of its data sheet."""

    name: str
    peak_flops: float  # of dense bf16 products a second
    peak_bandwidth: float  # bytes of its memory a second
    memory_bytes: int  # that programs can have of its memory, in whole GiB


DEVICES = {
    "a100": Device("a100", 312e12, 2.039e12, 79 * GIB),
    "h100": Device("h100", 989e12, 3.35e12, 79 * GIB),
    "h200": Device("h200", 989e12, 4.8e12, 139 * GIB),
}

# Shares of these peaks. Bandwidth: the 4.2 of 4.8 TB/s that docs/limits.md reckons with on an H200. Attention:
# 35%, FlashAttention 2's on an H100 (Shah et al., arXiv:2407.08608, abstract), taken for recurrences' chunks, too.
# GLA's layers take longer than that. Recurrences have no share of their own: docs/cost_model.md says what a fit does.
# Attention with a mask: fitted to the step of gemma-270m in bench/records/steps-2026-11-23.json.
BANDWIDTH_SHARE, ATTENTION_SHARE, MASKED_SHARE = 0.875, 0.35, 0.15
# What is not counted (gaps between kernels, products smaller than a head's): fitted to llama-1b of that record alone.
LAYERS_FACTOR = 1.1


def find_device(name: str) -> Device:
    if name not in DEVICES:
        raise ValueError(f"device: expected one of {', '.join(DEVICES)}, got {name!r}")
    return DEVICES[name]


@functools.lru_cache(maxsize=16)
def product_rate(device: str) -> float:
    """FLOP a second of a large bf16 product, as Logitless's planner predicts it of a loss alone."""
    tokens, vocab, hidden = 8192, 32768, 4096
    seconds = plan(tokens, vocab, hidden, dtype="bfloat16", gradients=(), device=device).predicted_seconds
    return 2.0 * tokens * vocab * hidden / seconds
