"""Negatives for a sampled softmax: ids drawn from known probabilities, and lists without accidental hits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import call
from .. import options as _options


class Sampler:
    """Draws ids independently, with replacement, from fixed probabilities q over ``[0, V)``.

    Attributes:
        log_q: log q, ``[V]``, in float64.
    """

    def __init__(self, q: Tensor) -> None:
        """q: Numbers >= 0, ``[V]``, that are divided by their sum: counts of a data set, for example."""
        call.check_tensor("q", q)
        if q.dim() != 1 or q.numel() == 0:
            raise ValueError(f"q: expected shape [V], got {_options.shape_text(q.shape)}")
        wide = q.detach().double()
        self._sums = wide.cumsum(0)
        self.log_q = (wide / self._sums[-1]).log()

    @classmethod
    def uniform(cls, vocab: int, device: torch.device | str = "cpu") -> Sampler:
        """All ids have the same probability."""
        return cls(torch.ones(vocab, dtype=torch.float64, device=device))

    @classmethod
    def log_uniform(cls, vocab: int, device: torch.device | str = "cpu") -> Sampler:
        """Id j has a probability proportional to log(1 + 1 / (j + 1)), for ids in the order of falling frequency."""
        return cls(torch.log1p(1 / torch.arange(1, vocab + 1, dtype=torch.float64, device=device)))

    def sample(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        """Returns int64 ids of a shape."""
        u = torch.rand(tuple(shape), dtype=torch.float64, device=self._sums.device, generator=generator)
        return torch.searchsorted(self._sums, u * self._sums[-1], right=True).clamp(max=len(self._sums) - 1)


def with_negatives(targets: Tensor, negatives: Tensor, log_q: Tensor, *, ignore_id: int = -1) -> tuple[Tensor, Tensor]:
    """Returns lists of each row's target and its negatives, and their ``log_weights``.

    Negatives that equal the target are left out. A drawn id has the weight ``1 / (K q)`` and the target 1, so
    exp(lse) is an unbiased estimate of the sum over the vocabulary.

    Args:
        targets: The target of each row.
        negatives: K ids for each row, ``[..., K]``, or the same K ids for all rows.
        log_q: The log-probabilities with which ids were drawn, ``[V]``, as ``Sampler.log_q``.
        ignore_id: As in :func:`linear_candidates`.

    Returns:
        ids and log_weights for :func:`linear_candidates`, ``[..., 1 + K]``.
    """
    for name, tensor in (("targets", targets), ("negatives", negatives)):
        call.check_tensor(name, tensor)
        call.check_integers(name, tensor)
    count = negatives.shape[-1]
    drawn = negatives.expand(*targets.shape, count)
    weights = -(log_q[drawn] + math.log(max(count, 1)))
    ids = torch.cat(
        [targets.unsqueeze(-1).to(drawn.dtype), drawn.masked_fill(drawn == targets[..., None], ignore_id)], -1
    )
    return ids, torch.cat([weights.new_zeros(*targets.shape, 1), weights], -1)


def in_batch_negatives(targets: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns one list for all rows, the targets of the batch, and its ``log_weights``.

    Other rows' targets are a row's negatives; those that equal its own are left out by a weight of 0. The others have
    the weight ``1 / ((N - 1) q)``, and the row's own target 1.

    Args:
        targets: The target of each row, ``[N]``.
        log_q: The log-probabilities of ids as targets, ``[V]``.

    Returns:
        ids ``[N]`` and log_weights ``[N, N]`` for :func:`linear_candidates`.
    """
    call.check_tensor("targets", targets)
    call.check_integers("targets", targets)
    call.check_shape("targets", targets, (targets.numel(),), "N")
    rows = targets.shape[0]
    weights = -(log_q[targets] + math.log(max(rows - 1, 1))).expand(rows, rows)
    is_own = torch.eye(rows, dtype=torch.bool, device=targets.device)
    is_hit = (targets[:, None] == targets) & ~is_own
    return targets, weights.masked_fill(is_hit, -math.inf).masked_fill(is_own, 0)
