"""OpenRLHF 0.11.2's ``log_probs_from_logits`` and ``compute_entropy``, of hidden states and the head's weight.

Its actor makes float32 logits of all tokens for them; these take what the logits would be made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..functional import linear_cross_entropy
from ..options import Budget, takes
from ._targets import check_dtype, indices

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["log_probs_and_entropy_from_hidden", "log_probs_from_hidden"]


def _checked(labels: Tensor, hidden: Tensor) -> Tensor:
    check_dtype("labels", labels, (torch.int64, torch.int32), RuntimeError)
    return indices("labels", labels, hidden.shape[:-1], RuntimeError)


@takes(Budget)
def log_probs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    **budget: Unpack[Budget],
) -> Tensor:
    """``log_probs_from_logits(F.linear(hidden, weight, bias).float(), labels, temperature)``, without the logits.

    Args:
        hidden: ``[..., D]``.
        weight: ``[V, D]``.
        labels: of shape ``hidden.shape[:-1]``; the ids that were rolled by one.
        temperature: what logits are divided by; a number, or a tensor of the labels' shape.
        bias: ``[V]``.
        softcap, max_workspace_bytes: as in :func:`logitless.linear_cross_entropy`.

    Returns:
        Log-probabilities of the labels' shape, float32, with gradients.

    Raises:
        RuntimeError: the shape of ``labels``, and dtypes other than int64 and int32, as ``torch.gather`` does there.
    """
    loss = linear_cross_entropy(
        hidden,
        weight,
        _checked(labels, hidden),
        linear_bias=bias,
        reduction="none",
        softcap=softcap,
        temperature=temperature,
        **budget,
    )
    return -loss


@takes(Budget)
def log_probs_and_entropy_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    **budget: Unpack[Budget],
) -> tuple[Tensor, Tensor]:
    """:func:`log_probs_from_hidden`, and ``compute_entropy`` of the same logits, with gradients of both."""
    found = linear_cross_entropy(
        hidden,
        weight,
        _checked(labels, hidden),
        linear_bias=bias,
        reduction="none",
        softcap=softcap,
        temperature=temperature,
        return_stats=("entropy",),
        **budget,
    )
    assert found.entropy is not None
    return -found.loss, found.entropy
