"""The linear layers of a model's head, and what they do while a loss is computed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from ..errors import UnsupportedError
from ..nn import FusedHead
from ._deferred import DeferredLogits
from ._logits import Logits, Session, Term, is_dtensor
from ._probe import logits_of, some_rows

_PLAIN = (nn.Linear.forward, FusedHead.forward)  # called with hidden states alone, the latter is the former


def layers_of(head: nn.Module, owner: str) -> list[nn.Linear]:
    """The layers of ``head`` that make logits: itself, or those within what PEFT has put around it.

    Raises:
        UnsupportedError: a head that is no plain linear layer, such as a quantised one, or has an adapter of PEFT other
            than LoRA.
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
            f"logitless.transformers: the output embeddings of {owner} are a {type(head).__name__}, not a linear layer"
        )
    sizes = [_sizes(module) for module in linear]
    inputs = {size for size, _ in sizes}
    vocab = next((size for _, size in sizes if size not in inputs), sizes[-1][1])  # layers before the last feed one
    found = [module for module, (_, size) in zip(linear, sizes, strict=True) if size == vocab]
    for module in found:
        kind = type(module)
        if kind.forward not in _PLAIN:
            raise UnsupportedError(
                f"logitless.transformers: the head of {owner} is a {kind.__module__}.{kind.__name__} (quantised?); "
                "expected a torch.nn.Linear: keep the head out of the quantisation (modules_to_not_convert)"
            )
    return found


def _sizes(layer: nn.Linear) -> tuple[int, int]:
    """Sizes of input and output. PEFT's copy of a tied embedding names itself nn.Linear(V, D); its weight is [V, D]."""
    weight = layer._parameters.get("weight")
    if weight is not None and tuple(weight.shape) == (layer.in_features, layer.out_features):
        return layer.out_features, layer.in_features
    return layer.in_features, layer.out_features


def _unknown_adapter(module: nn.Module) -> str | None:
    """Of PEFT, by the names that its settings have."""
    dora = getattr(module, "use_dora", None)
    if isinstance(dora, dict) and any(dora.values()):
        return "DoRA (use_dora=True)"
    return "trainable_token_indices" if type(module).__name__ == "TrainableTokensWrapper" else None


def check_backward_hooks(model: nn.Module, layers: list[nn.Linear], owner: str) -> None:
    """Refuses hooks that would see, and may change, the gradient of logits: none is made, so that none would be called.

    Those of the model itself get the gradient of its loss.
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


@contextlib.contextmanager
def deferring(layers: list[nn.Linear], session: Session) -> Iterator[None]:
    """While it is open these layers return logits that are never made. Hooks around their forward stay in place."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_replaced(layer, session))
        yield


_replacing = threading.Lock()
_MARK = "_logitless_deferring"


@contextlib.contextmanager
def _replaced(layer: nn.Linear, session: Session) -> Iterator[None]:
    # accelerate's hooks (devices, offloading) are around what they keep as _old_forward.
    name = "_old_forward" if hasattr(layer, "_hf_hook") else "forward"
    with _replacing:
        if layer.__dict__.get(_MARK):  # what is put back at the end would be this other loss's
            raise UnsupportedError(
                f"logitless.transformers: the head of {session.owner} is computing another loss; expected one forward "
                "pass at a time of a patched model, or of models that share a head: give each thread a copy"
            )
        own = layer.__dict__.get(name)
        sharded = is_dtensor(layer._parameters.get("weight"))  # tensor parallelism replaces forward
        if own is not None and not sharded and getattr(own, "__func__", None) not in _PLAIN:
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
    # Once and with gradients: a parametrization may change its state at each use, and one that is cached keeps these.
    weight: Tensor = layer.weight
    bias: Tensor | None = layer.bias
    probed = probe = None
    if session.probing:
        probed = some_rows(hidden)
        plain = getattr(original, "__func__", None) in _PLAIN
        probe = logits_of(None if plain else original, weight, bias, probed, session.owner)
    versions = tuple((tensor, tensor._version) for tensor in (hidden, weight) if not tensor.is_inference())
    term = Term(hidden, weight, probed=probed, versions=versions, layer=layer)
    if bias is not None and hasattr(layer, "unshard"):
        bias = bias.clone()  # FSDP2 frees it when this call ends
    return DeferredLogits(Logits(session, (term,), dtype, bias, probe=probe, as_dtensor=is_dtensor(hidden)))
