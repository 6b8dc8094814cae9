"""Finds the linear layers of a model's head, and replaces their forward while a loss is computed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from .. import _zero3
from ..errors import UnsupportedError
from ..nn import FusedHead
from ..quantized import QuantizedWeight, kind_of
from ._deferred import DeferredLogits
from ._logits import Logits, Session, Term, fused_operands, is_dtensor
from ._loss import present
from ._probe import logits_of, some_rows

_PLAIN = (nn.Linear.forward, FusedHead.forward)  # FusedHead's is Linear's where it is called without targets


def layers_of(head: nn.Module, owner: str) -> list[nn.Linear]:
    """Returns the layers of ``head`` that make logits: the head itself, or layers inside a wrapper of PEFT.

    Raises:
        UnsupportedError: The head is no plain linear layer and no frozen quantised one of a known kind, or it has an
            adapter of PEFT other than LoRA.
    """
    for module in head.modules():
        if adapter := _unknown_adapter(module):
            raise UnsupportedError(
                f"logitless.transformers: the head of {owner} has {adapter} around it; expected a torch.nn.Linear, or "
                "LoRA on one: leave lm_head out of it, or logitless.transformers.unpatch(model)"
            )
    linear = [module for module in head.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UnsupportedError(
            f"logitless.transformers: the output embeddings of {owner}: expected a linear layer, "
            f"got {type(head).__name__}"
        )
    sizes = [_sizes(module) for module in linear]
    inputs = {size for size, _ in sizes}
    vocab = next((size for _, size in sizes if size not in inputs), sizes[-1][1])  # other layers feed a next one
    makers = [module for module, (_, size) in zip(linear, sizes, strict=True) if size == vocab]
    for module in makers:
        kind = type(module)
        if kind_of(module) and (kind.forward in _PLAIN or kind.forward.__module__.startswith("bitsandbytes.")):
            QuantizedWeight(module)  # refuses those that are trained
        elif kind.forward not in _PLAIN:
            raise UnsupportedError(
                f"logitless.transformers: the head of {owner} is a {kind.__module__}.{kind.__name__} (quantised?); "
                "expected a torch.nn.Linear, or a frozen one that bitsandbytes or torchao has quantised to 8 bits, or "
                "to 4 by bitsandbytes: keep the head out of the quantisation (modules_to_not_convert)"
            )
    return makers


def _sizes(layer: nn.Linear) -> tuple[int, int]:
    """Returns the sizes of input and output.

    PEFT's copy of a tied embedding says that it is a nn.Linear(V, D), but its weight is [V, D].
    """
    weight = layer._parameters.get("weight")
    if weight is not None and tuple(weight.shape) == (layer.in_features, layer.out_features):
        return layer.out_features, layer.in_features
    return layer.in_features, layer.out_features


def _unknown_adapter(module: nn.Module) -> str | None:
    """Returns the name of an unsupported adapter of PEFT, recognized by its settings, or None."""
    dora = getattr(module, "use_dora", None)
    if isinstance(dora, dict) and any(dora.values()):
        return "DoRA (use_dora=True)"
    return "trainable_token_indices" if type(module).__name__ == "TrainableTokensWrapper" else None


def check_backward_hooks(model: nn.Module, layers: list[nn.Linear], owner: str) -> None:
    """Raises for hooks that would see, and may change, the gradient of logits: it is not made, so none would be called.

    Hooks of the model itself are fine: they get the gradient of its loss.
    """
    if module_hooks._global_backward_hooks or module_hooks._global_backward_pre_hooks:
        raise UnsupportedError(
            f"logitless.transformers: backward hooks of all modules are registered, which the head of {owner} would "
            "not call: the gradient of the logits is not made; remove them, or logitless.transformers.unpatch(model)"
        )
    for name, module in model.named_modules():
        if module is model or not (module._backward_hooks or module._backward_pre_hooks):
            continue
        if any(part in layers for part in module.modules()):
            raise UnsupportedError(
                f"logitless.transformers: {name} of {owner} has a backward hook, which would not be called: the "
                "gradient of the logits is not made; remove it, or logitless.transformers.unpatch(model)"
            )


def operands_of(head: nn.Module, hidden: Tensor, owner: str) -> tuple[Tensor, dict[str, Any]]:
    """Returns hidden states and options of the fused head that makes the logits which ``head`` makes of ``hidden``."""
    if any(hasattr(parameter, "ds_id") for parameter in head.parameters()):
        raise UnsupportedError(
            f"logitless.trl: the head of {owner} has an adapter and weights that DeepSpeed ZeRO-3 partitions and takes "
            "away before the loss; expected ZeRO-2, or no adapter on the head"
        )
    session = Session(owner, {}, None, probing=0)
    with deferring(layers_of(head, owner), session):
        made = head(hidden)
    if not isinstance(made, DeferredLogits):
        raise UnsupportedError(
            f"logitless.transformers: the head of {owner} has a forward of its own, which leaves out its adapter; "
            "expected that of PEFT"
        )
    terms = tuple(present(term, session) for term in made.logits.terms)
    return fused_operands(replace(made.logits, terms=terms))


@contextlib.contextmanager
def deferring(layers: list[nn.Linear], session: Session) -> Iterator[None]:
    """Makes these layers return deferred logits inside the block. Hooks around their forward stay in place."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_replaced(layer, session))
        yield


