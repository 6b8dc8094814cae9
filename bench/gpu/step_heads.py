"""The heads of whole training steps: how each library has its own put into a model of transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.nn.functional as functional
from torch import Tensor

from methods import MIB, loss_named
from step_models import chosen, last_hidden

BUDGET_MIB = 256
THRESHOLD = 2.0**-9

Loss = Callable[[], Tensor]
Prepare = Callable[[Any, Tensor], Loss]  # of a model and tokens [B, L], which are labels too
Patch = Callable[[Any], object]  # of a model
Function = Callable[[Any, Tensor, Tensor], Tensor]  # of a model, tokens and labels


@dataclasses.dataclass(frozen=True)
class Head:
    name: str
    prepare: Prepare
    ours: bool = False
    fla: bool | None = None  # for models of flash-linear-attention only, for others only, or for all
    by_name: bool = False  # left out of all


def changed_by(patch: Callable[[Any], object], model: Any) -> dict[str, Any]:
    """Runs a library's patch of one model, and takes it off again: what it set of the instance's own attributes, such
    as its ``forward``."""
    before = dict(model.__dict__)
    patch(model)
    found = {name: value for name, value in model.__dict__.items() if before.get(name) is not value}
    for name in found:
        del model.__dict__[name]
    model.__dict__.update({name: before[name] for name in found if name in before})
    return found


def patched(patch: Callable[[Any], object], model: Any, tokens: Tensor, **arguments: Any) -> Loss:
    """The loss of a model that is patched for as long as its forward runs."""
    found = changed_by(patch, model)

    def loss() -> Tensor:
        with mock.patch.multiple(model, create=True, **found):
            value: Tensor = model(input_ids=tokens, labels=tokens, **arguments).loss
            return value

    return loss


def stock(model: Any, tokens: Tensor) -> Loss:
    return lambda: model(input_ids=tokens, labels=tokens).loss


def liger_patch(model: Any) -> None:
    """Its patch of the model with everything off but the head."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    options = {name: False for name, p in inspect.signature(apply).parameters.items() if isinstance(p.default, bool)}
    options["fused_linear_cross_entropy"] = True
    apply(**options, model=model)


def by_patch(patch: Patch) -> Prepare:
    return lambda model, tokens: patched(patch, model, tokens)


def by_function(peer: str) -> Function:
    """A head that is given the last hidden states: a method of methods.py. Raises ImportError without its package."""
    head = loss_named(peer)

    def loss(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        target = functional.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        return head(last_hidden(model, tokens).flatten(0, 1), model.lm_head.weight, target)

    return loss


def of_function(peer: str) -> Prepare:
    def prepare(model: Any, tokens: Tensor) -> Loss:
        function = by_function(peer)
        return lambda: function(model, tokens, tokens)

    return prepare


def no_head(model: Any, tokens: Tensor) -> Loss:
    return lambda: last_hidden(model, tokens).float().mean()


def trl(model: Any, tokens: Tensor) -> Loss:
    """The head of its trainers."""
    from trl.trainer.utils import add_fused_lm_head

    return patched(add_fused_lm_head, model, tokens, fused_lm_head=True)


def fla(model: Any, tokens: Tensor) -> Loss:
    def loss() -> Tensor:
        with mock.patch.object(model.config, "fuse_linear_cross_entropy", True):
            value: Tensor = model(input_ids=tokens, labels=tokens).loss
            return value

    return loss


def logitless_patch(**options: Any) -> Patch:
    def patch(model: Any) -> object:
        import logitless.transformers

        return logitless.transformers.patch(model, **options)

    return patch


def logitless_criterion(model: Any, tokens: Tensor) -> Loss:
    """The criterion of flash-linear-attention's models."""
    import logitless.compat.fla

    found, criterion = fla(model, tokens), logitless.compat.fla.FusedLinearCrossEntropyLoss()

    def loss() -> Tensor:
        with mock.patch.object(model, "criterion", criterion):
            return found()

    return loss


def logitless_plain_criterion(**options: Any) -> Prepare:
    """The patch for transformers, of a model of flash-linear-attention that takes PyTorch's own cross entropy."""

    def prepare(model: Any, tokens: Tensor) -> Loss:
        found = patched(logitless_patch(**options), model, tokens)

        def loss() -> Tensor:
            with mock.patch.object(model.config, "fuse_cross_entropy", False):
                return found()

        return loss

    return prepare


MODULES = (
    "logitless.transformers",
    "logitless.compat.fla",
    "liger_kernel.transformers.monkey_patch",
    "cut_cross_entropy",
    "trl.trainer.utils",
    "fla.models",
)


def import_libraries() -> None:
    """All that are installed, before any time is limited: an import that is cut off cannot be taken up again."""
    for name in MODULES:
        with contextlib.suppress(Exception):  # the head's own row says what is wrong
            importlib.import_module(name)


BUDGET, SPARSIFIED = {"max_workspace_bytes": BUDGET_MIB * MIB}, {"gradient": "sparsified", "threshold": THRESHOLD}
HEADS = [
    Head("stock", stock),
    Head("logitless", by_patch(logitless_patch()), ours=True, fla=False),
    Head("logitless", logitless_criterion, ours=True, fla=True),
    Head(f"logitless {BUDGET_MIB} MiB", by_patch(logitless_patch(**BUDGET)), ours=True, fla=False),
    Head(f"logitless {BUDGET_MIB} MiB", logitless_plain_criterion(**BUDGET), ours=True, fla=True),
    Head("logitless sparsified 2^-9", by_patch(logitless_patch(**SPARSIFIED)), ours=True, fla=False),
    Head("logitless sparsified 2^-9", logitless_plain_criterion(**SPARSIFIED), ours=True, fla=True),
    Head("liger", by_patch(liger_patch), fla=False),
    Head("liger", of_function("liger"), fla=True),  # its patch does not know these models
    Head("apple cce", of_function("apple")),  # its patches are for transformers 4.48
    Head("trl", trl),
    Head("fla", fla, fla=True),
    Head("torch.compile", of_function("torch-compile"), by_name=True),
    Head("apple cce_kahan_full_c", of_function("apple-kahan"), by_name=True),
    Head("no head", no_head, by_name=True),
]


def chosen_heads(text: str) -> list[Head]:
    """All, or those whose names are among these, separated by commas; ``stock`` is always there: ratios are to it."""
    names = chosen("--heads", text, dict.fromkeys(head.name for head in HEADS))
    return [head for head in HEADS if head.name in (*names, "stock") or not (names or head.by_name)]
