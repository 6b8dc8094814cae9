"""OpenRLHF 0.11.2's ``log_probs_from_logits`` and ``compute_entropy``, computed from hidden states and weight.

OpenRLHF's actor makes float32 logits of all tokens for them; these functions make no logits.
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


def _outputs(
    name: str, operands: Sequence[Tensor], temperature: Any, options: Any, stats: Sequence[str] = ()
) -> LinearCrossEntropyOutput:
    hidden, weight, labels = operands
    check_names(name, options, names_of(_Options))
    check_dtype("labels", labels, (torch.int64, torch.int32), RuntimeError)
    labels = indices("labels", labels, hidden.shape[:-1], RuntimeError)
    outputs: LinearCrossEntropyOutput = linear_cross_entropy(
        hidden, weight, labels, reduction="none", temperature=temperature, return_stats=stats, **options
    )
    return outputs


@accepts(_Options, bias=None, softcap=None)
def log_probs_from_hidden(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, **options: Unpack[_Options]
) -> Tensor:
    """Returns ``log_probs_from_logits(F.linear(hidden, weight, bias).float(), labels, temperature)`` without logits.

    Args:
        hidden: Hidden states ``[..., D]``.
        weight: ``[V, D]``.
        labels: Class indices of shape ``hidden.shape[:-1]``: the token ids, rolled by one.
        temperature: Divisor of the logits; a number, or a tensor of the labels' shape.
        bias: ``[V]``, or None.
        softcap: As in :func:`logitless.linear_cross_entropy`.
        max_workspace_bytes: As in :func:`logitless.linear_cross_entropy`.

    Returns:
        Log-probabilities of the labels' shape, float32, with gradients.

    Raises:
        RuntimeError: ``labels`` have another shape, or a dtype other than int64 and int32. (OpenRLHF's
            ``torch.gather`` raises the same.)
    """
    return -_outputs("log_probs_from_hidden", (hidden, weight, labels), temperature, options).loss


@accepts(_Options, bias=None, softcap=None)
def log_probs_and_entropy_from_hidden(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]:
    """Returns :func:`log_probs_from_hidden` and ``compute_entropy`` of the same logits, both with gradients."""
    name = "log_probs_and_entropy_from_hidden"
    outputs = _outputs(name, (hidden, weight, labels), temperature, options, ("entropy",))
    assert outputs.entropy is not None
    return -outputs.loss, outputs.entropy
