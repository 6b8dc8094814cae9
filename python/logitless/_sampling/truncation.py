"""The ids that top_k, top_p and min_p keep, and samples from them. Rows are sorted by descending log-probability."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .noise import noise

# Log-probabilities of candidates are rounded to float32, and their sum adds such errors. Rows whose last candidate is
# this close to the edge of the set are done again.
_CLOSE = 1e-4
# Rows whose candidates reach top_p's share this closely are done again, too.
_NEAR = 2.0**-20
# The share is reached up to this part of it, so that roundings of float64 add no id where equal ids reach it exactly.
_REACHED = 1 - 2.0**-32


class Truncation(NamedTuple):
    """top_k, then top_p of what that leaves, then min_p. 0, 1 and 0 leave all."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def is_none(self) -> bool:
        return self == Truncation()

    def kept(self, log_probs: Tensor) -> Tensor:
        """Returns which of a row's first columns are kept, ``[R, K]``, from float64 log-probabilities in order."""
        keeps = log_probs > -math.inf
        if 0 < self.top_k < keeps.shape[1]:
            keeps[:, self.top_k :] = False
        if self.top_p < 1:
            keeps &= self._before(log_probs, keeps) < _REACHED
        if self.min_p > 0:
            keeps &= log_probs >= log_probs[:, :1] + math.log(self.min_p)
        return keeps

    def _before(self, log_probs: Tensor, keeps: Tensor) -> Tensor:
        """Returns how much of top_p's share the columns before each one have."""
        masses = torch.where(keeps, log_probs.exp(), 0)
        total = masses.sum(-1, keepdim=True) if self.top_k else 1.0
        return (masses.cumsum(-1) - masses) / (self.top_p * total)

    def may_be_held(self, count: int, vocab: int) -> bool:
        """Returns whether the K largest log-probabilities of a row may be sure to hold the set."""
        if count == vocab or 0 < self.top_k <= count:
            return True
        if self.top_k and self.top_p < 1:  # the share is of all ids that top_k leaves
            return False
        return self.min_p > 0 or self.top_p < 1 - _CLOSE

    def is_sure(self, count: int, vocab: int) -> bool:
        """Returns whether the K largest log-probabilities of every row hold the set, whatever they are."""
        return (count == vocab or 0 < self.top_k <= count) and self.top_p == 1

    def is_held(self, log_probs: Tensor, vocab: int) -> Tensor:
        """Returns whether a row's K largest log-probabilities are sure to hold the set, ``[R]``.

        Only where may_be_held().
        """
        rows, count = log_probs.shape
        if count == vocab or 0 < self.top_k <= count:
            held = log_probs.new_ones(rows, dtype=torch.bool)
        elif self.top_p < 1:
            held = log_probs.exp().sum(-1) > self.top_p + _CLOSE
        else:
            held = log_probs.new_zeros(rows, dtype=torch.bool)
        if self.min_p > 0:
            held |= log_probs[:, -1] < log_probs[:, 0] + math.log(self.min_p) - _CLOSE
        if self.top_p < 1:
            held &= ~((self._before(log_probs, log_probs > -math.inf) - 1).abs() < _NEAR).any(-1)
        return held


class Drawn(NamedTuple):
    """Samples of some rows ``[R, S]``, and the elements that they were drawn from, in the order of rows.

    None stands for those that are not wanted.
    """

    ids: Tensor
    log_probs: Tensor | None = None
    full_log_probs: Tensor | None = None
    entropy: Tensor | None = None  # [R]
    counts: Tensor | None = None  # [R]
    kept_ids: Tensor | None = None  # [E]
    kept_log_probs: Tensor | None = None


class Wanted(NamedTuple):
    log_probs: bool  # both kinds
    entropy: bool
    kept: bool


def draw(
    ids: Tensor,
    log_probs: Tensor,
    full: Tensor,
    keeps: Tensor,
    seed: Tensor,
    rows: Tensor,
    num_samples: int,
    wanted: Wanted,
) -> Drawn:
    """Samples from the kept ids of rows, all ``[R, K]``. log_probs: of any common sum; full: those to report."""
    log_probs = log_probs.masked_fill(~keeps, -math.inf)
    places = []
    for sample in range(num_samples):
        keys = log_probs + noise(seed, rows, sample, ids)
        # The smallest id wins among equal keys, as in the library.
        is_best = keys == keys.amax(-1, keepdim=True)
        places.append(torch.where(is_best, ids, torch.iinfo(torch.int64).max).argmin(-1, keepdim=True))
    place = places[0] if num_samples == 1 else torch.cat(places, -1)
    empty = ~keeps[:, :1]  # a row of NaN
    drawn = Drawn(ids.gather(-1, place).masked_fill_(empty, -1))
    if any(wanted):
        log_probs = log_probs - log_probs.logsumexp(-1, keepdim=True)
    if wanted.log_probs:
        of_ids, full = (each.gather(-1, place).masked_fill(empty, math.nan) for each in (log_probs, full))
        drawn = drawn._replace(log_probs=of_ids, full_log_probs=full)
    if wanted.entropy:
        mass = torch.where(keeps, log_probs.exp() * log_probs, 0)
        drawn = drawn._replace(entropy=(-mass.sum(-1)).masked_fill(empty[:, 0], math.nan))
    if wanted.kept:
        drawn = drawn._replace(counts=keeps.sum(-1), kept_ids=ids[keeps], kept_log_probs=log_probs[keeps])
    return drawn
