"""``patch`` and ``unpatch``: another function under one name of TRL's, for all trainers that call it."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from .. import _options
from ..errors import UnsupportedError
from ._log_probs import OUTPUTS, LogProbs

KNOWN = ("1.16.0",)
_HOME, _NAME = "trl.trainer.utils", "_ChunkedLogProbFunction"
_PARAMETERS = ("ctx", *list(inspect.signature(LogProbs.apply).parameters)[1:])


def patch(
    *,
    max_workspace_bytes: int | None = None,
    gradient: str = "exact",
    threshold: float = _options.DEFAULT_THRESHOLD,
    batch_invariant: bool = False,
) -> None:
    """Makes TRL's trainers compute log-probabilities and entropies of tokens with the fused head.

    SFT, DPO, KTO, GRPO and RLOO call one function for them, which is replaced wherever a module of TRL has it. A
    trainer that exists already uses the new one, too. Calling it again replaces the options.

    Args:
        max_workspace_bytes, gradient, threshold, batch_invariant: as in :func:`headroom.linear_cross_entropy`.

    Raises:
        ImportError: TRL is not installed.
        UnsupportedError: a version of TRL whose function is not the known one.
    """
    options = {
        "max_workspace_bytes": max_workspace_bytes,
        "gradient": gradient,
        "threshold": threshold,
        "batch_invariant": batch_invariant,
    }
    _options.budget(max_workspace_bytes)
    _options.check_gradient(gradient)
    _options.checked_threshold(threshold)
    _options.check_batch_invariant(batch_invariant, gradient)
    found = getattr(importlib.import_module(_HOME), _NAME, None)
    original = found.original if isinstance(found, LogProbs) else found
    _check_known(original)
    _replace(found, LogProbs(original, options))


def unpatch() -> None:
    """Gives TRL its own function back; where it is not patched nothing happens."""
    found = getattr(sys.modules.get(_HOME), _NAME, None)
    if isinstance(found, LogProbs):
        _replace(found, found.original)


def _check_known(original: Any) -> None:
    forward = getattr(original, "forward", None)
    parameters = {} if forward is None else dict(inspect.signature(forward).parameters)
    if tuple(parameters) == _PARAMETERS and parameters["outputs"].default == OUTPUTS:
        return
    version = getattr(sys.modules["trl"], "__version__", "of an unknown version")
    got = "no such function" if forward is None else f"{_NAME}.apply({', '.join(list(parameters)[1:])})"
    raise UnsupportedError(
        f"headroom.trl: expected {_HOME}.{_NAME}.apply({', '.join(_PARAMETERS[1:])}) with outputs out of "
        f"{', '.join(OUTPUTS)}, got {got} of trl {version}; known: trl {', '.join(KNOWN)}"
    )


def _replace(old: Any, new: Any) -> None:
    """Under every name that a module of TRL has for it, so that what imports it later gets the new one."""
    for name, module in list(sys.modules.items()):
        if module is not None and (name == "trl" or name.startswith("trl.")):
            for key, value in list(vars(module).items()):
                if value is old:
                    setattr(module, key, new)
