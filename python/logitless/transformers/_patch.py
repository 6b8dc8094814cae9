"""``patch`` and ``unpatch``: they change the forward of one model, not of its class."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from .._zero3 import kept_whole
from ..errors import UnsupportedError
from ..options import TrainingOptions, accepts, check_names, checked_training, names_of
from . import _beside_trl
from ._absent import without_logits
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
    check: int  # rows of logits still to be compared with those of the model's own operations
    evaluate: bool
    tp_mesh: Any
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
        bare = given.get("labels") is None
        # TRL's trainers add this argument to the model's forward.
        if kwargs.get("fused_lm_head") or (bare and _beside_trl.is_of_trl(type(model).__name__, inner)):
            return _beside_trl.run(model, self.options, inner, args, kwargs)
        wanted = (torch.is_grad_enabled() or self.evaluate) and not _is_exporting()
        if bare or part or not wanted:
            return inner(*args, **kwargs)
        return _fused(model, self, inner, args, kwargs)

    def before_head_is_read(self, model: nn.Module) -> None:
        _beside_trl.before_head_is_read(model)


@dataclass
class _Open:
    """A running call of a layer that makes the loss. A layer inside it, if there is one, makes the loss instead."""

    heads: contextlib.ExitStack
    aside: bool = False


@accepts(TrainingOptions)
def patch(
    model: Model,
    *,
    check: bool = True,
    evaluate: bool = False,
    tp_mesh: Any = None,
    **options: Unpack[TrainingOptions],
) -> Model:
    """Makes a transformers model compute its loss without the logits when it gets ``labels``.

    The model's own code runs unchanged, with a head that returns deferred logits, which have no values. The patch
    records what the model does with them: factors, divisors, softcaps, biases, shifts, the loss with
    ``num_items_in_batch`` or ``shift_labels``. An operation that the fused head does not compute exactly raises an
    error with its name. ``outputs.logits`` is None.

    The original forward runs without labels, without gradients (see ``evaluate``), in ``generate``, with
    ``logits_to_keep`` and in ``torch.export``. Signature, hooks and state dict do not change. Wrappers that others put
    around forward stay, before or after. Trainers of TRL whose loss has a fused head use these options for this model;
    others raise an error.

    Args:
        model: A causal, masked or encoder-decoder language model of transformers, or a PEFT model around one. LoRA on
            the head costs a copy of the head's weight, and as much for its gradient.
        check: Whether a self-check compares a few tokens of the first batch with the results of the model's own
            operations. It uses later batches where these tokens are not finite.
        evaluate: Whether the loss is also computed without logits where no gradient is wanted (as in
            ``Trainer.evaluate`` with ``prediction_loss_only=True``). Any use of logits there, such as metrics, raises
            an error.
        tp_mesh: The ``DeviceMesh`` of a tensor-parallel head, over which its weight is a DTensor sharded by vocabulary.
            It is needed where the hidden states are plain tensors that all ranks have, as with the tensor parallelism
            of transformers. A head of PyTorch's ``parallelize_module`` needs none.
        max_workspace_bytes: As in :func:`logitless.linear_cross_entropy`.
        gradient: As there.
        threshold: As there.
        screen: As there.
        compute_dtype: As there.
        batch_invariant: As there.
        recompute_logits: As there.

    Returns:
        The same model. Patching again replaces the options.

    Raises:
        TypeError: The model has no ``forward(labels=...)`` or no ``get_output_embeddings()``.
        UnsupportedError: The head is no plain linear layer; another copy of this package, such as one from Hugging
            Face's Hub, has patched the model; or in training, the model transforms the logits in an unknown way, or
            the self-check failed.
    """
    check_names("patch", options, names_of(TrainingOptions))
    method = checked_training(options)
    target = _inner(model)
    owner = type(target).__name__
    if "labels" not in parameter_names(target.forward, target):
        raise TypeError(f"model: expected a model whose forward takes labels, got {owner}")
    layers_of(_head(target), owner)
    state = target.__dict__.get(KEY)
    if state is not None and not isinstance(state, _Patch):
        other = type(state).__module__.removesuffix("._patch")
        raise UnsupportedError(
            f"model: expected one without the patch of another copy of this package, got a {owner} with that of "
            f"{other}; first call that copy's unpatch(model)"
        )
    target.__dict__[KEY] = _Patch(method, ROWS if check else 0, evaluate, tp_mesh)
    wear(target)
    return model


def unpatch(model: Model) -> Model:
    """Gives a patched model its own forward back, and leaves wrappers of others; does nothing to other models."""
    target = _inner(model)
    if isinstance(target.__dict__.get(KEY), _Patch):
        del target.__dict__[KEY]
        shed(target)
    return model


def _inner(model: nn.Module) -> nn.Module:
    """Returns the transformers model inside the wrappers of PEFT and torch.compile."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a model of transformers, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not isinstance(base, nn.Module) or not hasattr(base, "get_output_embeddings"):
        raise TypeError(
            f"model: expected a model of transformers, got {type(base).__name__}; patch it before it is wrapped"
        )
    return base


def _head(model: nn.Module) -> nn.Module:
    """Returns the output embeddings of the model, or if it names none, those of a model inside it."""
    for module in model.modules():
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None  # type: ignore[operator]
        if isinstance(head, nn.Module):
            return head
    raise UnsupportedError(f"logitless.transformers: {type(model).__name__}.get_output_embeddings() has no head")


def _is_some(count: object) -> bool:
    return not (count is None or (isinstance(count, int) and count == 0))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _step_aside(state: _Patch) -> None:
    """Ends the outer layer's part when a layer inside it is called: the innermost knows the model's arguments."""
    opened = state.open.get(threading.get_ident())
    if opened is not None:
        opened.heads.close()
        opened.aside = True


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _fused(model: nn.Module, state: _Patch, inner: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    owner = type(model).__name__
    session = Session(owner, state.options, state.tp_mesh, state.check)
    layers = layers_of(_head(model), owner)
    thread = threading.get_ident()
    outer = state.open.get(thread)
    if session.gradients and outer is None:
        check_backward_hooks(model, layers, owner)
    before = _losses.made
    with contextlib.ExitStack() as heads:
        heads.enter_context(kept_whole(model, layers, DeferredLogits, session.late))
        heads.enter_context(deferring(layers, session))
        opened = state.open[thread] = _Open(heads)
        try:
            outputs = inner(*args, **kwargs)
        finally:
            del state.open[thread]
            if outer is not None:
                state.open[thread] = outer
    if opened.aside:
        return outputs
    if session.losses == 0:
        if _losses.made != before or (session.gradients and _without_gradient(outputs)):
            return without_logits(outputs)  # another patched model made the loss, or it has no gradient
        raise UnsupportedError(
            f"logitless.transformers: the loss of {owner} is not made of the logits of its output embeddings by "
            "torch.nn.functional.cross_entropy; logitless.transformers.unpatch(model) goes back to the original path"
        )
    state.check = max(0, state.check - session.compared)
    _losses.made += 1
    if not torch.is_grad_enabled():  # with gradients FSDP frees the units itself, after the backward pass
        for unit in session.unsharded:
            unit.reshard()
    return without_logits(outputs)


class _Losses(threading.local):
    made = 0  # losses of this thread, of all patched models


_losses = _Losses()


def _without_gradient(outputs: Any) -> bool:
    values = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, (tuple, list)) else ()
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return bool(tensors) and not any(isinstance(value, DeferredLogits) or value.requires_grad for value in tensors)
