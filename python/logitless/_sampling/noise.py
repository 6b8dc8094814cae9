"""The noise of samples, as src/core/sampling.h makes it.

So a sample of a truncated softmax is that of the whole one where this is kept. PyTorch's integers have 64 bits and a
sign. Their products have the lower bits of unsigned ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)


def _shifted(h: Tensor, shift: int) -> Tensor:
    return h ^ (h >> shift) & ((1 << (64 - shift)) - 1)


def _mix64(h: Tensor) -> Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64))):
        h = _shifted(h, shift) * factor
    return _shifted(h, 31)


def _mix32(h: Tensor) -> Tensor:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = ((h ^ (h >> shift)) * factor) & _LOW
    return h ^ (h >> 16)


def _high_bits(first: Tensor, second: Tensor, counters: Tensor) -> Tensor:
    h = (counters * 0x9E3779B1 + first) & _LOW
    h = ((h ^ (h >> 16)) * 0x7FEB352D + second) & _LOW
    return ((h ^ (h >> 15)) * 0x846CA68B) & _LOW


def _shares(first: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Returns v and 1 - v."""
    low = _mix32((high + first) & _LOW)
    is_large = high >= 1 << 31
    high, low = torch.where(is_large, _LOW - high, high), torch.where(is_large, _LOW - low, low)
    part = high.double() * 2.0**-32 + (low.double() + 0.5) * 2.0**-64
    return torch.where(is_large, 1 - part, part), torch.where(is_large, part, 1 - part)


def noise(seed: Tensor, rows: Tensor, sample: int, ids: Tensor) -> Tensor:
    """Returns -log E of rows' ids ``[R, K]`` for one sample, in float64.

    seed: a scalar, or one of each of these rows. rows: ``[R]``, their numbers in the call.
    """
    number = _STEP if seed.dim() > 0 else rows + _STEP
    key = _mix64(_mix64(_mix64(seed + _STEP) + number) + (sample + _STEP))[:, None]
    low, high = key & _LOW, (key >> 32) & _LOW
    of_group = _high_bits(high, low, (ids >> 6 << 2) | (ids >> 1 & 3))  # the halves of the key change places
    v, rest = _shares(high, of_group)
    own, own_rest = _shares(low, _high_bits(low, high, ids))
    for _ in range(4):
        own, own_rest = own * (2 - own), own_rest * own_rest
    is_first = _mix32((of_group + low) & _LOW) >> 28 == ((ids >> 3 & 7) << 1 | (ids & 1))
    v, rest = torch.where(is_first, v, v + rest * own), torch.where(is_first, rest, rest * own_rest)
    exponential = -torch.where(rest < 0.5, rest.log(), torch.log1p(-v)) / 16
    return (-exponential.log()).float().double()
