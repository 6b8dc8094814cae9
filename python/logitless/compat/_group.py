"""A vocabulary that is sharded over ranks, where callers sum the gradient of hidden states themselves."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


class _Part(torch.autograd.Function):
    """Of a gradient that all ranks have, parts that add up to it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / ctx.ranks, None


def with_parts_of_gradient(input: Tensor, *rest: Tensor, group: Any, **options: Any) -> Any:
    """:func:`logitless.distributed.linear_cross_entropy`; the gradients of ``input`` add up to it over the ranks."""
    from ..distributed import linear_cross_entropy

    apply: Any = _Part.apply
    ranks = torch.distributed.get_world_size(group)
    return linear_cross_entropy(apply(input, ranks) if ranks > 1 else input, *rest, group=group, **options)


def told_to_all(group: Any) -> contextlib.AbstractContextManager[None]:
    """Tells the others of the group, which would wait, of an error within."""
    from ..distributed.group import checked_group, refused_for_all

    if not torch.distributed.is_initialized():  # which is refused later
        return contextlib.nullcontext()
    group = checked_group(group)
    return refused_for_all(group) if torch.distributed.get_world_size(group) > 1 else contextlib.nullcontext()
