"""Other libraries' heads, and how each is called.

requirements-peers.txt has their versions, and docs/results.md what they do. A library is imported before any time
limit, as an interrupted import cannot be resumed. One that is missing is noted, and the others go on.

All peers take turns in one process. LIGER_KERNEL_IMPL, which Liger reads when it is imported, only says where
``liger_kernel.ops`` takes its names from: the modules imported here.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from data import IGNORED
from methods import Loss, Method, Refused, our_loss
from record import MEAN_PASSES

Capability = tuple[int, int]
HOPPER, BLACKWELL = (9, 0), (10, 0)
MORE_ROWS = 32  # factor of Liger's chunk
CHUNK = 4096  # rows of QuACK's chunk by default
TORCH_CHUNK = 2048  # rows of PyTorch's function


def capability_of(tensor: Tensor) -> Capability:
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (0, 0)


def require(holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise Refused(f"expected {expected}, got {got}")


def _whole(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden @ weight.T).float()


def _canonical(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(_whole(hidden, weight), target)


def _canonical_tokens(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(_whole(hidden, weight), target, reduction="none")


def _canonical_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(_whole(hidden, weight), dim=1)
    return functional.nll_loss(log_p, target, reduction="none"), -(log_p.exp() * log_p).sum(1)


def _torch_eager() -> list[Method]:
    return [Method("canonical", _canonical, _canonical_tokens, _canonical_entropy, "all, bf16 and float32")]


def _torch_compile() -> list[Method]:
    functions = (torch.compile(f, dynamic=False) for f in (_canonical, _canonical_tokens, _canonical_entropy))
    return [Method("torch.compile", *functions, "all, bf16", slow_to_prepare=True)]


def _torch_fused() -> list[Method]:
    fused = getattr(functional, "linear_cross_entropy", None)
    if fused is None:
        raise ImportError(f"F.linear_cross_entropy needs PyTorch 2.13 or newer, this is {torch.__version__}")
    options: Callable[..., Any] = getattr(torch.nn, "LinearCrossEntropyOptions")

    def make(name: str, logits: str, **given: Any) -> Method:
        return Method(
            name,
            lambda e, c, y: fused(e, c, y, **given),
            lambda e, c, y: fused(e, c, y, reduction="none", **given),
            logits=logits,
        )

    return [
        make("torch fused", "all, bf16"),
        make("torch fused chunked", "a chunk, float32", options=options()),
        make(
            f"torch fused {TORCH_CHUNK} rows",
            f"{TORCH_CHUNK} rows, float32",
            options=options(batch_chunk_size=TORCH_CHUNK),
        ),
    ]


def _apple(*names: str) -> list[Method]:
    """Returns Apple's cut cross entropy under a method's name.

    "Unfiltered" is cce without its filter and with no other change: sums stay in 16 bits.
    """
    from cut_cross_entropy import linear_cross_entropy as cce

    def make(name: str) -> Method:
        given: dict[str, Any] = {"filter_eps": None} if name == "cce unfiltered" else {"impl": name}
        return Method(
            f"apple {name}",
            lambda e, c, y: cce(e, c, y, **given),
            lambda e, c, y: cce(e, c, y, reduction="none", **given),
            logits="all, bf16" if name == "torch_compile" else "none",
            slow_to_prepare=True,
        )

    return [make(name) for name in names]


def _liger() -> list[Method]:
    """Returns the Triton default, with float32 sums of d_weight, and with larger chunks of logits than its default."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as function

    def make(name: str, accumulate: torch.dtype | None = None, chunk: int = 1) -> Method:
        def call(reduction: str) -> Loss:
            # Arguments after target: bias, class weight, ignore_index, z-loss, smoothing, reduction, softcap,
            # return_z_loss, accum_dtype, three more flags, the inner cross entropy's implementation and mode, chunk.
            more = (None, None, IGNORED, 0.0, 0.0, reduction, None, False, accumulate, *[False] * 3, None, None, chunk)
            return lambda e, c, y: function.apply(e, c, y, *more)[0]

        rows = "a chunk, bf16" if chunk == 1 else f"{chunk} times the chunk, bf16"
        return Method(name, call("mean"), call("none"), logits=rows)

    return [make("liger"), make("liger fp32", torch.float32), make("liger larger chunk", chunk=MORE_ROWS)]


