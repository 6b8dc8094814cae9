"""``patch`` and ``unpatch``: they replace functions of TRL, for all trainers that call them."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UnsupportedError
from ..options import TrainingOptions, accepts, check_names, checked_training, names_of
from ._divergence import Divergences
from ._log_probs import OUTPUTS, LogProbs

if TYPE_CHECKING:
    from typing_extensions import Unpack

KNOWN = ("1.16.0",)


class _Replaced(NamedTuple):
    """A function of TRL that is replaced."""

    home: str  # its module
    name: str
    stand_in: type[LogProbs] | type[Divergences]
    defaults: dict[str, Any]  # values of parameters, by name, for which the stand-in is right
    required: bool  # if False, a TRL without the function is patched as well

    def current(self) -> Any:
        """Returns the object that has the name now, or None."""
        return getattr(sys.modules.get(self.home), self.name, None)

    def stands_in(self) -> bool:
        """Whether that is a stand-in: of this package, or of a copy of it under another name."""
        return type(self.current()).__name__ == self.stand_in.__name__

    def parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.stand_in.apply).parameters)[1:]


_LOG_PROBS = _Replaced("trl.trainer.utils", "_ChunkedLogProbFunction", LogProbs, {"outputs": OUTPUTS}, True)
_DIVERGENCE = _Replaced(
    "trl.kernels.chunked_divergence",
    "ChunkedDivergenceFunction",
    Divergences,
    {
        "temperature": 1.0,
        "student_logit_scale": 1.0,
        "student_final_logit_softcapping": None,
        "teacher_logit_scale": 1.0,
        "teacher_final_logit_softcapping": None,
    },
    False,
)
_ALL = (_LOG_PROBS, _DIVERGENCE)


@accepts(TrainingOptions)
def patch(**options: Unpack[TrainingOptions]) -> None:
    """Makes TRL's trainers compute log-probabilities, entropies and divergences of tokens with the fused head.

    SFT, DPO, KTO, GRPO and RLOO call one function for log-probabilities and entropies, Distillation another one for
    divergences. Both are replaced in every module of TRL that has them, so existing trainers use the new ones. Calling
    it again replaces the options.

    Args:
        max_workspace_bytes: As in :func:`logitless.linear_cross_entropy` and :func:`logitless.linear_divergence`.
        gradient: As in :func:`logitless.linear_cross_entropy`. Divergences always have exact gradients.
        threshold: As in :func:`logitless.linear_cross_entropy`.
        batch_invariant: As in :func:`logitless.linear_cross_entropy`.
        recompute_logits: As in :func:`logitless.linear_cross_entropy`.

    Raises:
        ImportError: TRL is not installed.
        UnsupportedError: The functions of this version of TRL are not the known ones.
    """
    check_names("patch", options, names_of(TrainingOptions))
    method = checked_training(options)
    known = [(replaced, _known(replaced)) for replaced in _ALL]  # before anything is replaced
    for replaced, original in known:
        if original is not None:
            _replace(replaced.current(), replaced.stand_in(original, method))


def unpatch() -> None:
    """Gives TRL its own functions back; does nothing if TRL is not patched."""
    for replaced in _ALL:
        if replaced.stands_in():
            _replace(replaced.current(), replaced.current().original)


def current_options() -> dict[str, Any] | None:
    """Returns the options of ``patch``, or None where TRL's trainers have their own head."""
    options: dict[str, Any] | None = _LOG_PROBS.current().options if _LOG_PROBS.stands_in() else None
    return options


def _known(replaced: _Replaced) -> Any:
    """Returns TRL's own function after checking it, or None where this TRL has none and need not have it."""
    try:
        importlib.import_module(replaced.home)
    except ModuleNotFoundError:
        if replaced.required:
            raise
        return None
    current = replaced.current()
    original = current.original if replaced.stands_in() else current
    forward, expected = getattr(original, "forward", None), replaced.parameters()
    parameters = {} if forward is None else dict(inspect.signature(forward).parameters)
    names = tuple(parameters)[1:]  # without ctx
    if names == expected and all(parameters[name].default == value for name, value in replaced.defaults.items()):
        return original
    version = getattr(sys.modules["trl"], "__version__", "of an unknown version")
    got = "no such function" if forward is None else f"{replaced.name}.apply({', '.join(names)})"
    defaults = ", ".join(f"{name}={value!r}" for name, value in replaced.defaults.items())
    raise UnsupportedError(
        f"logitless.trl: expected {replaced.home}.{replaced.name}.apply({', '.join(expected)}) with the defaults "
        f"{defaults}, got {got} of trl {version}; known: trl {', '.join(KNOWN)}"
    )


def _replace(old: Any, new: Any) -> None:
    """Replaces an object under every name that a module of TRL has for it, so later imports get the new one."""
    for name, module in list(sys.modules.items()):
        if module is not None and (name == "trl" or name.startswith("trl.")):
            for key, value in list(vars(module).items()):
                if value is old:
                    setattr(module, key, new)
