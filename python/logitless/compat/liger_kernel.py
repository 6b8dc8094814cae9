"""The names of Liger Kernel 0.8.5 (PyPI): its fused linear cross entropy as module, function and autograd function.

``LigerFusedLinearCrossEntropyLoss`` is a name of ``liger_kernel.transformers``, ``liger_fused_linear_cross_entropy`` of
``liger_kernel.transformers.functional``, ``LigerFusedLinearCrossEntropyFunction`` of ``liger_kernel.ops``. See
docs/pytorch.md. ``LigerForCausalLMLoss`` is a name of version 3 of ``kernels-community/liger-kernels`` on the Hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import linear_cross_entropy as _fused
from ._module import module_of_options
from ._targets import check_matrix, indices

__all__ = [
    "CrossEntropyOutput",
    "LigerForCausalLMLoss",
    "LigerFusedLinearCrossEntropyFunction",
    "LigerFusedLinearCrossEntropyLoss",
    "liger_fused_linear_cross_entropy",
]


@dataclass
class CrossEntropyOutput:
    """The requested outputs; the others are None. Only the loss has a gradient."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


@dataclass(eq=False)
class _Options:
    """The options of all three names, in this order."""

    ce_weight: Tensor | None
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    accum_dtype: torch.dtype | None = None
    use_token_scaling: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False


_Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of the logits ``input @ weight.T + bias`` at ``target``.

    For row i with target y, and class weights w (ones where there are none), the loss is::

        loss_i = p_iy * (((1 - label_smoothing) * w_y * nll_i + label_smoothing / V * sum_j w_j (lse_i - z_ij)) / W
                         + lse_square_scale * lse_i ** 2 / n)

    p_iy is the target's probability without gradient if ``use_token_scaling`` is set, else 1. With
    ``reduction="mean"`` n is the number of rows that are not ignored and W the sum of their w_y, else both are 1. The
    mean is 0 where every row is ignored.

    Args:
        input: Hidden states ``[N, D]``.
        weight: ``[V, D]``.
        target: Class indices ``[N]``.
        bias: ``[V]``, or None.
        ce_weight: Class weights ``[V]`` of a floating dtype, or None.
        ignore_index: The target of rows that are left out of the loss.
        lse_square_scale: Factor of the squared log-sum-exp.
        label_smoothing: In [0, 1].
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        softcap: Bound of the logits, a number > 0, or None.
        return_z_loss: Whether the part of the loss that ``lse_square_scale`` adds is returned as well.
        accum_dtype: Accepted and not used; gradients are summed in float32. float64 with other inputs raises an error.
        use_token_scaling: Whether each row is multiplied by the probability of its target, as a constant.
        return_token_accuracy: Whether the share of rows whose largest logit is the target's is returned as well. With
            ``reduction="none"`` it is a float32 for each row, 0 for ignored rows. It is NaN where every row is ignored.
        return_predicted_tokens: Whether the column of each row's largest logit is returned as well, -1 for ignored
            rows.
        chunk_mem_const: Accepted and not used.

    Returns:
        The loss, or with one of the ``return_`` arguments a :class:`CrossEntropyOutput`.

    Raises:
        AssertionError: An option is out of range, as in Liger's module.
        ValueError: ``chunk_mem_const`` is no positive integer, or a tensor has a wrong shape.
        IndexError: ``target`` has no dimension.
        NotImplementedError: ``accum_dtype`` is ``torch.float64`` and the inputs are not.
    """
    options = _Options(
        ce_weight,
        ignore_index,
        lse_square_scale,
        label_smoothing,
        reduction,
        softcap,
        return_z_loss,
        accum_dtype,
        use_token_scaling,
        return_token_accuracy,
        return_predicted_tokens,
    )
    _check_chunk_mem_const(chunk_mem_const)
    return _result(_run(input, weight, target, bias, options), options)


@module_of_options
class LigerFusedLinearCrossEntropyLoss(nn.Module, _Options):
    """A module with the options of :func:`liger_fused_linear_cross_entropy`; it is called with the weight first."""

    ce_weight: Tensor | None = None

    def __post_init__(self) -> None:
        _check_ranges(self)

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        return _result(_run(_input, lin_weight, target, bias, self), self)


class LigerFusedLinearCrossEntropyFunction:
    """``apply`` returns all four of loss, z_loss, token_accuracy and predicted_tokens."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        ce_impl: object = None,
        ce_mode: object = None,
        chunk_mem_const: int = 1,
    ) -> _Outputs:
        _check_chunk_mem_const(chunk_mem_const)
        options = _Options(
            ce_weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            accum_dtype,
            use_token_scaling,
            return_token_accuracy,
            return_predicted_tokens,
        )
        return _run(_input, weight, target, bias, options)


_OF_CAUSAL_LM = ("ce_weight", "lse_square_scale", "label_smoothing", "accum_dtype", "use_token_scaling")


