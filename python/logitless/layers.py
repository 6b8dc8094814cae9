"""Layers by which ``kernelize`` of Hugging Face's ``kernels`` replaces a model's, see docs/hub.md.

``kernelize`` takes the ``forward`` of a class and leaves the model's layer as it is, so ``self`` is that layer. By the
rules of ``kernels`` a class has no constructor and no attributes except those that say what it can do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .compat import liger_kernel
from .compat import torch as _upstream

__all__ = ["LigerForCausalLMLossLayer", "LinearCrossEntropyLoss", "linear_cross_entropy"]


def _layer_of(function: Callable[..., Tensor], name: str) -> type[nn.Module]:
    """Returns a layer that replaces a function of the same signature."""

    class Layer(nn.Module):
        can_torch_compile = True

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return function(*args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(function)
    parameters = [own, *signature.parameters.values()]
    vars(Layer)["forward"].__signature__ = signature.replace(parameters=parameters)
    Layer.__name__ = Layer.__qualname__ = name
    Layer.__doc__ = function.__doc__
    return Layer


LigerForCausalLMLossLayer = _layer_of(liger_kernel.LigerForCausalLMLoss, "LigerForCausalLMLossLayer")
linear_cross_entropy = _layer_of(_upstream.linear_cross_entropy, "linear_cross_entropy")


class LinearCrossEntropyLoss(nn.Module):
    """Replaces ``torch.nn.LinearCrossEntropyLoss`` of PyTorch 2.13, or a module with its attributes."""

    can_torch_compile = True
    forward = _upstream.LinearCrossEntropyLoss.forward