_replacing = threading.Lock()
_MARK = "_logitless_deferring"


@contextlib.contextmanager
def _replaced(layer: nn.Linear, session: Session) -> Iterator[None]:
    # accelerate's hooks (devices, offloading) call the forward that they keep as _old_forward.
    name = "_old_forward" if hasattr(layer, "_hf_hook") else "forward"
    with _replacing:
        if layer.__dict__.get(_MARK):  # this block would put back the other loss's forward at its end
            raise UnsupportedError(
                f"logitless.transformers: the head of {session.owner} is computing another loss; expected one forward "
                "pass at a time of a patched model, or of models that share a head: give each thread a copy"
            )
        own = layer.__dict__.get(name)
        sharded = is_dtensor(layer._parameters.get("weight"))  # tensor parallelism replaces forward
        if own is not None and not sharded and getattr(own, "__func__", None) not in (*_PLAIN, type(layer).forward):
            raise UnsupportedError(
                f"logitless.transformers: the head of {session.owner} has a forward of its own, whose backward pass "
                "may be another; expected that of torch.nn.Linear, or logitless.transformers.unpatch(model)"
            )
        original: Callable[..., Tensor] = getattr(layer, name)

        mine = threading.get_ident()

        def forward(input: Tensor) -> Tensor:
            if threading.get_ident() != mine or (session.gradients and not torch.is_grad_enabled()):
                return original(input)
            return _deferred(layer, original, input, session)

        layer.__dict__[_MARK] = True
        layer.__dict__[name] = forward
    try:
        yield
    finally:
        with _replacing:
            del layer.__dict__[_MARK]
            if own is None:
                del layer.__dict__[name]
            else:
                layer.__dict__[name] = own


def _deferred(layer: nn.Linear, original: Callable[..., Any], hidden: Tensor, session: Session) -> Tensor:
    if isinstance(hidden, DeferredLogits):
        raise hidden.logits.refuse("linear()")
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    # Read once and with gradients: a parametrization may change its state at each read, and a cache keeps the result.
    weight: Any = QuantizedWeight(layer) if kind_of(layer) else layer.weight
    bias: Tensor | None = layer.bias
    if _zero3.is_partitioned(weight) and weight.numel() == 0:
        raise UnsupportedError(
            f"logitless.transformers: the head's weight of {session.owner} is partitioned by DeepSpeed ZeRO-3, and "
            "nothing has gathered it; expected a model that deepspeed.initialize() got"
        )
    probed = probe = None
    if session.probing:
        probed = some_rows(hidden)
        plain = getattr(original, "__func__", None) in _PLAIN
        probe = logits_of(None if plain else original, weight, bias, probed, session.owner)
    read = (hidden, *(weight.reads() if isinstance(weight, QuantizedWeight) else [weight]))
    versions = tuple((tensor, tensor._version) for tensor in read if not tensor.is_inference())
    term = Term(hidden, weight, probed=probed, versions=versions, layer=layer)
    if bias is not None and hasattr(layer, "unshard"):
        bias = bias.clone()  # FSDP2 frees the bias when this call ends
    return DeferredLogits(Logits(session, (term,), dtype, bias, probe=probe, as_dtensor=is_dtensor(hidden)))
