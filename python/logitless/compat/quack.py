"""The names of ``quack.linear_cross_entropy`` of QuACK 0.6.5 (PyPI: quack-kernels). See docs/pytorch.md."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..functional import linear_cross_entropy as _fused
from ..nn import refuse_adapter
from ._targets import check_dtype, indices

__all__ = [
    "LinearCrossEntropy",
    "chunked_linear_cross_entropy",
    "linear_cross_entropy_func",
    "scaled_exp_linear_cross_entropy",
]


def linear_cross_entropy_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace_backward: bool = False,
) -> Tensor:
    """Cross entropy of the logits ``x @ weight.T + bias`` at ``target``.

    Args:
        x: Hidden states ``[..., D]``.
        weight: ``[V, D]``.
        bias: ``[V]``, or None.
        target: Class indices ``[...]``, int64 or int32.
        ignore_index: The target of rows that are left out of the loss.
        reduction: ``"mean"`` over rows that are not ignored (NaN where there are none), ``"sum"`` or ``"none"``.
        inplace_backward: Accepted and not used.

    Raises:
        AssertionError: ``target`` has another shape or dtype.
    """
    target = _checked(target, x.shape[:-1])
    return _fused(x, weight, target, bias=bias, ignore_index=ignore_index, reduction=reduction)


def _checked(target: Tensor, rows: torch.Size, any_shape: bool = False) -> Tensor:
    check_dtype("target", target, (torch.int64, torch.int32), AssertionError)
    return indices("target", target, rows, AssertionError, any_shape=any_shape)


def chunked_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    chunk_size: int = 4096,
    ignore_index: int = -100,
    reduction: str = "mean",
    tuned: bool = True,
    use_scaled_exp: bool | None = None,
) -> Tensor:
    """Cross entropy of the logits ``x @ weight.T`` at ``target``, reduced to a scalar.

    Sizes need not be multiples of 8.

    Args:
        x: Hidden states ``[..., D]``.
        weight: ``[V, D]``.
        target: As many class indices as rows, in any shape, int64 or int32.
        chunk_size: Accepted and not used, like ``tuned`` and ``use_scaled_exp``.
        ignore_index: The target of rows that are left out of the loss.
        reduction: ``"mean"`` or ``"sum"``.

    Raises:
        AssertionError: The number of targets, or their dtype, is another one.
        ValueError: ``reduction`` is another one.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction: expected "mean" or "sum", got {reduction!r}')
    rows = x.reshape(-1, x.shape[-1])
    target = _checked(target, rows.shape[:1], any_shape=True)
    return _fused(rows, weight, target, ignore_index=ignore_index, reduction=reduction)


def scaled_exp_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    chunk_size: int = 4096,
    ignore_index: int = -100,
    reduction: str = "mean",
    tile_n1: int | None = None,
) -> Tensor:
    """Calls :func:`chunked_linear_cross_entropy`; ``tile_n1`` is accepted and not used."""
    return chunked_linear_cross_entropy(x, weight, target, chunk_size, ignore_index, reduction)


class LinearCrossEntropy(nn.Linear):
    """A linear head, called with hidden states ``[..., D]`` and targets ``[...]``.

    With a ``chunk_size``, no bias and reduction "mean" or "sum" it calls :func:`chunked_linear_cross_entropy`, which
    takes as many targets in any shape. ``chunk_size`` has no other effect. ``inplace_backward``, ``tuned`` and
    ``use_scaled_exp`` are accepted and not used.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        ignore_index: int = -100,
        reduction: str = "mean",
        chunk_size: int | None = None,
        inplace_backward: bool = False,
        tuned: bool = True,
        use_scaled_exp: bool | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.chunk_size = chunk_size
        self.inplace_backward = inplace_backward
        self.tuned = tuned
        self.use_scaled_exp = use_scaled_exp

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        if not torch.compiler.is_compiling():
            refuse_adapter(self)
        if (
            self.chunk_size is not None and self.bias is None and self.reduction in ("mean", "sum")
        ):  # QuACK flattens here
            return chunked_linear_cross_entropy(
                input, self.weight, target, self.chunk_size, self.ignore_index, self.reduction
            )
        return linear_cross_entropy_func(
            input, self.weight, self.bias, target, ignore_index=self.ignore_index, reduction=self.reduction
        )