def _liger_scaled(name: str, function: Any, logits: str) -> Method:
    """Returns Liger's operator for reinforcement learning: losses and entropies of the tokens."""

    def tokens(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        losses: Tensor = function.apply(hidden, weight, target, 1.0, IGNORED, 1, False)
        return losses

    def entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        losses, entropies = function.apply(hidden, weight, target, 1.0, IGNORED, 1, True)
        return losses, entropies

    def mean(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return tokens(hidden, weight, target).sum() / (target != IGNORED).sum().clamp_min(1)

    return Method(name, mean, tokens, entropy, logits, slow_to_prepare=True)


def _liger_cutedsl() -> list[Method]:
    """Returns the CuTe DSL functions of the device: LIGER_KERNEL_IMPL=cutedsl chooses that of Blackwell alone."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as sm100
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction as scaled

    def mean(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        capability = capability_of(hidden)
        require(capability in (HOPPER, BLACKWELL), "compute capability 9.0 or 10.0", capability)
        if capability == HOPPER:
            return liger_fused_linear_cross_entropy_sm90(hidden, weight, target)
        return sm100.apply(hidden, weight, target)[0]

    return [
        Method("liger cutedsl", mean, logits="all on 9.0, a chunk on 10.0; bf16", slow_to_prepare=True),
        _liger_scaled("liger scaled", scaled, "loss: none; gradients: dz of 1024 rows, bf16"),
    ]


def _liger_cutile() -> list[Method]:
    """Returns the functions of LIGER_KERNEL_IMPL=cutile."""
    from liger_kernel.ops.cutile.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as function
    from liger_kernel.ops.cutile.ops.fused_linear_scaled_cross_entropy import (
        LigerFusedLinearScaledCrossEntropyFunction as scaled,
    )

    def mean(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        require(capability_of(hidden) == HOPPER, "compute capability 9.0", capability_of(hidden))
        return function.apply(hidden, weight, target)[0]

    return [
        Method("liger cutile", mean, logits="all, bf16", slow_to_prepare=True),
        _liger_scaled("liger cutile scaled", scaled, "a chunk of 256 MiB, bf16"),
    ]


def _fla() -> list[Method]:
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss as fla

    return [Method("fla", lambda e, c, y: fla(e, y, c), logits="a chunk, bf16", slow_to_prepare=True)]


def without_init(*names: str) -> None:
    """Makes packages importable without running their ``__init__``."""
    for name in names:
        if name not in sys.modules:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.submodule_search_locations is None:
                raise ModuleNotFoundError(f"No module named {name!r}")
            module = types.ModuleType(name)
            module.__path__ = list(spec.submodule_search_locations)
            sys.modules[name] = module


def _verl() -> list[Method]:
    """Returns verl's kernel, which keeps dz of some columns by default, and its way that keeps all.

    verl's ``__init__`` wants Ray and more; the kernel needs none of it.
    """
    without_init("verl", "verl.utils")
    from verl.utils.kernel import kernels
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy as verl

    def make(name: str, way: int, logits: str) -> Method:
        def entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            # It is a setting of the module, and each method sets its own.
            kernels.set_backward_method(way)
            log_p, entropies = verl(hidden, weight, target, 1.0, "none")
            return -log_p, entropies

        def tokens(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return entropy(hidden, weight, target)[0]

        return Method(name, lambda *inputs: tokens(*inputs).mean(), tokens, entropy, logits, slow_to_prepare=True)

    return [
        make("verl", kernels.BackwardEnum._Split_Dlogits_N, "loss: none; gradients: dz of some columns, bf16"),
        make("verl whole dz", kernels.BackwardEnum._Total_Separate, "loss: none; gradients: all dz, bf16"),
    ]


def _trl() -> list[Method]:
    """Returns TRL's function as its ``add_fused_lm_head`` calls it."""
    from trl.kernels import ChunkedLogProbFunction as function
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as columns

    def of_valid(outputs: tuple[str, ...]) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
        def call(hidden: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
            mask = target != IGNORED
            results = function.apply(hidden[mask], weight, None, target[mask], 1.0, columns, None, 1.0, outputs)
            return [x.new_zeros(mask.shape).masked_scatter(mask, x) for x in results[: len(outputs)]]

        return call

    log_probs, both = of_valid(("log_probs",)), of_valid(("log_probs", "entropy"))

    def tokens(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return -log_probs(hidden, weight, target)[0]

    def mean(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return tokens(hidden, weight, target).sum() / (target != IGNORED).sum().clamp(min=1)

    def entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_p, entropies = both(hidden, weight, target)
        return -log_p, entropies

    return [Method("trl", mean, tokens, entropy, f"4096 rows of {columns} columns, bf16")]


def _megatron() -> list[Method]:
    from megatron.core.fusions.fused_linear_cross_entropy import linear_cross_entropy as megatron

    def make(reduction: str) -> Loss:
        def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            require(capability_of(hidden)[0] == 10, "compute capability 10", capability_of(hidden))
            return megatron(hidden, weight, target, reduction=reduction)

        return loss

    return [Method("megatron", make("mean"), make("none"), logits="none", slow_to_prepare=True)]


def _quack() -> list[Method]:
    """Returns QuACK with its tuner and without, its scaled-exp pipeline, and both with one chunk of all rows."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy as quack
    from quack.linear_cross_entropy import scaled_exp_lce_supported as supported

    def make(name: str, scaled_exp: bool = False, tuned: bool = True, one_chunk: bool = False) -> Method:
        def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            padded = 128 * math.ceil(len(hidden) / 128)
            sizes, choices = (len(hidden), *weight.shape), (padded,) if one_chunk else (CHUNK, CHUNK // 2)
            rows = choices[0]
            if scaled_exp:
                # QuACK 0.6.5 cannot tell the rows of a chunk from columns if there are D of them.
                usable = [rows for rows in choices if sizes[2] not in (min(rows, padded), padded % rows)]
                require(bool(usable), "a chunk of other than D rows", rows)
                rows = usable[0]
                eligible = supported(hidden, weight, rows, "mean")
                require(eligible, "compute capability 9.0, bf16, V a multiple of 128 and D of 8", sizes)
            else:  # its module checks this, the function only N
                require(not any(size % 8 for size in sizes), "N, V and D that are multiples of 8", sizes)
            return quack(hidden, weight, target, chunk_size=rows, use_scaled_exp=scaled_exp, tuned=tuned)

        kept = "exp logits" if scaled_exp else "logits"
        chunk = "all" if one_chunk else f"{CHUNK // 2} or {CHUNK}" if scaled_exp else CHUNK
        return Method(name, loss, logits=f"{kept} of {chunk} rows, bf16", slow_to_prepare=True)

    return [
        make("quack scaled-exp", scaled_exp=True),
        make("quack scaled-exp, one chunk", scaled_exp=True, one_chunk=True),
        make("quack untuned", tuned=False),
        make("quack untuned, one chunk", tuned=False, one_chunk=True),
        make("quack"),
        make("quack, one chunk", one_chunk=True),
    ]


PEERS: dict[str, Callable[[], list[Method]]] = {
    "canonical": _torch_eager,
    "torch-fused": _torch_fused,
    "liger": _liger,
    "trl": _trl,
    "apple": lambda: _apple("cce", "cce_exact", "torch_compile"),
    "verl": _verl,
    "fla": _fla,
    "torch-compile": _torch_compile,
    "megatron": _megatron,
    "liger-cutedsl": _liger_cutedsl,
    "liger-cutile": _liger_cutile,
    "quack": _quack,
}
# These run only if named.
MORE_PEERS: dict[str, Callable[[], list[Method]]] = {
    "apple-exact": lambda: _apple("cce_exact"),
    "apple-kahan": lambda: _apple("cce_kahan_full_c"),
    "apple-unfiltered": lambda: _apple("cce unfiltered"),
}


def peer_methods(which: str, passes: tuple[str, ...] = MEAN_PASSES) -> tuple[list[Method], list[str]]:
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
    for method in methods:
        method.passes = passes
    return methods, missing


def loss_named(name: str) -> Loss:
    """Returns exact, sparsified-2^-K, the same behind an 8-bit screen (screened-2^-K), or a peer's first method.

    Raises ImportError if a peer's package is missing.
    """
    if name == "exact":
        return our_loss()
    if match := re.fullmatch(r"(sparsified|screened)-2\^-(\d+)", name):
        screen = "fp8" if match[1] == "screened" else "none"
        return our_loss(gradient="sparsified", threshold=2.0 ** -int(match[2]), screen=screen)
    known = PEERS | MORE_PEERS
    if name not in known:
        expected = f"exact, sparsified-2^-K, screened-2^-K or names out of {', '.join(known)}"
        raise ValueError(f"--heads: expected {expected}; got {name!r}")
    return known[name]()[0].loss
