"""Says that the trainers of TRL make the loss themselves, so that the patch of a model changes nothing in them."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any, Protocol

import torch

from .. import options as _options

# Packages between a model's forward and its caller. TRL's own part calls a trainer's function as one.
_AROUND = tuple(
    f"{name}." for name in "logitless torch transformers accelerate peft deepspeed contextlib trl.models".split()
)
ADVICE = "logitless.trl.patch() gives TRL's trainers the fused head"


class Patched(Protocol):
    options: dict[str, Any]
    told: bool


def options_there() -> dict[str, Any] | None:
    """Those of ``logitless.trl.patch``, where TRL's trainers have the fused head."""
    from ..trl._patch import current_options

    return current_options()


def are_there(options: dict[str, Any]) -> bool:
    """Whether ``logitless.trl.patch`` has the same options, however a budget is written."""
    there = options_there()

    def plain(given: dict[str, Any]) -> dict[str, Any]:
        return given | {"max_workspace_bytes": _options.budget(given["max_workspace_bytes"])}

    return there is not None and plain(there) == plain(options)


def warn_where_imported(owner: str, stacklevel: int) -> None:
    """In ``patch``: TRL is imported, and its trainers do not have the fused head."""
    if "trl" in sys.modules and options_there() is None:
        warnings.warn(
            "logitless.transformers.patch: TRL is imported, whose trainers (SFT, DPO, KTO, GRPO, RLOO and others) do "
            f"not call the model's own loss: for them this patch of {owner} changes nothing, and {ADVICE}. Other "
            "trainers, as that of transformers, need nothing else",
            stacklevel=stacklevel + 1,
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def warn_of_step(state: Patched, owner: str, asked: bool) -> None:
    """In a step without the model's own loss, once a patch: it is a trainer of TRL that makes its loss.

    Args:
        asked: whether the model was called for the head that TRL gave it; else the caller tells.
    """
    options, callers = options_there(), _modules(sys._getframe())
    if asked and options is not None:
        told = f"its patch's options do not count here, but those of logitless.trl.patch: {state.options}, {options}"
    elif options is None and (asked or any(name.startswith("trl.") for name in callers)):
        told = f"with its own head: the patch of this model changes nothing here, and {ADVICE}"
    else:
        return
    state.told = True
    message = f"logitless.transformers: a trainer of TRL makes the loss of {owner} itself, {told}"
    level = next((level for level, name in enumerate(callers, 1) if not name.startswith(_AROUND)), 1)
    warnings.warn(message, stacklevel=level)


def _modules(frame: FrameType | None) -> list[str]:
    """Those of the functions that are being called, from this one outwards, with a dot at the end."""
    found = []
    while frame is not None:
        found.append(f"{frame.f_globals.get('__name__')}.")
        frame = frame.f_back
    return found
