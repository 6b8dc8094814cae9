"""``verl.utils.kernel.linear_cross_entropy`` of verl 0.9.1, which other libraries vendor; change the import.

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
    """Log-probabilities of the labels and entropies of ``hidden @ weight.T / temperature``, with gradients of both.

    Signature and shapes are verl's: tokens are flattened. Beyond verl's it takes any sizes and dtypes, runs on the CPU,
    and takes a temperature for each token. Rows with label -100 cost nothing, and their log-probability and entropy are
    0.

    Args:
        hidden: Hidden states ``[..., D]``.
        weight: ``[V, D]``.
        labels: Class indices, as many as tokens, in any shape.
        temperature: Divisor of the logits; a number, or a tensor of as many elements as labels.
        reduction: ``"none"``, ``"sum"`` or ``"mean"`` (over all tokens), in upper or lower case. It applies to the
            log-probabilities only.
        dist_process_group: The group of tensor parallelism, or None. With a group ``weight`` is this rank's shard
            ``[V / ranks, D]``, in the order of ranks; shards may have different sizes. All ranks have the same hidden
            states and labels. As with verl, each rank gets a part of the gradient of ``hidden``. The caller sums these
            parts over the group, as Megatron's gather of a sequence-parallel region does.
        max_workspace_bytes: As in :func:`logitless.linear_cross_entropy`.

    Returns:
        Log-probabilities ``[N]`` or a scalar, and entropies ``[N]``; both float32.

    Raises:
        AssertionError: ``reduction`` or ``temperature`` has another type, or the number of labels is wrong; as in verl.
        ValueError: ``reduction`` is another one, as in verl; or :func:`logitless.linear_cross_entropy` raises it.
    """
    assert isinstance(temperature, (float, int, Tensor)), f"temperature must be a float, but got {type(temperature)}"
    assert isinstance(reduction, str), f"reduction must be a str, but got {type(reduction)}"
    if reduction.lower() not in _REDUCTIONS:
        raise ValueError(f"Invalid reduction: {reduction.lower()}")
    tokens = hidden.reshape(-1, hidden.shape[-1])
    alone = dist_process_group is None or torch.distributed.get_world_size(dist_process_group) == 1
    with contextlib.nullcontext() if alone else _group.raises_on_all_ranks(dist_process_group):
        labels = indices("labels", labels, tokens.shape[:1], AssertionError, any_shape=True)
    options: dict[str, Any] = {
        "reduction": "none",
        "temperature": temperature.reshape(-1) if isinstance(temperature, Tensor) else temperature,
        "return_stats": ("entropy",),
        **budget,
    }
    if alone:
        outputs = functional.linear_cross_entropy(tokens, weight, labels, **options)
    else:
        outputs = _group.with_parts_of_gradient(tokens, weight, labels, group=dist_process_group, **options)
    assert outputs.entropy is not None
    logprobs = -outputs.loss
    if reduction.lower() != "none":
        logprobs = logprobs.sum() if reduction.lower() == "sum" else logprobs.mean()
    return logprobs, outputs.entropy
