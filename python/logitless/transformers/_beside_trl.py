"""Says that the trainers of TRL make the loss themselves, so that the patch of a model changes nothing in them."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any, Protocol

import torch

from .. import _options

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
    options = options_there()
    if asked and options is not None:
        told = f"its patch's options do not count here, but those of logitless.trl.patch: {state.options}, {options}"
    elif options is None and (asked or _called_by_trl(sys._getframe(1))):
        told = f"with its own head: the patch of this model changes nothing here, and {ADVICE}"
    else:
        return
    state.told = True
    warnings.warn(f"logitless.transformers: a trainer of TRL makes the loss of {owner} itself, {told}", stacklevel=2)


def _called_by_trl(frame: FrameType | None) -> bool:
    while frame is not None:
        name: Any = frame.f_globals.get("__name__")
        if name == "trl" or (isinstance(name, str) and name.startswith("trl.")):
            return True
        frame = frame.f_back
    return False
