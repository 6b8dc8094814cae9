"""A call of a model whose loss TRL's functions compute: their stand-ins then know the model and its options."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import _zero3
from ..errors import UnsupportedError
from ..quantized import QuantizedWeight, kind_of
from ..transformers._heads import operands_of


@dataclass
class Step:
    model: nn.Module
    options: dict[str, Any]
    used: bool = False  # whether a stand-in was called


class _Thread(threading.local):
    step: Step | None = None


_thread = _Thread()


def current() -> Step | None:
    """Returns the innermost step of this thread. Steps run uncompiled."""
    return None if torch.compiler.is_compiling() else _thread.step


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run(
    model: nn.Module, options: dict[str, Any] | None, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Runs a call of the model as a step.

    Args:
        model: The model, with TRL's fused head.
        options: Those of ``logitless.transformers.patch``, or None for those of ``logitless.trl.patch``.
        call: Makes the call.
        args: Its arguments.
        kwargs: Its named arguments.

    Raises:
        UnsupportedError: No patch is active, or TRL did not call a function that has a stand-in.
    """
    outer, owner = current(), type(model).__name__
    if outer is not None and outer.model is model:
        return call(*args, **kwargs)
    if options is None:
        options = getattr(sys.modules["trl.trainer.utils"]._ChunkedLogProbFunction, "options", None)
    if options is None:
        raise UnsupportedError(
            f"logitless.trl: the head of {owner} has an adapter, which TRL's own head leaves out; expected "
            "logitless.trl.patch() or logitless.transformers.patch(model), got neither"
        )
    step = _thread.step = Step(model, options)
    try:
        outputs = call(*args, **kwargs)
    finally:
        _thread.step = outer
    if not step.used:
        raise refused(owner)
    return outputs


class StandIn:
    """Fused heads behind ``apply``, the one method of an autograd function that TRL calls."""

    def __init__(self, original: Any, options: dict[str, Any] | None) -> None:
        self.original = original  # TRL's function, which this object replaces
        self.options = options  # of ``logitless.trl.patch``, or None where only steps have fused heads

    fused: Callable[..., Any]  # takes the options, and then the arguments of ``apply``

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        step, options = current(), self.options
        if step is not None:
            step.used, options = True, step.options
        return self.original.apply(*args, **kwargs) if options is None else self.fused(options, *args, **kwargs)


def has_adapter(head: nn.Module) -> bool:
    """Whether a head is a layer of PEFT around another one; a copy in ``modules_to_save`` is none."""
    return hasattr(head, "base_layer")


def fused_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Returns hidden states, weight, bias and scale of the fused head that makes TRL's logits.

    TRL's logits are ``scale * (h . w + b)``; the fused head adds the bias after the factor. TRL reads ``head.weight``,
    which leaves out LoRA. So a head with an adapter is called, to find its operands.
    """
    step, factor = current(), 1.0
    head: Any = None if step is None else step.model.get_output_embeddings()  # type: ignore[operator]
    if step is not None and has_adapter(head):
        hidden, operands = operands_of(head, hidden, type(step.model).__name__)
        weight, bias, factor = operands["weight"], operands["bias"], operands["scale"]
    if not torch.compiler.is_compiling() and (isinstance(weight, QuantizedWeight) or kind_of(weight)):
        raise UnsupportedError(
            f"logitless.trl: expected a head that is not quantised, got a {type(weight).__name__}; keep the head out "
            "of the quantisation (modules_to_not_convert)"
        )
    _zero3.gather_again_with_running_module(hidden, weight, bias)
    return hidden, weight, bias if bias is None or scale == 1.0 else bias * scale, scale * factor


def refused(owner: str) -> UnsupportedError:
    return UnsupportedError(
        f"logitless.transformers: expected a trainer of TRL whose loss has a fused head, got {trainer()}, which "
        f"computes the loss of {owner} from its logits or its head's weight; logitless.transformers.unpatch(model) "
        "goes back to the original path"
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def trainer() -> str | None:
    """Returns the module of TRL whose function is the nearest one on the stack, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("trl.") and not name.startswith("trl.models."):  # those run a trainer's function
            return name
        frame = frame.f_back  # type: ignore[assignment]
    return None
