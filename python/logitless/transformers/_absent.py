"""Outputs of a model without the logits that were never made, with all else in its place."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ._deferred import METADATA, DeferredLogits, name_of

_READ = METADATA | {"grad_fn", "is_leaf"}
_PASSED = frozenset("to float double half bfloat16 type type_as cpu cuda contiguous".split())


class NoLogits(Tensor):
    """Stands in the place of logits in evaluation: it may be passed on, and any use of its values is refused.

    A Trainer takes what follows the loss for logits. With None, or nothing, that would be another tensor of the model.
    """

    owner: str

    @staticmethod
    def __new__(cls, deferred: DeferredLogits) -> NoLogits:
        made: NoLogits = Tensor._make_wrapper_subclass(
            cls, deferred.shape, dtype=deferred.dtype, device=deferred.device
        )
        made.owner = deferred.logits.session.owner
        return made

    def __init__(self, deferred: DeferredLogits) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        if name in _READ:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in _PASSED and args and isinstance(args[0], NoLogits):
            return args[0]
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
    """The outputs with None in place of logits that were never made, and in evaluation a :class:`NoLogits`.

    A ModelOutput leaves out what is None, and all after it would move to another place. It keeps the key here, and the
    attribute is None.
    """
    if isinstance(outputs, DeferredLogits):
        return None if torch.is_grad_enabled() else NoLogits(outputs)
    if type(outputs) is dict:
        return {key: without_logits(value) for key, value in outputs.items()}
    if isinstance(outputs, dict) and dataclasses.is_dataclass(outputs):
        fields = {key: without_logits(value) for key, value in outputs.items()}
        made = type(outputs)(**{key: None if isinstance(value, NoLogits) else value for key, value in fields.items()})
        if isinstance(made, OrderedDict):
            for key, value in fields.items():
                OrderedDict.__setitem__(made, key, value)  # that of ModelOutput sets the attribute, too
                OrderedDict.move_to_end(made, key)
        return made
    if type(outputs) in (tuple, list):
        return type(outputs)(without_logits(value) for value in outputs)
    return outputs
