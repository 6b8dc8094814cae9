"""L2Warp, RWKV's penalty on large logits: it leaves the loss unchanged and pulls each row's largest logit to 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def l2warp(loss: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, argmax: Tensor, factor: float) -> Tensor:
    """Returns ``loss``; its backward pass adds ``factor / N`` times each row's largest logit to that logit's gradient.

    The backward pass makes float32 copies of N x D. Of size V x D it makes only the gradient, in the weight's dtype.

    Args:
        loss: The loss.
        x: Hidden states ``[N, D]``.
        weight: ``[V, D]``.
        bias: ``[V]``, or None.
        argmax: ``[N]``, the column of each row's largest logit ``x @ weight.T + bias``.
        factor: The penalty's factor, before the division by N.
    """
    penalised: Tensor = _L2Warp.apply(  # type: ignore[no-untyped-call]
        loss, x, weight, bias, argmax, factor / max(1, x.shape[0])
    )
    return penalised


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class _L2Warp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, argmax: Tensor, factor: float
    ) -> Tensor:
        largest = (_wide(x) * _wide(weight[argmax])).sum(-1)
        if bias is not None:
            largest = largest + _wide(bias[argmax])
        ctx.save_for_backward(x, weight, bias, argmax, largest * factor)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, argmax, coefficient = ctx.saved_tensors
        coefficient = (coefficient * upstream[0])[:, None]
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[1]:
            d_x = (coefficient * _wide(weight[argmax])).to(x.dtype)
        if ctx.needs_input_grad[2]:
            d_weight = _added_rows(weight, argmax, coefficient * _wide(x))
        if ctx.needs_input_grad[3]:
            d_bias = _added_rows(bias[:, None], argmax, coefficient)[:, 0]
        return upstream[0], d_x, d_weight, d_bias, None, None


def _added_rows(like: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Returns zeros in the shape and dtype of ``like``, with ``rows`` added at ``places``; each place is rounded once.

    Rows with the same place are first added in float32, in a buffer of the size of ``rows``. So no float32 buffer is as
    large as ``like``, and the host does not wait for the device.
    """
    made = torch.zeros_like(like)
    if rows.shape[0] == 0:
        return made
    ordered, order = places.sort(stable=True)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    slot = begins.cumsum(0) - 1
    sums = torch.zeros_like(rows).index_add_(0, slot, rows[order])
    # Unused slots add zeros to the first row.
    return made.index_add_(0, torch.zeros_like(places).scatter_(0, slot, ordered), sums.to(like.dtype))
