"""OpenRLHF 0.11.2's ``log_probs_from_logits`` and ``compute_entropy``, of hidden states and the head's weight.

Its actor makes float32 logits of all tokens for them; these take what the logits would be made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..functional import linear_cross_entropy
from ..options import Budget, accepts, check_names, names_of
from ..outputs import LinearCrossEntropyOutput
from ._targets import check_dtype, indices

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["log_probs_and_entropy_from_hidden", "log_probs_from_hidden"]


class _Options(Budget, total=False):
    bias: Tensor | None
    softcap: float | None


def _found(
    name: str, operands: Sequence[Tensor], temperature: Any, options: Any, stats: Sequence[str] = ()
) -> LinearCrossEntropyOutput:
    hidden, weight, labels = operands
    check_names(name, options, names_of(_Options))
    check_dtype("labels", labels, (torch.int64, torch.int32), RuntimeError)
    labels = indices("labels", labels, hidden.shape[:-1], RuntimeError)
    given = {"bias" if name == "bias" else name: value for name, value in options.items()}
    found: LinearCrossEntropyOutput = linear_cross_entropy(
        hidden, weight, labels, reduction="none", temperature=temperature, return_stats=stats, **given
    )
    return found


@accepts(_Options, bias=None, softcap=None)
def log_probs_from_hidden(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, **options: Unpack[_Options]
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
    return -_found("log_probs_from_hidden", (hidden, weight, labels), temperature, options).loss


@accepts(_Options, bias=None, softcap=None)
def log_probs_and_entropy_from_hidden(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]:
    """:func:`log_probs_from_hidden`, and ``compute_entropy`` of the same logits, with gradients of both."""
    name = "log_probs_and_entropy_from_hidden"
    found = _found(name, (hidden, weight, labels), temperature, options, ("entropy",))
    assert found.entropy is not None
    return -found.loss, found.entropy
