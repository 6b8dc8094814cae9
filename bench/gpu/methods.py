"""A method to measure and its passes, and Logitless at each budget."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from clock import MIB
from record import MEAN_PASSES, PASSES

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [N, D], weight [V, D], target [N] -> mean loss
LossAndEntropy = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # of each token


class Refused(Exception):
    """A method does not take a problem."""


@dataclasses.dataclass
class Method:
    name: str
    loss: Loss
    tokens: Loss | None = None  # the loss of each token, [N]
    entropy: LossAndEntropy | None = None
    logits: str = ""  # how it keeps them
    ours: bool = False
    budget_mib: int | None = None
    threshold: float | None = None  # for sparsified gradients
    passes: tuple[str, ...] = MEAN_PASSES
    slow_to_prepare: bool = False  # compiles or tunes kernels for a long time in its first call

    def outputs(self, pass_: str, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        """Returns what a pass differentiates: the mean loss, or losses of the tokens, with ``entropy`` two tensors."""
        if pass_ == "entropy":
            if self.entropy is None:
                raise Refused("it returns no entropy")
            return self.entropy(hidden, weight, target)
        loss = self.tokens if pass_ == "tokens" else self.loss
        if loss is None:
            raise Refused("it returns no loss for each token")
        return (loss(hidden, weight, target),)


def differentiate(outputs: tuple[Tensor, ...], upstream: tuple[Tensor, ...]) -> None:
    """Computes gradients, of a mean without an upstream gradient."""
    given = [gradient.to(output.dtype) for output, gradient in zip(outputs, upstream)]
    torch.autograd.backward(outputs, given or None)


def budget_name(mib: int | None) -> str:
    return "unlimited" if mib is None else "default" if mib == 0 else f"{mib} MiB"


def budget_of(mib: int | None) -> int | str | None:
    """Converts MiB to max_workspace_bytes. None is the fastest plan; 0 is the default of a call without a budget."""
    return "fastest" if mib is None else mib * MIB or None


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Sets environment variables within the block; the library reads them at planning, the package at every call."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def without_recordings() -> contextlib.AbstractContextManager[None]:
    """Disables the recording of repeated runs for plans made within the block."""
    return environment("LOGITLESS_CUDA_GRAPHS", "0")


def our_loss(engine: str = "", **options: Any) -> Loss:
    import logitless

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        result: Tensor = logitless.linear_cross_entropy(hidden, weight, target, **options)
        return result

    def with_engine(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with environment("LOGITLESS_CUDA_ENGINE", engine):
            return loss(hidden, weight, target)

    return with_engine if engine else loss


def our_loss_of_kept_copies(engine: str = "", **options: Any) -> Loss:
    """Returns a loss behind a screen that makes the 8-bit copy of a weight once, and keeps it for further calls."""
    import logitless

    kept: list[Any] = []

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        if not kept or kept[0].weight is not weight:
            kept[:] = [logitless.ScreenedWeight(weight)]
        return our_loss(engine, screen=kept[0], **options)(hidden, weight, target)

    return loss


def our_loss_and_entropy(engine: str = "", **options: Any) -> LossAndEntropy:
    both: Callable[..., Any] = our_loss(engine, reduction="none", return_stats=("entropy",), **options)

    def loss_and_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        result = both(hidden, weight, target)
        return result.loss, result.entropy

    return loss_and_entropy


def our_methods(
    budgets: list[int | None],
    engines: list[str],
    exponents: list[int] | None = None,
    passes: tuple[str, ...] = MEAN_PASSES,
    screened: list[int] | None = None,
    fp8: bool = False,
) -> list[Method]:
    """Returns the loss alone, gradients at every budget, and sparsified gradients at thresholds 2^-exponent.

    The loss has no budget, because it needs almost no workspace. Sparsified gradients are of the mean alone. Those of
    ``screened`` exponents are behind an 8-bit screen, as is their loss. fp8: also the loss and gradients of
    ``compute_dtype="fp8"``, at the first budget.
    """
    methods = []
    for engine in engines:
        name = f"logitless{'/' + engine if engine else ''}"
        fastest = our_loss(engine, max_workspace_bytes="fastest")
        methods.append(Method(f"{name} loss", fastest, ours=True, passes=("loss",)))
        for budget in budgets:
            label, options = budget_name(budget), {"max_workspace_bytes": budget_of(budget)}
            tokens, entropy = our_loss(engine, reduction="none", **options), our_loss_and_entropy(engine, **options)
            method = Method(f"{name} {label}", our_loss(engine, **options), tokens, entropy, ours=True)
            method.budget_mib, method.passes = budget, PASSES[1:]
            methods.append(method)
        if fp8:
            options = {"compute_dtype": "fp8", "max_workspace_bytes": budget_of(budgets[0])}
            methods.append(Method(f"{name} fp8", our_loss(engine, **options), ours=True))
        draws = [(exponent, "none", ("gradients",)) for exponent in exponents or []]
        draws += [(exponent, "fp8", ("loss", "gradients")) for exponent in screened or []]
        for exponent, screen, of in draws:
            label, threshold = f"sparsified 2^-{exponent}{', fp8' if screen != 'none' else ''}", 2.0**-exponent
            loss = our_loss(engine, gradient="sparsified", threshold=threshold, seed=0, screen=screen)
            methods.append(Method(f"{name} {label}", loss, ours=True, threshold=threshold, passes=of))
    return with_passes(methods, passes)


def with_passes(methods: list[Method], passes: tuple[str, ...]) -> list[Method]:
    """Leaves methods those of their passes that are among the given ones."""
    for method in methods:
        method.passes = tuple(pass_ for pass_ in method.passes if pass_ in passes)
    return [method for method in methods if method.passes]


@contextlib.contextmanager
def seen_plan(method: Method) -> Iterator[list[str]]:
    """Collects Logitless's plans within the block for the table; other methods have none."""
    if not method.ours:
        yield []
        return
    from logitless import native

    texts: list[str] = []
    original = native.run

    def run(plan: Any, *args: Any, **kwargs: Any) -> Any:
        info = plan.info
        size = f"{info.workspace_bytes / MIB:.2f} MiB"
        parts = f"{info.token_chunk} tokens and {info.vocab_window} columns at once, {info.cached_columns} kept"
        texts[:] = [f"{info.kind}, {info.cost_matmuls:g} F, {size}, {info.backend} {info.config}, {parts}"]
        return original(plan, *args, **kwargs)

    with mock.patch.object(native, "run", run):
        yield texts
