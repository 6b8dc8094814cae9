"""Log-probabilities and top-k distillation of VeOmni 0.1.12, which verl's VeOmni engine calls.

VeOmni's losses look them up under these names:

    from veomni.ops.kernels import cross_entropy

    cross_entropy.chunk_logprobs_function = logitless.compat.veomni.chunk_logprobs_function
    cross_entropy.chunk_topk_distill_function = logitless.compat.veomni.chunk_topk_distill_function
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..candidates import linear_candidates
from ..functional import linear_cross_entropy
from ..options import Budget, accepts, shape_text
from ._targets import indices, lists_of_ids

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["chunk_logprobs_function", "chunk_topk_distill_function"]

_NO_ID = -(2**31)  # no teacher's padding, which would be an id of probability 0


@accepts(Budget)
def chunk_logprobs_function(
    hidden_states: Tensor,
    weights: Tensor,
    labels: Tensor,
    chunk_size: int = 1024,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    temperature: float = 1.0,
    **budget: Unpack[Budget],
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels and entropies of ``hidden_states @ weights.T / temperature``, with gradients.

    Signature and results are VeOmni's. Logits are float32, where VeOmni rounds those of 16-bit operands.

    Args:
        hidden_states: ``[..., L, D]``.
        weights: ``[V, D]``.
        labels: Class indices ``[..., L]``. A position predicts the next one's label, except with sequence parallelism,
            where VeOmni has shifted them already.
        chunk_size: Accepted and not used.
        ignore_index: A label whose results are 0.
        shift_labels: Labels that are shifted already, in the place of ``labels``.
        temperature: Divisor of the logits.
        max_workspace_bytes: As in :func:`logitless.linear_cross_entropy`.

    Returns:
        Both of the shape of the labels, float32. The last position is 0 where labels are shifted here.
    """
    own = _own_labels(labels, shift_labels, ignore_index)
    own = indices("labels" if shift_labels is None else "shift_labels", own, hidden_states.shape[:-1], ValueError)
    outputs = _outputs(hidden_states, weights, own, ignore_index, temperature, budget)
    return -outputs.loss, outputs.entropy


@accepts(Budget)
def chunk_topk_distill_function(
    hidden_states: Tensor,
    weights: Tensor,
    labels: Tensor,
    teacher_topk_ids: Tensor,
    teacher_topk_log_probs: Tensor,
    chunk_size: int = 1024,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    temperature: float = 1.0,
    log_prob_min_clamp: float | None = None,
    **budget: Unpack[Budget],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Adds to :func:`chunk_logprobs_function` the divergence KL(teacher || student) over the teacher's likeliest ids.

    Signature and results are VeOmni's. The student's probabilities are over the vocabulary.

    Args:
        hidden_states: ``[..., L, D]``.
        weights: ``[V, D]``.
        labels: As in :func:`chunk_logprobs_function`.
        teacher_topk_ids: ``[..., L, K]``, int64 or int32, shifted as ``labels``.
        teacher_topk_log_probs: The teacher's log-probabilities of these ids.
        chunk_size: Accepted and not used.
        ignore_index: A label whose results are 0.
        shift_labels: Labels that are shifted already. The teacher's tensors are then as well.
        temperature: Divisor of the student's logits.
        log_prob_min_clamp: The least log-probability of both in the divergence; None for no limit.
        max_workspace_bytes: As in :func:`logitless.linear_cross_entropy`.

    Returns:
        Log-probabilities, entropies and divergences with gradients, and the student's and the teacher's probability of
            all K ids without. All have the shape of the labels.
    """
    rows = hidden_states.shape[:-1]
    ids = lists_of_ids("teacher_topk_ids", teacher_topk_ids, rows, ValueError)
    log_p = teacher_topk_log_probs
    if log_p.shape != ids.shape:
        raise ValueError(
            f"teacher_topk_log_probs: expected shape {shape_text(ids.shape)} (that of teacher_topk_ids), got "
            f"{shape_text(log_p.shape)}"
        )
    if _shifts_here(shift_labels):
        ids, log_p = (F.pad(given[..., 1:, :], (0, 0, 0, 1)) for given in (ids, log_p))
    own = _own_labels(labels, shift_labels, ignore_index)
    own = indices("labels" if shift_labels is None else "shift_labels", own, rows, ValueError)
    outputs = _outputs(hidden_states, weights, own, ignore_index, temperature, budget)
    is_row = own != ignore_index
    # Ignored rows have no candidates, so their ids may be any numbers.
    wanted = ids.masked_fill(~is_row.unsqueeze(-1), _NO_ID)
    z = linear_candidates(hidden_states, weights, wanted, temperature=temperature, ignore_id=_NO_ID).logits
    log_q = torch.where(is_row.unsqueeze(-1), z - outputs.lse.unsqueeze(-1), 0.0)
    log_p = log_p.detach().to(log_q.dtype)
    masses = [torch.where(is_row, each.detach().exp().sum(-1), 0.0) for each in (log_q, log_p)]
    if log_prob_min_clamp is not None:
        log_q, log_p = log_q.clamp(min=log_prob_min_clamp), log_p.clamp(min=log_prob_min_clamp)
    divergence = torch.where(is_row, (log_p.exp() * (log_p - log_q)).sum(-1), 0.0)
    return -outputs.loss, outputs.entropy, divergence, *masses


def _shifts_here(shift_labels: Tensor | None) -> bool:
    """Returns whether a position's label is the next one. VeOmni shifts labels itself for sequence parallelism."""
    if shift_labels is not None:
        return False
    state = sys.modules.get("veomni.distributed.parallel_state")
    return state is None or not state.get_parallel_state().sp_enabled


def _own_labels(labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """Returns each position's label."""
    if shift_labels is not None:
        return shift_labels
    return F.pad(labels[..., 1:], (0, 1), value=ignore_index) if _shifts_here(None) else labels


def _outputs(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, temperature: float, budget: Budget
) -> Any:
    return linear_cross_entropy(
        hidden,
        weight,
        labels,
        ignore_index=ignore_index,
        reduction="none",
        temperature=temperature,
        return_stats=("lse", "entropy"),
        **budget,
    )
