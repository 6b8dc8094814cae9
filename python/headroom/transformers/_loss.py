"""``torch.nn.functional.cross_entropy`` of logits that were never made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..functional import linear_cross_entropy
from ._logits import Logits, Term
from ._probe import compare


def cross_entropy(
    logits: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of ``logits`` [N, V] at ``target`` [N], with the arguments of PyTorch's function."""
    if size_average is not None or reduce is not None:
        raise logits.refuse("cross_entropy() with size_average or reduce")
    if len(logits.shape) != 2 or target.dim() != 1 or target.is_floating_point():
        raise logits.refuse(
            f"cross_entropy() of logits of shape {list(logits.shape)} and a target of {target.dtype} and shape "
            f"{list(target.shape)}; expected [N, V] and [N] indices"
        )
    hidden, operands = fused_operands(logits)
    if logits.session.probing:
        compare(logits, operands)
    logits.session.losses += 1
    loss = linear_cross_entropy(
        hidden,
        target=target,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        **operands,
        **logits.session.options,
    )
    assert isinstance(loss, Tensor)
    return loss


def fused_operands(logits: Logits) -> tuple[Tensor, dict[str, Any]]:
    """Hidden states [N, D], and the head: the formula as ``cap * tanh((scale * hidden @ weight.T + bias) / cap)``."""
    for term in logits.terms:
        _check_present(term)
    factor, bias = logits.terms[0].factor, logits.bias
    hidden, weight = joined(logits.terms, [term.hidden for term in logits.terms])
    cap = logits.cap
    if cap is not None:
        factor, bias = factor * cap, None if bias is None else bias * cap
    return hidden, {"linear_weight": weight, "linear_bias": bias, "scale": factor, "softcap": cap}


def joined(terms: tuple[Term, ...], hiddens: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Several products as one: [h, f A h] against [W, B]. Costs a copy of the weights, and as much for its gradient."""
    if len(terms) == 1:
        return hiddens[0], terms[0].weight
    dtype = hiddens[0].dtype
    for term, hidden in zip(terms, hiddens, strict=True):
        dtype = torch.promote_types(dtype, torch.promote_types(hidden.dtype, term.weight.dtype))
    first = terms[0].factor
    parts = [
        h.to(dtype) * (t.factor / first) if t.factor != first else h.to(dtype)
        for t, h in zip(terms, hiddens, strict=True)
    ]
    return torch.cat(parts, dim=-1), torch.cat([term.weight.to(dtype) for term in terms], dim=-1)


def _check_present(term: Term) -> None:
    weight = term.weight
    if term.changed():
        raise UnsupportedError(
            "headroom.transformers: hidden states or weight of the head were changed in place between head and loss"
        )
    if hasattr(weight, "ds_id"):
        raise UnsupportedError(
            "headroom.transformers: the head's weight is partitioned by DeepSpeed ZeRO-3, which takes it away again "
            "before the loss; use ZeRO-2, or headroom.transformers.unpatch(model)"
        )
    if hasattr(weight, "placements") or weight.device.type == "meta":
        return  # refused with what to do by headroom.linear_cross_entropy itself
    if hasattr(type(weight), "__tensor_flatten__"):
        return
    if weight.untyped_storage().nbytes() < weight.numel() * weight.element_size():
        raise UnsupportedError(
            "headroom.transformers: the head's weight was freed before the loss, as FSDP does with a module of its "
            "own: let the head belong to the root module, or shard it with reshard_after_forward=False"
        )
