"""Warns that TRL's trainers compute the loss themselves, so that the patch of a model has no effect in them."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any, Protocol

import torch

from .. import options as _options
from ..native import PACKAGE

# Packages between a model's forward and its caller. trl.models is among them: it calls a trainer's function.
_AROUND = tuple(
    f"{name}." for name in (PACKAGE, *"torch transformers accelerate peft deepspeed contextlib trl.models".split())
)
ADVICE = "logitless.trl.patch() gives TRL's trainers the fused head"


class Patched(Protocol):
    options: dict[str, Any]
    warned: bool  # whether warn_of_step has warned


def trl_options() -> dict[str, Any] | None:
    """Returns the options of ``logitless.trl.patch``, or None where TRL's trainers have their own head."""
    from ..trl._patch import current_options

    return current_options()


def trl_has(options: dict[str, Any]) -> bool:
    """Whether ``logitless.trl.patch`` has the same options, however a budget is written."""
    of_trl = trl_options()

    def plain(given: dict[str, Any]) -> dict[str, Any]:
        return given | {"max_workspace_bytes": _options.budget(given["max_workspace_bytes"])}

    return of_trl is not None and plain(of_trl) == plain(options)


def warn_where_imported(owner: str, stacklevel: int) -> None:
    """Warns, when ``patch`` is called, if TRL is imported and its trainers do not have the fused head."""
    if "trl" in sys.modules and trl_options() is None:
        warnings.warn(
            "logitless.transformers.patch: TRL is imported, whose trainers (SFT, DPO, KTO, GRPO, RLOO and others) do "
            f"not call the model's own loss: for them this patch of {owner} changes nothing, and {ADVICE}. With "
            "other trainers, such as transformers' Trainer, ignore this",
            stacklevel=stacklevel + 1,
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def warn_of_step(state: Patched, owner: str, has_trl_head: bool) -> None:
    """Warns, once for each patch, in a step whose loss a trainer of TRL computes.

    Args:
        state: The patch of the model.
        owner: The model's class, for the message.
        has_trl_head: Whether the call is one for the head that TRL gave the model. If not, the callers on the stack
            show whether it comes from TRL.
    """
    options, callers = trl_options(), _modules(sys._getframe())
    if has_trl_head and options is not None:
        reason = f"its patch's options do not count here, but those of logitless.trl.patch: {state.options}, {options}"
    elif options is None and (has_trl_head or any(name.startswith("trl.") for name in callers)):
        reason = f"with its own head: the patch of this model changes nothing here, and {ADVICE}"
    else:
        return
    state.warned = True
    message = f"logitless.transformers: a trainer of TRL makes the loss of {owner} itself, {reason}"
    level = next((level for level, name in enumerate(callers, 1) if not name.startswith(_AROUND)), 1)
    warnings.warn(message, stacklevel=level)


def _modules(frame: FrameType | None) -> list[str]:
    """Returns the modules of the functions on the stack, from this frame outwards, each with a dot at the end."""
    modules = []
    while frame is not None:
        modules.append(f"{frame.f_globals.get('__name__')}.")
        frame = frame.f_back
    return modules
