"""The names of flash-linear-attention 0.6.0 (PyPI, with fla-core 0.6.0): its fused linear cross entropy.

``FusedLinearCrossEntropyLoss`` has the interface of ``fla.modules``, ``fused_linear_cross_entropy_loss`` that of
``fla.modules.fused_linear_cross_entropy``. The module replaces the ``criterion`` of FLA's models::

    model.criterion = logitless.compat.fla.FusedLinearCrossEntropyLoss()

Set ``fuse_linear_cross_entropy=True`` in configurations that have it, such as GLA's and Gated DeltaNet's. KDA uses a
fused criterion whenever it trains. See docs/pytorch.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional import linear_cross_entropy as _fused
from ._l2warp import l2warp
from ._module import module_of_options, options_of
from ._targets import check_matrix, indices

__all__ = ["FusedLinearCrossEntropyLoss", "fused_linear_cross_entropy_loss"]


def fused_linear_cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True,
    process_group: object = None,
) -> Tensor:
    """Cross entropy of the logits ``t(logit_scale * (x @ weight.T + bias))``, where t is the softcap.

    The scale comes after the bias.

    Args:
        x: Hidden states ``[N, D]``.
        target: Class indices ``[N]``.
        weight: ``[V, D]``.
        bias: ``[V]``, or None.
        ignore_index: The target of rows that are left out of the loss.
        label_smoothing: In [0, 1].
        logit_scale: Factor of the logits.
        logit_softcapping: Bound of the logits, a number > 0, or None.
        num_chunks: Accepted and not used.
        reduction: ``"mean"`` over rows that are not ignored (0 where there are none), or ``"sum"``.
        use_l2warp: Adds ``l2_penalty_factor / N`` times the largest logit of each row, before scale and softcap, to
            that logit's gradient. This includes ignored rows. The value of the loss does not change.
        l2_penalty_factor: The factor of ``use_l2warp``.
        accumulate_grad_in_fp32: Accepted and not used; gradients are summed in float32.
        process_group: None, or a group of one rank.

    Returns:
        The loss, a float32 scalar (float64 for float64 inputs).

    Raises:
        AssertionError: ``reduction`` is another one, as in FLA's module, or ``target`` has a wrong shape.
        IndexError: ``target`` has no dimension.
        ValueError: ``logit_softcapping`` is not above 0, or another tensor has a wrong shape.
        NotImplementedError: ``process_group`` has more than one rank.
    """
    _check(reduction, logit_softcapping, process_group)
    check_matrix("x", x, ValueError)
    target = indices("target", target, x.shape[:1], AssertionError, of_scalar=IndexError)
    valid = target != ignore_index
    argmax = None
    token_weight = None
    places = target
    if use_l2warp:
        if logit_scale > 0 and logit_softcapping is None:  # the loss's own pass finds the same largest logit
            token_weight, places = valid.float(), torch.where(valid, target, 0)
        else:
            argmax = _argmax(x, weight, bias)
    outputs = _fused(
        x,
        weight,
        places,
        bias=_scaled(bias, logit_scale),
        reduction=reduction,
        ignore_index=ignore_index
        if token_weight is None or ignore_index < 0
        else _NO_INDEX,  # ignored rows have target 0
        label_smoothing=label_smoothing,
        scale=logit_scale,
        softcap=logit_softcapping,
        token_weight=token_weight,
        num_items=valid.sum().clamp_min(1) if reduction == "mean" else None,
        return_stats=("argmax",) if token_weight is not None else (),
        differentiable_stats=False,
    )
    if not use_l2warp:
        return outputs.loss
    argmax = outputs.argmax if argmax is None else argmax
    assert argmax is not None
    return l2warp(outputs.loss, x, weight, bias, argmax, l2_penalty_factor)


_NO_INDEX = -(1 << 31)  # no row has this target


def _check(reduction: str, softcap: float | None, process_group: object) -> None:
    assert reduction in ("mean", "sum"), f'reduction: expected "mean" or "sum", got {reduction!r}'
    if softcap is not None and not softcap > 0:
        raise ValueError(f"logit_softcapping: expected a number > 0 or None, got {softcap}")
    if process_group is not None:
        ranks = torch.distributed.get_world_size(process_group)  # type: ignore[arg-type]
        if ranks != 1:
            raise NotImplementedError(
                f"process_group: expected None or a group of one rank, got {ranks} ranks: a head that is sharded over "
                "the vocabulary is not supported in this call yet"
            )


def _scaled(bias: Tensor | None, scale: float) -> Tensor | None:
    """Returns the bias times the scale: the fused head adds its bias after the scale."""
    if bias is None or scale == 1:
        return bias
    return (bias if bias.dtype == torch.float64 else bias.float()) * scale


@torch.no_grad()
def _argmax(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    none = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    argmax = _fused(x, weight, none, bias=bias, reduction="sum", return_stats=("argmax",)).argmax
    assert argmax is not None
    return argmax


@module_of_options
class FusedLinearCrossEntropyLoss(nn.Module):
    """A module whose options are those of :func:`fused_linear_cross_entropy_loss`.

    Models that fuse only in training (KDA) call it with ``(logits, labels)`` in evaluation. It then returns the loss of
    these logits in float32, with the same scale, softcap, smoothing and reduction. L2Warp is left to the model.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    logit_softcapping: float | None = None
    num_chunks: int = 8
    reduction: str = "mean"
    use_l2warp: bool = False
    l2_penalty_factor: float = 1e-4
    accumulate_grad_in_fp32: bool = True
    process_group: object = None

    def __post_init__(self) -> None:
        _check(self.reduction, self.logit_softcapping, None)

    def forward(self, x: Tensor, target: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1)
        if weight is None:
            return self._of_logits(rows, labels)
        return fused_linear_cross_entropy_loss(rows, labels, weight, bias, **options_of(self))

    def _of_logits(self, logits: Tensor, target: Tensor) -> Tensor:
        _check(self.reduction, self.logit_softcapping, self.process_group)
        logits = (logits if logits.dtype == torch.float64 else logits.float()) * self.logit_scale
        if self.logit_softcapping is not None:
            logits = self.logit_softcapping * torch.tanh(logits / self.logit_softcapping)
        loss = F.cross_entropy(
            logits,
            target,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        return loss / (target != self.ignore_index).sum().clamp_min(1) if self.reduction == "mean" else loss
