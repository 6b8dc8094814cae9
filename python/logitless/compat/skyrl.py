"""``sample_support_scores`` of SkyRL 0.4.0, which normalizes over the ids that sampling kept for each token.

SkyRL's ``score_aligned_sample_support`` looks it up under this name:

    from skyrl.backends.skyrl_train.utils import sample_support_replay

    sample_support_replay.sample_support_scores = logitless.compat.skyrl.sample_support_scores

It needs hidden states, which SkyRL passes with Megatron and ``trainer.fused_lm_head_logprob``; others pass logits.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call import check_integers
from ..candidates import linear_candidates
from ..options import shape_text
from . import _group

__all__ = ["SampleSupportScores", "sample_support_scores"]


@dataclass(frozen=True)
class SampleSupportScores:
    """The result of :func:`sample_support_scores`, as SkyRL's.

    Attributes:
        logprobs: The log-probabilities of the sampled ids; 0 in rows without kept ids.
        entropy: The entropies over the kept ids; 0 in rows without any, and None unless they were requested.
        valid_mask: Whether a row has kept ids.
    """

    logprobs: Tensor
    entropy: Tensor | None
    valid_mask: Tensor


def sample_support_scores(
    logits_or_hidden: Tensor,
    sampled_ids: Tensor,
    support_ids: Tensor,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    compute_entropy: bool = False,
    entropy_requires_grad: bool = False,
    lm_head_weight: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> SampleSupportScores:
    """Log-probabilities of sampled ids, and entropies, over the ids that sampling kept for each token.

    Signature and results are SkyRL's. The logits ``hidden @ weight.T / temperature`` are float32 for 16-bit weights,
    whose dtype SkyRL rounds them to. A sampled id that was not kept has its logit minus the kept ids' log sum exp, as
    there.

    Args:
        logits_or_hidden: Hidden states ``[..., D]``. Logits raise an error.
        sampled_ids: ``[...]``. Rows without kept ids may hold any number.
        support_ids: The kept ids ``[..., K]``, int32, filled up with -1.
        vocab_start_index: The id of the weight's first row.
        vocab_end_index: One more than the id of its last row.
        tp_group: The group of tensor parallelism, or None. With a group ``lm_head_weight`` is this rank's shard, in the
            order of ranks. As in SkyRL, each rank gets a part of the gradient of the hidden states, for the caller to
            sum.
        compute_entropy: Whether entropies are returned.
        entropy_requires_grad: Whether they have a gradient.
        lm_head_weight: The head's weight ``[V, D]``, or this rank's rows.
        temperature: Divisor of the logits.
        chunk_size: Accepted and not used.

    Raises:
        TypeError: ``sampled_ids`` are neither int64 nor int32.
        ValueError: Shapes, the dtype of ``support_ids``, temperature or the range of ids do not fit, as in SkyRL; or
            there is no ``lm_head_weight``.
        InvalidTargetError: An id is out of range on the CPU. On CUDA its row is NaN.
    """
    alone = tp_group is None or torch.distributed.get_world_size(tp_group) == 1
    with contextlib.nullcontext() if alone else _group.raises_on_all_ranks(tp_group):
        if lm_head_weight is None:
            raise ValueError(
                "lm_head_weight: expected the head's weight, got None: the logits exist already (SkyRL passes the "
                "weight with trainer.fused_lm_head_logprob and Megatron)"
            )
        rows = logits_or_hidden.shape[:-1]
        for name, shape in (("sampled_ids", sampled_ids.shape), ("support_ids", support_ids.shape[:-1])):
            if shape != rows:
                raise ValueError(
                    f"{name}: expected one or a list for each row of {shape_text(rows)}, got {shape_text(shape)}"
                )
        check_integers("sampled_ids", sampled_ids)
        if support_ids.dtype != torch.int32:
            raise ValueError(f"support_ids: expected torch.int32, got {support_ids.dtype}")
        if not temperature > 0:
            raise ValueError(f"temperature: expected a number > 0, got {temperature}")
        if entropy_requires_grad and not compute_entropy:
            raise ValueError("compute_entropy: expected True with entropy_requires_grad, got False")
        if vocab_end_index - vocab_start_index != lm_head_weight.shape[0] or (alone and vocab_start_index != 0):
            raise ValueError(
                f"vocab_start_index, vocab_end_index: expected those of a weight with {lm_head_weight.shape[0]} rows"
                f"{', from 0 on' if alone else ''}, got {vocab_start_index} and {vocab_end_index}"
            )
    is_kept = support_ids >= 0
    is_valid = is_kept.any(-1)
    sampled = sampled_ids.clamp(-(2**31), 2**31 - 1).to(torch.int32)  # numbers out of range stay so
    ids = torch.cat([sampled.unsqueeze(-1), support_ids], -1)
    ids = ids.masked_fill(~is_valid.unsqueeze(-1), -1)
    if alone:
        z = linear_candidates(logits_or_hidden, lm_head_weight, ids, temperature=temperature).logits
    else:
        from ..distributed import linear_candidates as of_group

        hidden = _group.parts_of_gradient(logits_or_hidden, tp_group)
        place = {"group": tp_group, "vocab_start": vocab_start_index}
        z = of_group(hidden, lm_head_weight, ids, temperature=temperature, **place).logits
    # Rows without kept ids get logits of 0, which keeps their gradients finite.
    kept = torch.where(is_valid.unsqueeze(-1), z[..., 1:], 0.0)
    lse = kept.logsumexp(-1)
    logprobs = torch.where(is_valid, z[..., 0] - lse, 0.0)
    if not compute_entropy:
        return SampleSupportScores(logprobs, None, is_valid)
    log_p = kept - lse.unsqueeze(-1)
    entropy = -(log_p.exp() * torch.where(is_kept, log_p, 0.0)).sum(-1)
    entropy = entropy if entropy_requires_grad else entropy.detach()
    return SampleSupportScores(logprobs, entropy.clamp(min=0.0), is_valid)
