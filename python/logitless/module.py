"""``logitless.LinearCrossEntropyLoss``: a head and its loss as one module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from . import _options
from ._arguments import Number, Seed
from ._checks import check_linear
from ._torch import torch_dtype
from .functional import LinearCrossEntropyOutput, linear_cross_entropy


class LinearCrossEntropyLoss(nn.Module):
    """A linear head and its cross entropy, with the constructor and state_dict of ``torch.nn.LinearCrossEntropyLoss``.

    The head is ``self.linear``; assign another module's weight to ``self.linear.weight`` to tie them. Options are
    those of :func:`logitless.linear_cross_entropy`.

    Args:
        in_features: D, size of each hidden state.
        num_classes: V, size of the vocabulary.
        out_features: only ``()``; here for the signature.
        bias: whether the head has a bias ``[V]``.
        device: of the head: the CPU or a CUDA device.
        dtype: of the head: a torch.dtype, or a name such as "bf16".
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        weight: class weights ``[V]``, kept as a buffer.
        ignore_index: None means -100.
        label_smoothing: in [0, 1].
        options: PyTorch's choice of chunks; accepted and not used, for Logitless plans from ``max_workspace_bytes``.
        scale, softcap, temperature, z_loss, shift, max_workspace_bytes, gradient, threshold, batch_invariant: as in
            :func:`logitless.linear_cross_entropy`. A ``torch.nn.Parameter`` as scale or temperature is learned with the
            module.

    Shapes: input ``[..., D]``, target ``[...]``; the loss is a scalar, or ``[...]`` with reduction "none".
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: object = None,
        scale: Number = 1.0,
        softcap: Number | None = None,
        temperature: Number = 1.0,
        z_loss: Number = 0.0,
        shift: int = 0,
        max_workspace_bytes: int | str | None = None,
        gradient: str = "exact",
        threshold: float = _options.DEFAULT_THRESHOLD,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        if tuple(out_features) != ():
            raise NotImplementedError(f"out_features: expected (), got {out_features}; use leading batch dimensions")
        if weight is not None and tuple(weight.shape) != (num_classes,):
            raise ValueError(f"weight: expected shape [{num_classes}], got {list(weight.shape)}")
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing: expected a number in [0, 1], got {label_smoothing}")
        if reduction not in ("none", "sum", "mean"):
            raise ValueError(f'reduction: expected one of "none", "sum", "mean", got {reduction!r}')
        _options.check_gradient(gradient)
        _options.checked_threshold(threshold)
        _options.check_batch_invariant(batch_invariant, gradient)
        self.num_classes = num_classes
        self.out_features = ()
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.options = options
        self.scale = scale
        self.softcap = softcap
        self.temperature = temperature
        self.z_loss = z_loss
        self.shift = shift
        self.max_workspace_bytes = max_workspace_bytes
        self.gradient = gradient
        self.threshold = threshold
        self.batch_invariant = batch_invariant
        self.register_buffer("weight", weight)
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=torch_dtype(dtype))

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        target_weight: Tensor | None = None,
        num_items: float | Tensor | None = None,
        temperature: Number | None = None,
        main_grad: Tensor | None = None,
        return_stats: bool | Sequence[str] = False,
        differentiable_stats: bool = True,
        seed: Seed = None,
    ) -> Tensor | LinearCrossEntropyOutput:
        """The loss, or with ``return_stats`` a :class:`LinearCrossEntropyOutput`.

        temperature: in the place of the module's, such as one for each row.
        """
        check_linear(self.linear)
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            scale=self.scale,
            softcap=self.softcap,
            temperature=self.temperature if temperature is None else temperature,
            z_loss=self.z_loss,
            token_weight=token_weight,
            target_weight=target_weight,
            num_items=num_items,
            shift=self.shift,
            max_workspace_bytes=self.max_workspace_bytes,
            main_grad=main_grad,
            return_stats=return_stats,
            differentiable_stats=differentiable_stats,
            gradient=self.gradient,
            threshold=self.threshold,
            seed=seed,
            batch_invariant=self.batch_invariant,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.linear.in_features}, num_classes={self.num_classes}, "
            f"bias={self.linear.bias is not None}, reduction={self.reduction}, ignore_index={self.ignore_index}, "
            f"label_smoothing={self.label_smoothing}, scale={self.scale}, softcap={self.softcap}, "
            f"temperature={self.temperature}, z_loss={self.z_loss}, shift={self.shift}, "
            f"max_workspace_bytes={self.max_workspace_bytes}, "
            f"gradient={self.gradient}, threshold={self.threshold}, "
            f"batch_invariant={self.batch_invariant}"
        )
