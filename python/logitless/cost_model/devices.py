"""Rates of devices, from which seconds are predicted."""

from __future__ import annotations

import dataclasses
import functools

from ..inspection import plan

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU model; the peaks are from its data sheet."""

    name: str
    peak_flops: float  # dense bf16 FLOP a second
    peak_bandwidth: float  # bytes of memory a second
    memory_bytes: int  # memory that programs can have, in whole GiB


DEVICES = {
    "a100": Device("a100", 312e12, 2.039e12, 79 * GIB),
    "h100": Device("h100", 989e12, 3.35e12, 79 * GIB),
    "h200": Device("h200", 989e12, 4.8e12, 139 * GIB),
}

# Shares of these peaks.
# Bandwidth: 4.2 of 4.8 TB/s, which docs/limits.md uses for an H200.
# Attention: 35%, the share of FlashAttention 2 on an H100 (Shah et al., arXiv:2407.08608, abstract). Chunks of
# recurrences have the same share, although GLA's layers take longer: docs/cost_model.md says what a fit would do.
# Attention with a mask: fitted to the step of gemma-270m in bench/records/steps-2026-11-23.json.
BANDWIDTH_SHARE, ATTENTION_SHARE, MASKED_SHARE = 0.875, 0.35, 0.15
# Accounts for gaps between kernels and products smaller than a head's; fitted to llama-1b of that record alone.
LAYERS_FACTOR = 1.1


def find_device(name: str) -> Device:
    if name not in DEVICES:
        raise ValueError(f"device: expected one of {', '.join(DEVICES)}, got {name!r}")
    return DEVICES[name]


@functools.lru_cache(maxsize=16)
def product_rate(device: str) -> float:
    """Returns FLOP a second of a large bf16 product, from the planner's prediction for a loss alone."""
    tokens, vocab, hidden = 8192, 32768, 4096
    seconds = plan(tokens, vocab, hidden, dtype="bfloat16", gradients=(), device=device).predicted_seconds
    return 2.0 * tokens * vocab * hidden / seconds
