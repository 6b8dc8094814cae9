"""``torch.nn.functional.cross_entropy`` for logits that were never made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from .. import _zero3
from ..call import check_integers
from ..errors import UnsupportedError
from ..functional import linear_cross_entropy
from ..quantized import QuantizedWeight
from ._logits import Logits, Session, Term, fused_operands, is_dtensor, on_all_ranks
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
    """Computes the loss of ``logits`` [N, V] at ``target`` [N]; the arguments are those of PyTorch's function."""
    if size_average is not None or reduce is not None:
        raise logits.refuse("cross_entropy() with size_average or reduce")
    if target.dim() == 1:
        check_integers("labels", target)
    if len(logits.shape) != 2 or target.dim() != 1:
        raise logits.refuse(
            f"cross_entropy() of logits of shape {list(logits.shape)} and a target of {target.dtype} and shape "
            f"{list(target.shape)}; expected [N, V] and [N] indices"
        )
    logits = replace(logits, terms=tuple(present(term, logits.session) for term in logits.terms))
    if logits.session.probing:
        compare(logits)
    hidden, operands = fused_operands(logits)
    logits.session.losses += 1
    hidden = _over_ranks(logits, hidden, operands["weight"])
    loss = linear_cross_entropy(
        hidden,
        targets=target,
        class_weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        **operands,
        **logits.session.options,
    )
    assert isinstance(loss, Tensor)
    loss = _zero3.gathered_again(loss, logits.session.late)
    local: Any = loss
    return local.to_local() if is_dtensor(loss) and not logits.as_dtensor else loss


def present(term: Term, session: Session) -> Term:
    """Returns the term with its weight in memory; a weight that FSDP2 has freed is gathered again."""
    weight = term.weight
    if term.changed():
        raise UnsupportedError(
            "logitless.transformers: hidden states or weight of the head were changed in place between head and loss"
        )
    if isinstance(weight, QuantizedWeight):
        return term
    if is_dtensor(weight):
        whole = _gathered(weight)
        return term if whole is None else replace(term, weight=whole, versions=())
    if weight.device.type == "meta" or hasattr(type(weight), "__tensor_flatten__"):
        return term  # logitless.linear_cross_entropy raises the error, with its remedy
    if not term.in_memory():
        _unshard(term, session)
    return term


def _unshard(term: Term, session: Session) -> None:
    """Gathers a unit of FSDP2 again that was freed when the head's call ended.

    The whole unit is needed, as the backward pass uses its other parameters, such as a norm's. FSDP does not see that
    pass begin, because no gradient of logits is made. Afterwards FSDP frees the unit and reduces its gradients.
    """
    if not hasattr(term.layer, "unshard"):
        raise UnsupportedError(
            "logitless.transformers: the head's weight was freed before the loss, as FSDP does with a module of its "
            "own: let the head belong to the root module, or shard it with reshard_after_forward=False"
        )
    unit: Any = term.layer
    unit.unshard()
    session.unsharded.append(unit)
    if not term.in_memory():
        raise UnsupportedError("logitless.transformers: the head's weight was freed, and is another one now")


def _gathered(weight: Any) -> Tensor | None:
    """Returns the whole of a weight that FSDP2 has sharded, or None for other weights."""
    if not is_dtensor(weight):
        return None
    from ..distributed import _fsdp

    owner = _fsdp.owner_of(weight)
    return None if owner is None else _fsdp.gathered("the head's weight", weight, owner)


def _over_ranks(logits: Logits, hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns hidden states as a DTensor, the same on all ranks, where the weight is sharded over the vocabulary."""
    mesh = logits.session.tp_mesh
    if not is_dtensor(weight) or is_dtensor(hidden):
        return hidden
    if mesh is None:
        raise UnsupportedError(
            "logitless.transformers: the head's weight is a DTensor, its hidden states are none: patch(model, "
            "tp_mesh=mesh) says that the weight is sharded over that mesh, with the same hidden states on all its ranks"
        )
    return on_all_ranks(hidden, mesh)
