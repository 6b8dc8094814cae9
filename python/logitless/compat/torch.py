"""Names of PyTorch 2.13 to 2.15: ``torch.nn.functional.linear_cross_entropy`` and ``torch.nn.LinearCrossEntropyLoss``.

They work with PyTorch 2.6 and later, which need not have them. See docs/pytorch.md.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import check_linear
from ..functional import linear_cross_entropy as _fused
from ..options import check_choice

__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy"]


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: object = None,
) -> Tensor:
    """Returns ``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...)`` without the logits.

    Args:
        input: Hidden states ``[D]`` or ``[N, D]``.
        linear_weight: ``[C, D]``, or ``[C, d_1, ..., d_K, D]``: a head of C classes for each of the places d.
        target: Class indices ``[]``, ``[N]`` or ``[N, d_1, ..., d_K]``, int64 or (without places d) uint8. Or class
            probabilities of the logits' shape ``[N, C, d_1, ..., d_K]``; with these the logits are made.
        linear_bias: ``[C, d_1, ..., d_K]``, or None.
        weight: Class weights ``[C]``, or None.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: None means -100. With class probabilities only None is permitted.
        label_smoothing: In [0, 1].
        options: PyTorch's choice of chunks; accepted and not used.

    Raises:
        RuntimeError: A shape, a dtype of targets or label_smoothing is wrong, or there is an ignore_index with class
            probabilities; as in PyTorch.
        ValueError: The number of targets or the reduction is another one.
        IndexError: A target is outside ``[0, C)`` on the CPU (on CUDA its loss is NaN).
        NotImplementedError: Double backward, forward-mode differentiation, and transforms of torch.func.
    """
    places = tuple(linear_weight.shape[1:-1])
    _check_shapes(input, linear_weight, linear_bias, weight)
    if not 0 <= label_smoothing <= 1:
        raise RuntimeError(f"label_smoothing: expected a number in [0, 1], got {label_smoothing}")
    options_of_loss: dict[str, Any] = {"weight": weight, "reduction": reduction, "label_smoothing": label_smoothing}
    if target.shape == (*input.shape[:-1], linear_weight.shape[0], *places):
        if ignore_index is not None:
            raise RuntimeError(f"ignore_index: expected None with class probabilities, got {ignore_index}")
        return _of_probabilities(input, linear_weight, linear_bias, target, options_of_loss)
    target = _indices(input, linear_weight, target, label_smoothing)
    options_of_loss["ignore_index"] = -100 if ignore_index is None else ignore_index
    call = _of_places if places else _fused_of
    return call(input, linear_weight, linear_bias, target, options_of_loss)


def _check_shapes(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, weight: Tensor | None) -> None:
    def refuse(name: str, expected: str, shape: torch.Size) -> NoReturn:
        raise RuntimeError(f"{name}: expected shape {expected}, got {list(shape)}")

    if input.dim() not in (1, 2):
        refuse("input", "[D] or [N, D]", input.shape)
    if linear_weight.dim() < 2:
        refuse("linear_weight", "[C, D] or [C, d_1, ..., d_K, D]", linear_weight.shape)
    if input.shape[-1] != linear_weight.shape[-1]:
        refuse("input", f"[..., {linear_weight.shape[-1]}] (that of linear_weight)", input.shape)
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:-1]:
        refuse("linear_bias", f"{list(linear_weight.shape[:-1])} (that of linear_weight)", linear_bias.shape)
    if weight is not None and weight.shape != linear_weight.shape[:1]:
        refuse("weight", f"[{linear_weight.shape[0]}] (one for each class)", weight.shape)
    if linear_weight.dim() > 2 and input.dim() == 1:
        refuse("input", "[N, D] with a linear_weight of more than two dimensions", input.shape)


def _indices(input: Tensor, linear_weight: Tensor, target: Tensor, label_smoothing: float) -> Tensor:
    """Returns class indices as int64 in the rows' shape; raises PyTorch's exceptions, checked in its order."""
    classes, *places = linear_weight.shape[:-1]
    rows, got = input.shape[:-1], target.shape
    shape = (*rows, *places)
    dtypes = (torch.int64,) if places else (torch.int64, torch.uint8)
    error: type[Exception] | None = None
    if rows and (got[0] if got else 0) != rows[0]:
        error = ValueError
    elif (places and got != shape) or len(got) > max(1, len(shape)) or target.dtype not in dtypes:
        error = RuntimeError
    elif not shape and got == (1,):  # one row without a batch; PyTorch cannot smooth its loss
        error = None if label_smoothing == 0 else RuntimeError
    elif got != shape:
        error = ValueError if got else IndexError
    if error is not None:
        raise error(
            f"target: expected class indices of shape {list(shape)} and {' or '.join(map(str, dtypes))}, or class "
            f"probabilities of shape {[*rows, classes, *places]}, got {target.dtype} of shape {list(got)}"
        )
    return target.reshape(shape).long()


def _of_probabilities(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, options: dict[str, Any]
) -> Tensor:
    """Computes the loss from the logits, which are no larger than the probabilities that the caller has."""
    shape = (*input.shape[:-1], *linear_weight.shape[:-1])
    dtype = torch.promote_types(input.dtype, torch.float32)  # logits are not rounded to 16 bits
    bias = None if linear_bias is None else linear_bias.flatten().to(dtype)
    with torch.autocast(input.device.type, enabled=False):
        logits = F.linear(input.to(dtype), linear_weight.flatten(0, -2).to(dtype), bias)
    return F.cross_entropy(logits.reshape(shape), target, **options)


def _fused_of(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, options: dict[str, Any]
) -> Tensor:
    own = {"class_weight" if name == "weight" else name: value for name, value in options.items()}
    loss: Tensor = _fused(input, linear_weight, target, bias=linear_bias, **own)
    return loss


def _of_places(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, options: dict[str, Any]
) -> Tensor:
    """Computes a K-dimensional loss: each place (d_1, ..., d_K) is a head of its own over all rows."""
    shape = (input.shape[0], *linear_weight.shape[1:-1])
    reduction: str = options["reduction"]
    weight: Tensor | None = options["weight"]
    ignored: int = options["ignore_index"]
    check_choice("reduction", reduction, ("none", "sum", "mean"))
    heads = linear_weight.flatten(1, -2).unbind(1)
    biases = [None] * len(heads) if linear_bias is None else linear_bias.flatten(1).unbind(1)
    of_place = options | {"reduction": "none" if reduction == "none" else "sum"}
    losses = [
        _fused_of(input, head, bias, place, of_place)
        for head, bias, place in zip(heads, biases, target.flatten(1).unbind(1), strict=True)
    ]
    if not losses:  # no place at all
        stats = torch.float64 if input.dtype == torch.float64 else torch.float32
        rows = input.new_zeros(shape, dtype=stats)
        return rows if reduction == "none" else rows.sum() if reduction == "sum" else rows.mean()
    if reduction == "none":
        return torch.stack(losses, -1).reshape(shape)
    total = torch.stack(losses).sum()
    if reduction == "sum":
        return total
    valid = target != ignored
    if weight is None:
        return total / valid.sum()
    by_row = weight.to(total.dtype)[target.clamp(0, linear_weight.shape[0] - 1)]
    return total / torch.where(valid, by_row, 0).sum()


class LinearCrossEntropyLoss(nn.Module):
    """A linear head and its cross entropy, with the state dict of ``torch.nn.LinearCrossEntropyLoss``.

    ``out_features`` are the places d_1, ..., d_K of :func:`linear_cross_entropy`. The weight is stored flat:
    ``linear.weight`` has the shape ``[C * d_1 * ... * d_K, D]``.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: object = None,
    ) -> None:
        super().__init__()
        if weight is not None and weight.shape != (num_classes,):
            raise RuntimeError(f"weight: expected shape [{num_classes}], got {list(weight.shape)}")
        if not 0 <= label_smoothing <= 1:
            raise RuntimeError(f"label_smoothing: expected a number in [0, 1], got {label_smoothing}")
        self.register_buffer("weight", weight)
        self.reduction = reduction
        self.num_classes = num_classes
        self.out_features = out_features
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.options = options
        classes = math.prod(out_features, start=num_classes)
        self.linear = nn.Linear(in_features, classes, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        shape = (self.num_classes, *self.out_features)
        check_linear(self.linear)
        bias = self.linear.bias
        return linear_cross_entropy(
            input,
            self.linear.weight.reshape(*shape, self.linear.in_features),
            target,
            linear_bias=None if bias is None else bias.reshape(shape),
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            options=self.options,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.linear.in_features}, num_classes={self.num_classes}, "
            f"out_features={self.out_features}, bias={self.linear.bias is not None}, reduction={self.reduction}, "
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, options={self.options}"
        )
