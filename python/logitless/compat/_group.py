"""Heads with a sharded vocabulary whose callers sum the gradient of hidden states over the ranks themselves."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


class _Part(torch.autograd.Function):
    """Splits a gradient that all ranks have into equal parts, whose sum over the ranks is that gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / ctx.ranks, None


def parts_of_gradient(input: Tensor, group: Any) -> Tensor:
    """Returns ``input``, whose gradient, the same on all ranks, is split into parts. The caller sums these."""
    apply: Any = _Part.apply
    ranks = torch.distributed.get_world_size(group)
    parted: Tensor = apply(input, ranks) if ranks > 1 else input
    return parted


def with_parts_of_gradient(input: Tensor, *rest: Tensor, group: Any, **options: Any) -> Any:
    """Calls :func:`logitless.distributed.linear_cross_entropy`; each rank gets its part of the gradient of ``input``.

    The caller sums these parts over the ranks.
    """
    from ..distributed import linear_cross_entropy

    return linear_cross_entropy(parts_of_gradient(input, group), *rest, group=group, **options)


def raises_on_all_ranks(group: Any) -> contextlib.AbstractContextManager[None]:
    """Makes an error inside the block an error on all ranks of the group, which would otherwise wait forever."""
    from ..distributed.group import checked_group, refused_for_all

    if not torch.distributed.is_initialized():  # the call inside raises the error
        return contextlib.nullcontext()
    group = checked_group(group)
    return refused_for_all(group) if torch.distributed.get_world_size(group) > 1 else contextlib.nullcontext()
