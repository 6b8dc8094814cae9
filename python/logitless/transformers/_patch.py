"""``patch`` and ``unpatch``: another forward for one model, not for its class."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..errors import UnsupportedError
from ..options import MethodOptions, accepts, check_names, checked_method, names_of
from ._absent import without_logits
from ._beside_trl import are_there, warn_of_step, warn_where_imported
from ._deferred import DeferredLogits
from ._heads import check_backward_hooks, deferring, layers_of
from ._layer import KEY, parameter_names, shed, wear
from ._logits import ROWS, Session

if TYPE_CHECKING:
    from typing_extensions import Unpack

Model = TypeVar("Model", bound=nn.Module)
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # since PyTorch 2.7


@dataclass
class _Patch:
    """The state that a patched model carries."""

    options: dict[str, Any]
    check: int  # rows of logits that are yet to be compared with those of the model's own operations
    evaluate: bool
    tp_mesh: Any
    told: bool = False  # that a trainer of TRL does not use the patch
    layers: dict[str, Any] = field(default_factory=dict)
    open: dict[int, _Open] = field(default_factory=dict)  # by thread

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"layers": {}, "open": {}}

    def run(
        self, model: nn.Module, inner: Callable[..., Any], names: tuple[str, ...], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if self.open:
            _step_aside(self)
        given = dict(zip(names, args, strict=False)) | kwargs
        part = any(_is_some(given.get(name)) for name in ("logits_to_keep", "num_logits_to_keep"))
        of_trl = bool(kwargs.get("fused_lm_head"))  # which its trainers add to the model's forward
        bare = given.get("labels") is None
        if not self.told and (of_trl or (bare and _may_be_of_trl())) and not are_there(self.options):
            warn_of_step(self, type(model).__name__, of_trl)
        wanted = (torch.is_grad_enabled() or self.evaluate) and not _is_exporting()
        if of_trl or bare or part or not wanted:
            return inner(*args, **kwargs)
        return _fused(model, self, inner, args, kwargs)


@dataclass
class _Open:
    """A call of a layer that makes the loss. A layer within it, where there is one, makes it in its place."""

    heads: contextlib.ExitStack
    aside: bool = False


@accepts(MethodOptions)
def patch(
    model: Model,
    *,
    check: bool = True,
    evaluate: bool = False,
    tp_mesh: Any = None,
    **options: Unpack[MethodOptions],
) -> Model:
    """Makes a transformers model compute its loss, where it gets ``labels``, without the logits.

    The model's own code runs as it is, with a head that returns logits which are never made; what the model does with
    them (factors, divisors, softcaps, biases, shifts, the loss with ``num_items_in_batch`` or ``shift_labels``) is
    recorded where the fused head computes exactly that, and refused by name where not. ``outputs.logits`` is then None.
    Without labels, without gradients (see ``evaluate``), in ``generate``, with ``logits_to_keep`` and in
    ``torch.export`` the original forward runs. Signature, hooks and state dict stay as they are, and what others put
    around forward, before or after.

    Args:
        model: a causal, masked or encoder-decoder language model of transformers, or a PEFT model around one; LoRA on
            the head costs a copy of the head's weight and as much for its gradient.
        max_workspace_bytes, gradient, threshold, batch_invariant: as in :func:`logitless.linear_cross_entropy`.
        check: compare a few tokens of the first batch with what the model's own operations make of them; of later ones
            where these are not finite.
        evaluate: compute the loss without logits where no gradient is wanted, too (as in ``Trainer.evaluate`` with
            ``prediction_loss_only=True``); what uses logits there, such as metrics, is refused.
        tp_mesh: of a tensor-parallel head, whose weight is a DTensor sharded over the vocabulary: the ``DeviceMesh``
            over which it is, where its hidden states are plain tensors that are the same on all its ranks, as by the
            tensor parallelism of transformers. A head of PyTorch's ``parallelize_module`` needs none.

    Returns:
        The same model. Patching again replaces the options.

    Raises:
        TypeError: not a model with ``forward(labels=...)`` and ``get_output_embeddings()``.
        UnsupportedError: a head that is no plain linear layer; and in training, a transform of the logits that is not
            known, or a handshake that failed.
    """
    check_names("patch", options, names_of(MethodOptions))
    method = checked_method(options)
    target = _inner(model)
    owner = type(target).__name__
    if "labels" not in parameter_names(target.forward, target):
        raise TypeError(f"model: expected a model whose forward takes labels, got {owner}")
    layers_of(_head(target), owner)
    warn_where_imported(owner, stacklevel=2)
    target.__dict__[KEY] = _Patch(method, ROWS if check else 0, evaluate, tp_mesh)
    wear(target)
    return model


def unpatch(model: Model) -> Model:
    """Gives a model its own forward back, and leaves what others have put around it; else nothing happens."""
    target = _inner(model)
    if target.__dict__.pop(KEY, None) is not None:
        shed(target)
    return model


def _inner(model: nn.Module) -> nn.Module:
    """The transformers model within PEFT's and within torch.compile's."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a model of transformers, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)
    found: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not isinstance(found, nn.Module) or not hasattr(found, "get_output_embeddings"):
        raise TypeError(
            f"model: expected a model of transformers, got {type(found).__name__}; patch it before it is wrapped"
        )
    return found


