"""``verl.utils.kernel.linear_cross_entropy`` of verl 0.9.1, vendored by others, too: change the import.

from logitless.compat.verl import linear_cross_entropy
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import functional
from ..options import Budget, accepts
from . import _group
from ._targets import indices

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["linear_cross_entropy"]

_REDUCTIONS = ("none", "sum", "mean")


@accepts(Budget)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
    **budget: Unpack[Budget],
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels and entropies, with gradients of both, of ``hidden @ weight.T / temperature``.

    As verl's, which also fixes the shapes: tokens are flattened. Beyond verl's: any sizes, any dtypes, the CPU, a
    temperature for each token, and labels of -100, whose rows cost nothing and hold 0.

    Args:
        hidden: ``[..., D]``.
        weight: ``[V, D]``.
        labels: class indices, as many as tokens, in any shape.
        temperature: what logits are divided by; a number, or a tensor of as many elements as labels.
        reduction: ``"none"``, ``"sum"`` or ``"mean"`` (over all tokens), in any case; of the log-probabilities only.
        dist_process_group: of tensor parallelism: ``weight`` is then this rank's shard ``[V / ranks, D]``, in the order
            of ranks (here of any size), with the same hidden states and labels on all. As verl's, the gradient of
            ``hidden`` is then a part, which the caller sums over the group (Megatron's gather of a sequence-parallel
            region does).
        max_workspace_bytes: as in :func:`logitless.linear_cross_entropy`.

    Returns:
        Log-probabilities ``[N]``, or a scalar; entropies ``[N]``. Both float32.

    Raises:
        AssertionError: reduction or temperature of another type, another number of labels, as verl.
        ValueError: another reduction, as verl; and what :func:`logitless.linear_cross_entropy` raises.
    """
    assert isinstance(temperature, (float, int, Tensor)), f"temperature must be a float, but got {type(temperature)}"
    assert isinstance(reduction, str), f"reduction must be a str, but got {type(reduction)}"
    if reduction.lower() not in _REDUCTIONS:
        raise ValueError(f"Invalid reduction: {reduction.lower()}")
    tokens = hidden.reshape(-1, hidden.shape[-1])
    alone = dist_process_group is None or torch.distributed.get_world_size(dist_process_group) == 1
    with contextlib.nullcontext() if alone else _group.told_to_all(dist_process_group):
        labels = indices("labels", labels, tokens.shape[:1], AssertionError, any_shape=True)
    options: dict[str, Any] = {
        "reduction": "none",
        "temperature": temperature.reshape(-1) if isinstance(temperature, Tensor) else temperature,
        "return_stats": ("entropy",),
        **budget,
    }
    if alone:
        found = functional.linear_cross_entropy(tokens, weight, labels, **options)
    else:
        found = _group.with_parts_of_gradient(tokens, weight, labels, group=dist_process_group, **options)
    assert found.entropy is not None
    logprobs = -found.loss
    if reduction.lower() != "none":
        logprobs = logprobs.sum() if reduction.lower() == "sum" else logprobs.mean()
    return logprobs, found.entropy
