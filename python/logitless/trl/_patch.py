"""``patch`` and ``unpatch``: they replace functions of TRL, for all trainers that call them."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UnsupportedError
from ..options import TrainingOptions, accepts, check_names, checked_training, names_of
from ._adapters import TRAINERS, AddFusedHead, Refused
from ._divergence import Divergences
from ._log_probs import LogProbs
from ._step import StandIn

if TYPE_CHECKING:
    from typing_extensions import Unpack

KNOWN = ("1.16.0",)
_REFUSED = "BaseTunerLayer"  # the trainers' name for classes that they refuse as a head


class _Replaced(NamedTuple):
    """A function of TRL that is replaced."""

    home: str  # its module
    name: str
    stand_in: type[StandIn]
    required: bool = True  # if False, a TRL without the function is patched as well

    def current(self) -> Any:
        """Returns the object that has the name now, or None."""
        return getattr(sys.modules.get(self.home), self.name, None)

    def stands_in(self) -> bool:
        """Whether that is a stand-in: of this package, or of a copy of it under another name."""
        return type(self.current()).__name__ == self.stand_in.__name__


_LOG_PROBS = _Replaced("trl.trainer.utils", "_ChunkedLogProbFunction", LogProbs)
_ALL = (
    _LOG_PROBS,
    _Replaced("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction", Divergences, required=False),
    _Replaced("trl.trainer.utils", "add_fused_lm_head", AddFusedHead),
)


@accepts(TrainingOptions)
def patch(**options: Unpack[TrainingOptions]) -> None:
    """Makes TRL's trainers compute log-probabilities, entropies and divergences of tokens with the fused head.

    SFT, DPO, KTO, GRPO and RLOO call one function for log-probabilities and entropies, Distillation another one for
    divergences. Both are replaced in every module of TRL that has them, so existing trainers use the new ones. Trainers
    that are made later, except Distillation, take LoRA on the head. Calling it again replaces the options.

    Args:
        max_workspace_bytes: As in :func:`logitless.linear_cross_entropy` and :func:`logitless.linear_divergence`.
        gradient: As in :func:`logitless.linear_cross_entropy`. Divergences always have exact gradients.
        threshold: As in :func:`logitless.linear_cross_entropy`.
        screen: Only ``"none"``: TRL needs the loss of each token before its gradients.
        compute_dtype: Only None: log-probabilities and divergences of whole softmaxes have no other.
        batch_invariant: As in :func:`logitless.linear_cross_entropy`.
        recompute_logits: As in :func:`logitless.linear_cross_entropy`.

    Raises:
        ImportError: TRL is not installed.
        UnsupportedError: The functions of this version of TRL are not the known ones, or there is a screen or a
            compute_dtype.
    """
    check_names("patch", options, names_of(TrainingOptions))
    checked = checked_training(options)
    if checked["screen"] != "none":
        raise UnsupportedError(
            f'screen: expected "none", as TRL needs the loss of each token before gradients, got "{checked["screen"]}"'
        )
    if checked.pop("compute_dtype") is not None:
        raise UnsupportedError("compute_dtype: expected None, as not all losses of TRL have another, got 'fp8'")
    install(checked)


_replacing = threading.RLock()  # the first steps of models in several threads put stand-ins in


def unpatch() -> None:
    """Gives TRL its own functions back; does nothing if TRL is not patched."""
    with _replacing:
        for replaced in _ALL:
            if replaced.stands_in():
                _replace(replaced.current(), replaced.current().original)
        for trainer in map(sys.modules.get, TRAINERS):
            if type(getattr(trainer, _REFUSED, None)).__name__ == Refused.__name__:
                setattr(trainer, _REFUSED, getattr(trainer, _REFUSED).original)


def install(options: dict[str, Any] | None = None) -> None:
    """Puts stand-ins into TRL. Without options they keep those of ``patch``, or only serve steps of models."""
    with _replacing:
        if options is not None or not isinstance(_LOG_PROBS.current(), LogProbs):
            _install(options)


def _install(options: dict[str, Any] | None) -> None:
    known = [(replaced, _known(replaced)) for replaced in _ALL]  # before anything is replaced
    for replaced, original in known:
        if original is not None:
            kept = options or getattr(replaced.current(), "options", None)
            _replace(replaced.current(), replaced.stand_in(original, kept))
    for name in TRAINERS:
        trainer = importlib.import_module(name)
        adapters = getattr(trainer, _REFUSED, None)  # None without PEFT
        if isinstance(adapters, type):
            setattr(trainer, _REFUSED, Refused(adapters))


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
    got = _signature(original, ("ctx",))
    expected = _signature(replaced.stand_in.fused, ("self", "options"))
    if got == expected:
        return original
    version = getattr(sys.modules["trl"], "__version__", "of an unknown version")
    raise UnsupportedError(
        f"logitless.trl: expected {replaced.home}.{replaced.name}{expected}, got "
        f"{'no such function' if original is None else replaced.name + got} of trl {version}; known: trl "
        f"{', '.join(KNOWN)}"
    )


def _signature(function: Any, left_out: tuple[str, ...]) -> str:
    """Returns names and defaults of the parameters of a function, or of an autograd function's forward."""
    forward = getattr(function, "forward", function)
    given = () if forward is None else inspect.signature(forward).parameters.values()
    return f"({', '.join(str(p.replace(annotation=p.empty)) for p in given if p.name not in left_out)})"


def _replace(old: Any, new: Any) -> None:
    """Replaces an object under every name that a module of TRL has for it, so later imports get the new one."""
    for name, module in list(sys.modules.items()):
        if module is not None and (name == "trl" or name.startswith("trl.")):
            for key, value in list(vars(module).items()):
                if value is old:
                    setattr(module, key, new)
