"""Lists of rows, of one length or of several, with sums that have the same bits in every run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..native import NAMESPACE

_operators = getattr(torch.ops, NAMESPACE)


@torch.library.custom_op(
    f"{NAMESPACE}::segment_sum", mutates_args=(), schema="(Tensor values, Tensor offsets, Tensor rows) -> Tensor"
)
def segment_sum(values: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    """Returns the sum of each segment, in float64 until it is rounded."""
    sums = torch.segment_reduce(values.double(), "sum", offsets=offsets, unsafe=True, initial=0)
    return sums.to(values.dtype)


@segment_sum.register_fake
def _(values: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    return values.new_empty(offsets.shape[0] - 1)


@torch.library.custom_op(
    f"{NAMESPACE}::segment_spread", mutates_args=(), schema="(Tensor of_rows, Tensor offsets, Tensor rows) -> Tensor"
)
def segment_spread(of_rows: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    """Returns for each element the number of its row. PyTorch's own indexing would add gradients in any order."""
    return of_rows[rows]


@segment_spread.register_fake
def _(of_rows: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    return of_rows.new_empty(rows.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


segment_sum.register_autograd(
    lambda ctx, grad: (_operators.segment_spread.default(grad.contiguous(), *ctx.saved_tensors), None, None),
    setup_context=_save,
)
segment_spread.register_autograd(
    lambda ctx, grad: (_operators.segment_sum.default(grad.contiguous(), *ctx.saved_tensors), None, None),
    setup_context=_save,
)


class Lists:
    """The lists of rows.

    Args:
        shape: The shape of rows.
        elements: E, the number of elements of all lists.
        offsets: Where the lists of N rows begin, ``[N + 1]``. None means that the last dimension of elements is a row.
    """

    def __init__(self, shape: Sequence[int], elements: int, offsets: Tensor | None) -> None:
        self.shape = tuple(shape)
        self.offsets = self.rows = None
        if offsets is None:
            return
        # Wrong offsets of a device make wrong sums, but lead nowhere.
        self.offsets = offsets.long().clamp(0, elements).cummax(0).values
        places = torch.arange(elements, device=offsets.device)
        rows = torch.searchsorted(self.offsets[1:].contiguous(), places, right=True)
        self.rows = rows.clamp(max=offsets.shape[0] - 2)

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of each row's elements."""
        if self.offsets is None:
            return values.sum(-1)
        sums: Tensor = _operators.segment_sum.default(values, self.offsets, self.rows)
        return sums.reshape(self.shape)

    def spread(self, of_rows: Tensor) -> Tensor:
        """Returns the rows' numbers for their elements."""
        if self.offsets is None:
            return of_rows.unsqueeze(-1)
        spread: Tensor = _operators.segment_spread.default(of_rows.reshape(-1), self.offsets, self.rows)
        return spread

    def max(self, values: Tensor) -> Tensor:
        """Returns each row's largest element, -inf for none. It has no gradient."""
        values = values.detach()
        if self.rows is not None:
            least = values.new_full((math.prod(self.shape),), -math.inf)
            return least.scatter_reduce(0, self.rows, values, "amax").reshape(self.shape)
        return values.amax(-1) if values.shape[-1] > 0 else values.new_full(values.shape[:-1], -math.inf)

    def logsumexp(self, values: Tensor) -> Tensor:
        """Returns log sum exp of each row's elements: -inf for none, and then without a gradient."""
        high = self.max(values)
        high = torch.where(high == -math.inf, 0, high)
        total = self.sum((values - self.spread(high)).exp())
        is_empty = total == 0
        return torch.where(is_empty, -math.inf, high + torch.where(is_empty, 1, total).log())
