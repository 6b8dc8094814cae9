"""The methods to measure: Logitless at each budget, and every other library that can be imported."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as functional
from torch import Tensor

from clock import MIB

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [N, D], weight [V, D], target [N] -> mean loss


@dataclasses.dataclass
class Method:
    name: str
    loss: Loss
    ours: bool = False
    budget_mib: int | None = None
    threshold: float | None = None  # for sparsified gradients
    passes: tuple[str, ...] = ("loss", "gradients")
    slow_to_prepare: bool = False  # compiles or tunes kernels for a long time in its first call


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


def our_methods(budgets: list[int | None], engines: list[str], exponents: list[int] | None = None) -> list[Method]:
    """Returns the loss alone, gradients at every budget, and sparsified gradients at thresholds 2^-exponent.

    The loss has no budget, because it needs almost no workspace.
    """
    methods = []
    for engine in engines:
        name = f"logitless{'/' + engine if engine else ''}"
        fastest = our_loss(engine, max_workspace_bytes="fastest")
        methods.append(Method(f"{name} loss", fastest, ours=True, passes=("loss",)))
        for budget in budgets:
            loss, label = our_loss(engine, max_workspace_bytes=budget_of(budget)), budget_name(budget)
            methods.append(Method(f"{name} {label}", loss, ours=True, budget_mib=budget, passes=("gradients",)))
        for exponent in exponents or []:
            loss = our_loss(engine, gradient="sparsified", threshold=2.0**-exponent, seed=0)
            label, threshold = f"sparsified 2^-{exponent}", 2.0**-exponent
            methods.append(Method(f"{name} {label}", loss, ours=True, threshold=threshold, passes=("gradients",)))
    return methods


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


def _canonical(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy((hidden @ weight.T).float(), target)


def _torch_compile() -> list[Method]:
    return [Method("torch.compile", torch.compile(_canonical, dynamic=False), slow_to_prepare=True)]


def _torch_fused() -> list[Method]:
    fused = getattr(functional, "linear_cross_entropy")
    methods = [Method("torch fused", lambda e, c, y: fused(e, c, y))]
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is not None:
        methods.append(Method("torch fused chunked", lambda e, c, y: fused(e, c, y, options=options())))
    return methods


def _apple(*names: str) -> list[Method]:
    """Returns Apple's cut cross entropy under a method's name.

    "Unfiltered" is cce without its filter and with no other change: sums stay in 16 bits.
    """
    from cut_cross_entropy import linear_cross_entropy as cce

    def make(name: str) -> Loss:
        options = {"filter_eps": None} if name == "cce unfiltered" else {"impl": name}
        return lambda e, c, y: cce(e, c, y, **options)

    return [Method(f"apple {name}", make(name), slow_to_prepare=True) for name in names]


def _liger() -> list[Method]:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as function

    def make(accumulate: torch.dtype | None) -> Loss:
        # arguments after target: bias, class weight, ignore_index, z-loss, smoothing, reduction, softcap, return_z_loss
        return lambda e, c, y: function.apply(e, c, y, None, None, -100, 0.0, 0.0, "mean", None, False, accumulate)[0]

    return [Method("liger", make(None)), Method("liger fp32", make(torch.float32))]


def _fla() -> list[Method]:
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss as fla

    return [Method("fla", lambda e, c, y: fla(e, y, c), slow_to_prepare=True)]


def _verl() -> list[Method]:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy as verl

    return [Method("verl", lambda e, c, y: -verl(e, c, y, 1.0, "none")[0].mean(), slow_to_prepare=True)]


def _quack() -> list[Method]:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy as quack

    def make(scaled_exp: bool, tuned: bool) -> Loss:
        return lambda e, c, y: quack(e, c, y, use_scaled_exp=scaled_exp, tuned=tuned)

    return [
        Method("quack scaled-exp", make(True, True), slow_to_prepare=True),
        Method("quack untuned", make(False, False), slow_to_prepare=True),
        Method("quack", make(False, True), slow_to_prepare=True),
    ]


PEERS: dict[str, Callable[[], list[Method]]] = {
    "canonical": lambda: [Method("canonical", _canonical)],
    "torch-fused": _torch_fused,
    "liger": _liger,
    "apple": lambda: _apple("cce", "cce_exact"),
    "verl": _verl,
    "fla": _fla,
    "torch-compile": _torch_compile,
    "quack": _quack,
}
# These run only if named.
MORE_PEERS: dict[str, Callable[[], list[Method]]] = {
    "apple-exact": lambda: _apple("cce_exact"),
    "apple-kahan": lambda: _apple("cce_kahan_full_c"),
    "apple-unfiltered": lambda: _apple("cce unfiltered"),
}


def peer_methods(which: str) -> tuple[list[Method], list[str]]:
    """Returns the methods of ``auto`` (all of PEERS), ``none`` or names, and why others are missing."""
    known = PEERS | MORE_PEERS
    names = list(PEERS) if which == "auto" else [] if which == "none" else which.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--peers: expected auto, none or names out of {', '.join(known)}; got {unknown[0]!r}")
    methods: list[Method] = []
    missing = []
    for name in names:
        try:
            methods += known[name]()
        except Exception as error:  # it may be missing, or its import may fail in any way
            missing.append(f"peer {name} is not available: {type(error).__name__}: {str(error)[:200]}")
    return methods, missing


def loss_named(name: str) -> Loss:
    """Returns exact, sparsified-2^-K, or a peer's first method. Raises ImportError if its package is missing."""
    if name == "exact":
        return our_loss()
    exponent = name.removeprefix("sparsified-2^-")
    if exponent != name and exponent.isdecimal():
        return our_loss(gradient="sparsified", threshold=2.0 ** -int(exponent))
    known = PEERS | MORE_PEERS
    if name not in known:
        raise ValueError(f"--heads: expected exact, sparsified-2^-K or names out of {', '.join(known)}; got {name!r}")
    return known[name]()[0].loss