def LigerForCausalLMLoss(
    logits: None,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    hidden_states: Tensor | None = None,
    lm_head_weight: Tensor | None = None,
    lm_head_bias: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The loss function of transformers' causal language models, from hidden states instead of logits.

    Args:
        logits: Not used.
        labels: ``[..., S]``; position s predicts ``labels[..., s + 1]``.
        vocab_size: Not used: the weight has as many rows.
        num_items_in_batch: Divisor of the sum over all tokens. None means their number.
        ignore_index: The label of tokens that are left out of the loss.
        shift_labels: Labels that each position predicts, in place of ``labels``.
        hidden_states: ``[..., S, D]``; needed.
        lm_head_weight: ``[V, D]``; needed.
        lm_head_bias: ``[V]``, or None.
        **kwargs: ``final_logit_softcapping``, and ``ce_weight``, ``lse_square_scale``, ``label_smoothing``,
            ``accum_dtype`` and ``use_token_scaling`` of :func:`liger_fused_linear_cross_entropy`. Others are not used,
            as in transformers' own function.

    Raises:
        ValueError: ``hidden_states``, ``lm_head_weight`` or labels are missing.
    """
    given = {"hidden_states": hidden_states, "lm_head_weight": lm_head_weight}
    given["labels or shift_labels"] = labels if shift_labels is None else shift_labels
    for name, tensor in given.items():
        if tensor is None:
            raise ValueError(f"{name}: expected a tensor, got None: this loss is made without the logits")
    assert hidden_states is not None and lm_head_weight is not None
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss: Any = liger_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_states.shape[-1]),
        lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        lm_head_bias,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        softcap=kwargs.get("final_logit_softcapping"),
        **{name: kwargs[name] for name in _OF_CAUSAL_LM if name in kwargs},
    )
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(hidden_states.device)
    total: Tensor = loss if num_items_in_batch is None else loss / num_items_in_batch
    return total


def _check_chunk_mem_const(count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"chunk_mem_const: expected a positive integer, got {count!r}")


def _check_ranges(o: _Options) -> None:
    assert 0 <= o.label_smoothing <= 1, f"label_smoothing: expected a number in [0, 1], got {o.label_smoothing}"
    assert o.reduction in ("mean", "sum", "none"), (
        f'reduction: expected one of "mean", "sum", "none", got {o.reduction!r}'
    )
    assert o.softcap is None or o.softcap > 0, f"softcap: expected a number > 0 or None, got {o.softcap}"


def _check(input: Tensor, weight: Tensor, o: _Options) -> None:
    _check_ranges(o)
    for name in ("return_z_loss", "return_token_accuracy", "return_predicted_tokens"):
        value = getattr(o, name)
        assert isinstance(value, bool), f"{name}: expected True or False, got {value!r}"
    if o.ce_weight is not None:
        vocab = weight.shape[0]
        assert o.ce_weight.shape == (vocab,), f"ce_weight: expected shape [{vocab}], got {list(o.ce_weight.shape)}"
        assert o.ce_weight.is_floating_point(), f"ce_weight: expected a floating dtype, got {o.ce_weight.dtype}"
    if o.accum_dtype == torch.float64 and input.dtype != torch.float64:
        raise NotImplementedError(
            f"accum_dtype: expected None or a dtype up to float32, got {o.accum_dtype} with input {input.dtype}: "
            "gradients are summed in float32"
        )


def _run(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, o: _Options) -> _Outputs:
    check_matrix("input", input, ValueError)
    target = indices("target", target, input.shape[:1], ValueError, of_scalar=IndexError)
    _check(input, weight, o)
    valid = target != o.ignore_index
    count = valid.sum()
    items = count.clamp_min(1)  # the mean of no row is 0
    z_factor: float | Tensor = o.lse_square_scale
    ce_weight = None if o.ce_weight is None else o.ce_weight.detach()
    if ce_weight is not None and o.reduction == "mean":
        by_row = ce_weight.double()[target.clamp(0, weight.shape[0] - 1)]
        total = torch.where(valid, by_row, 0).sum()
        # A divisor must be above zero: where the sum of weights is negative, the sign moves to the weights.
        ce_weight = torch.where(total < 0, -ce_weight, ce_weight)
        total = total.abs()
        if o.lse_square_scale != 0:  # the z-loss is a mean over n, in a loss that is divided by the sum of weights
            z_factor = o.lse_square_scale * total / items
        items = torch.where(count > 0, total, 1)
    stats = []
    if o.return_z_loss:
        stats.append("lse")
    if o.use_token_scaling:
        stats.append("nll")
    if o.return_token_accuracy or o.return_predicted_tokens:
        stats.append("argmax")
    # Token scaling multiplies each row's loss by a statistic of the same pass.
    reduction = "none" if o.use_token_scaling else o.reduction
    outputs = _fused(
        input,
        weight,
        target,
        bias=bias,
        class_weight=ce_weight,
        reduction=reduction,
        ignore_index=o.ignore_index,
        label_smoothing=o.label_smoothing,
        softcap=o.softcap,
        z_loss=z_factor,
        num_items=items if reduction == "mean" else None,
        return_stats=stats,
        differentiable_stats=False,
    )
    loss, scaling = outputs.loss, None
    if outputs.nll is not None:
        scaling = torch.exp(-outputs.nll)
        loss = loss * scaling
        loss = loss if o.reduction == "none" else loss.sum()
        loss = loss / items if o.reduction == "mean" else loss
    z_loss = accuracy = predicted = None
    if outputs.lse is not None:
        rows = o.lse_square_scale * outputs.lse**2
        rows = rows if scaling is None else rows * scaling
        z_loss = rows if o.reduction == "none" else rows.sum()
        z_loss = z_loss / count.clamp_min(1) if o.reduction == "mean" else z_loss
    if outputs.argmax is not None:
        correct = (valid & (outputs.argmax == target)).float()
        if o.return_token_accuracy:
            accuracy = correct if o.reduction == "none" else correct.sum() / count
        predicted = outputs.argmax if o.return_predicted_tokens else None
    return loss, z_loss, accuracy, predicted


def _result(outputs: _Outputs, o: _Options) -> Tensor | CrossEntropyOutput:
    if o.return_z_loss or o.return_token_accuracy or o.return_predicted_tokens:
        return CrossEntropyOutput(*outputs)
    return outputs[0]
