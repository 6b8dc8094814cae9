"""The heads of whole training steps: how to put each library's head into a transformers model."""

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

from methods import MIB
from peer_heads import loss_named
from step_models import chosen, last_hidden

BUDGET_MIB = 256
THRESHOLD = 2.0**-9

Loss = Callable[[], Tensor]
Prepare = Callable[[Any, Tensor], Loss]  # model, tokens [B, L] that are also the labels
Patch = Callable[[Any], object]  # model
Function = Callable[[Any, Tensor, Tensor], Tensor]  # model, tokens, labels


@dataclasses.dataclass(frozen=True)
class Head:
    name: str
    prepare: Prepare
    ours: bool = False
    fla: bool | None = None  # for flash-linear-attention's models only, for others only, or for all
    by_name: bool = False  # runs only if named


def changed_by(patch: Callable[[Any], object], model: Any) -> dict[str, Any]:
    """Runs a library's patch of one model, then restores the instance's attributes, such as ``forward``."""
    before = dict(model.__dict__)
    patch(model)
    changes = {name: value for name, value in model.__dict__.items() if before.get(name) is not value}
    for name in changes:
        del model.__dict__[name]
    model.__dict__.update({name: before[name] for name in changes if name in before})
    return changes


def patched(patch: Callable[[Any], object], model: Any, tokens: Tensor, **arguments: Any) -> Loss:
    """Makes the loss of a model that is patched only while its forward runs."""
    changes = changed_by(patch, model)

    def loss() -> Tensor:
        with mock.patch.multiple(model, create=True, **changes):
            value: Tensor = model(input_ids=tokens, labels=tokens, **arguments).loss
            return value

    return loss


def stock(model: Any, tokens: Tensor) -> Loss:
    return lambda: model(input_ids=tokens, labels=tokens).loss


def liger_patch(model: Any) -> None:
    """Applies Liger's patch to the model with everything but the head off."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    options = {name: False for name, p in inspect.signature(apply).parameters.items() if isinstance(p.default, bool)}
    options["fused_linear_cross_entropy"] = True
    apply(**options, model=model)


def by_patch(patch: Patch) -> Prepare:
    return lambda model, tokens: patched(patch, model, tokens)


def by_function(peer: str) -> Function:
    """Makes a head from a method of peer_heads.py, called on the last hidden states. Raises ImportError without its
    package."""
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
    """Returns the head of TRL's trainers."""
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
    """Puts our criterion into a flash-linear-attention model."""
    import logitless.compat.fla

    stock, criterion = fla(model, tokens), logitless.compat.fla.FusedLinearCrossEntropyLoss()

    def loss() -> Tensor:
        with mock.patch.object(model, "criterion", criterion):
            return stock()

    return loss


def logitless_plain_criterion(**options: Any) -> Prepare:
    """Applies our transformers patch to a flash-linear-attention model with PyTorch's own cross entropy."""

    def prepare(model: Any, tokens: Tensor) -> Loss:
        patched_loss = patched(logitless_patch(**options), model, tokens)

        def loss() -> Tensor:
            with mock.patch.object(model.config, "fuse_cross_entropy", False):
                return patched_loss()

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
    """Imports all installed libraries before any time limit: an interrupted import cannot be resumed."""
    for name in MODULES:
        with contextlib.suppress(Exception):  # the head's own row reports the error
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
    """Returns all heads, or those with comma-separated names. ``stock`` is always included, for the ratios."""
    names = chosen("--heads", text, dict.fromkeys(head.name for head in HEADS))
    return [head for head in HEADS if head.name in (*names, "stock") or not (names or head.by_name)]