def _head(model: nn.Module) -> nn.Module:
    """The output embeddings of the model, or where it names none those of a model within it."""
    for module in model.modules():
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None  # type: ignore[operator]
        if isinstance(head, nn.Module):
            return head
    raise UnsupportedError(f"logitless.transformers: {type(model).__name__}.get_output_embeddings() has no head")


def _may_be_of_trl() -> bool:
    return not torch.compiler.is_compiling() and "trl" in sys.modules and torch.is_grad_enabled()


def _is_some(count: object) -> bool:
    return not (count is None or (isinstance(count, int) and count == 0))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _step_aside(made: _Patch) -> None:
    """Before a layer within the one that is making the loss: the innermost knows what the model is given."""
    opened = made.open.get(threading.get_ident())
    if opened is not None:
        opened.heads.close()
        opened.aside = True


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _fused(model: nn.Module, made: _Patch, inner: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    owner = type(model).__name__
    session = Session(owner, made.options, made.tp_mesh, made.check)
    layers = layers_of(_head(model), owner)
    thread = threading.get_ident()
    outer = made.open.get(thread)
    if session.gradients and outer is None:
        check_backward_hooks(model, layers, owner)
    before = _losses.made
    with contextlib.ExitStack() as heads:
        heads.enter_context(deferring(layers, session))
        opened = made.open[thread] = _Open(heads)
        try:
            outputs = inner(*args, **kwargs)
        finally:
            del made.open[thread]
            if outer is not None:
                made.open[thread] = outer
    if opened.aside:
        return outputs
    if session.losses == 0:
        if _losses.made != before or (session.gradients and _without_gradient(outputs)):
            return without_logits(outputs)  # another patched model's, or made under torch.no_grad around this one
        raise UnsupportedError(
            f"logitless.transformers: the loss of {owner} is not made of the logits of its output embeddings by "
            "torch.nn.functional.cross_entropy; logitless.transformers.unpatch(model) goes back to the original path"
        )
    made.check = max(0, made.check - session.compared)
    _losses.made += 1
    if not torch.is_grad_enabled():  # with gradients FSDP itself frees them, after the backward pass
        for unit in session.unsharded:
            unit.reshard()
    return without_logits(outputs)


class _Losses(threading.local):
    made = 0  # in this thread, by all patched models


_losses = _Losses()


def _without_gradient(outputs: Any) -> bool:
    values = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, (tuple, list)) else ()
    found = [value for value in values if isinstance(value, torch.Tensor)]
    return bool(found) and not any(isinstance(value, DeferredLogits) or value.requires_grad for value in found)
