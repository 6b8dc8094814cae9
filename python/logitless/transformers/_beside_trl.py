"""Trainers of TRL with a patched model: they train with the fused head and the model's options, or raise an error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..options import check_of_trl


def is_of_trl(owner: str, call: Callable[..., Any]) -> bool:
    """Whether a trainer of TRL computes the loss itself in a call without labels, by functions that have stand-ins.

    Raises:
        UnsupportedError: It computes the loss from logits.
    """
    if "trl" not in sys.modules or not torch.is_grad_enabled():
        return False
    from ..trl._step import refused, trainer

    if trainer() is None:
        return False
    if getattr(call, "__module__", None) != "trl.models.utils":  # Distillation's loss inside the model's forward
        raise refused(owner)
    return True


def run(model: nn.Module, options: dict[str, Any], call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs a call of the model whose loss a trainer of TRL computes."""
    check_of_trl(options)
    from ..trl import _patch, _step

    _patch.install()
    return _step.run(model, options, call, args, kwargs)


def before_head_is_read(model: nn.Module) -> None:
    """Prepares TRL where one of its trainers is made, which would refuse LoRA on the head.

    Raises:
        UnsupportedError: A trainer computes a loss from the head's weight, in no call of the model.
    """
    if "trl" not in sys.modules or torch.compiler.is_compiling():
        return
    caller = sys._getframe(3)  # above this function, that of the state and that of the model
    module = str(caller.f_globals.get("__name__"))
    if not module.startswith("trl."):
        return
    from ..trl import _adapters, _patch, _step

    if module in _adapters.TRAINERS:
        _patch.install()
    elif caller.f_code.co_name == "_compute_loss" and model.training and _step.current() is None:
        raise _step.refused(type(model).__name__)
