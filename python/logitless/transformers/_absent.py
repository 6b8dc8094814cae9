"""Removes logits that were never made from a model's outputs, and leaves all else in its place."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ._deferred import METADATA, DeferredLogits, name_of

_READ = METADATA | {"grad_fn", "is_leaf"}
_PASSED = frozenset("to float double half bfloat16 type type_as cpu cuda contiguous".split())


class NoLogits(Tensor):
    """Takes the place of logits in evaluation: it may be passed on, and any use of its values raises an error.

    A Trainer takes the output after the loss for logits. With None or nothing here, that would be another tensor of the
    model.
    """

    owner: str

    @staticmethod
    def __new__(cls, like: Tensor, owner: str) -> NoLogits:
        made: NoLogits = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.owner = owner
        return made

    def __init__(self, like: Tensor, owner: str) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        if name in _READ:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if args and isinstance(args[0], NoLogits):
            if name in _PASSED:
                return args[0]
            if name == "detach":  # by DeepSpeed's ZeRO-3, in an autograd function, which must not return its input
                return NoLogits(args[0], args[0].owner)
        raise _refused(name, (*args, *(kwargs or {}).values()))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _refused(str(func), (*args, *(kwargs or {}).values()))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"NoLogits(shape={list(self.shape)}, dtype={self.dtype})"


def _refused(name: str, arguments: tuple[Any, ...]) -> UnsupportedError:
    owner = next((value.owner for value in arguments if isinstance(value, NoLogits)), "the model")
    return UnsupportedError(
        f"evaluate: expected False in logitless.transformers.patch where logits are used, as by compute_metrics and "
        f"Trainer.predict, got True and {name}() of the logits of {owner}, which were not made; with evaluate=True ask "
        "for the loss alone (prediction_loss_only=True)"
    )


def without_logits(outputs: Any) -> Any:
    """Returns the outputs with None in place of logits that were never made; in evaluation with a :class:`NoLogits`.

    A ModelOutput leaves out entries that are None, so all entries after one would move. Here the key stays, and the
    attribute is None.
    """
    if isinstance(outputs, DeferredLogits):
        return None if torch.is_grad_enabled() else NoLogits(outputs, outputs.logits.session.owner)
    if type(outputs) is dict:
        return {key: without_logits(value) for key, value in outputs.items()}
    if isinstance(outputs, dict) and dataclasses.is_dataclass(outputs):
        absent = tuple(key for key, value in outputs.items() if isinstance(value, DeferredLogits))
        kind = _keeping(type(outputs), absent) if absent and isinstance(outputs, OrderedDict) else type(outputs)
        return kind(**{key: without_logits(value) for key, value in outputs.items()})
    if type(outputs) in (tuple, list):
        return type(outputs)(without_logits(value) for value in outputs)
    return outputs


class _Outputs(OrderedDict[str, Any]):
    """First base class of a ModelOutput without logits.

    accelerate's mixed precision, DistributedDataParallel and others make new outputs from an output's class and
    entries. A ModelOutput then drops entries that are None. This class keeps their places, whoever makes it.
    """

    _logitless_class: type
    _logitless_absent: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        for name in names if self else ():  # an empty one is a copy that gets its entries one by one
            if name in self._logitless_absent:
                self[name] = self.get(name)
            if name in self:
                self.move_to_end(name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)  # ModelOutput's also sets the attribute
        if isinstance(value, NoLogits):
            self.__dict__[key] = None

    def __reduce__(self) -> Any:
        reduced: Any = super().__reduce__()
        return (_made, (self._logitless_class, self._logitless_absent, *reduced[1]), *reduced[2:])


@functools.cache
def _keeping(kind: type, absent: tuple[str, ...]) -> Any:
    """Returns a class derived from ``kind``, with its name, that keeps the places of these absent fields."""
    names = {"__qualname__": kind.__qualname__, "__doc__": kind.__doc__, "__module__": __name__}
    names |= {"_logitless_class": kind, "_logitless_absent": absent}  # type: ignore[dict-item]
    return types.new_class(kind.__name__, (_Outputs, kind), exec_body=lambda namespace: namespace.update(names))


def _made(kind: type, absent: tuple[str, ...], *arguments: Any) -> Any:
    return _keeping(kind, absent)(*arguments)
