"""Logitless: the loss of a language model's head and its gradients, without the logits.

These need PyTorch 2.6 or newer: ``logitless.linear_cross_entropy``, ``logitless.LinearCrossEntropyLoss``,
``logitless.multi_head_linear_cross_entropy``, ``logitless.info_nce``, ``logitless.linear_candidates``,
``logitless.linear_divergence``, ``logitless.linear_log_probs``, ``logitless.linear_top_k``, ``logitless.sample``,
``logitless.nn.FusedHead``, ``logitless.transformers.patch``, ``logitless.trl.patch`` and the modules
``logitless.candidates`` and ``logitless.compat``. ``logitless.jax`` needs jax, and ``logitless.numpy`` numpy.
``logitless.plan``, ``logitless.backends`` and ``logitless.tune`` need none of these.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

from .errors import (
    BackendUnavailableError,
    BudgetTooSmallError,
    CommunicationError,
    InternalError,
    InvalidArgumentError,
    InvalidTargetError,
    LibraryNotFoundError,
    LogitlessError,
    OutOfMemoryError,
    UnsupportedError,
)
from .inspection import Backend, backends, plan, plans, version, warn_without_cuda
from .native import PlanInfo
from .tuning import tune

if TYPE_CHECKING:
    from . import candidates, compat, distributed, layers, nn, numpy, transformers, trl
    from . import jax as jax  # not in __all__: an import of all names must not need it beside PyTorch
    from ._divergence import LinearDivergenceOutput, linear_divergence
    from .candidates import LinearCandidatesOutput, linear_candidates
    from .functional import check_targets, linear_cross_entropy, linear_log_probs, linear_top_k, warm_up
    from .multi_head import MultiHeadOutput, multi_head_linear_cross_entropy
    from .nn import LinearCrossEntropyLoss
    from .outputs import LinearCrossEntropyOutput, LinearTopK
    from .quantized import QuantizedWeight
    from .retrieval import info_nce
    from .sampling import KeptIds, SampleOutput, sample
    from .screened import ScreenedWeight

    __version__: str

__all__ = [
    "Backend",
    "BackendUnavailableError",
    "BudgetTooSmallError",
    "CommunicationError",
    "LogitlessError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidTargetError",
    "KeptIds",
    "LibraryNotFoundError",
    "LinearCandidatesOutput",
    "LinearCrossEntropyLoss",
    "LinearCrossEntropyOutput",
    "LinearDivergenceOutput",
    "LinearTopK",
    "MultiHeadOutput",
    "OutOfMemoryError",
    "PlanInfo",
    "QuantizedWeight",
    "SampleOutput",
    "ScreenedWeight",
    "UnsupportedError",
    "backends",
    "candidates",
    "check_targets",
    "compat",
    "distributed",
    "info_nce",
    "layers",
    "linear_candidates",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "linear_top_k",
    "multi_head_linear_cross_entropy",
    "nn",
    "numpy",
    "plan",
    "plans",
    "sample",
    "transformers",
    "trl",
    "tune",
    "version",
    "warm_up",
]

_TORCH = {
    "LinearCandidatesOutput": "candidates",
    "KeptIds": "sampling",
    "SampleOutput": "sampling",
    "check_targets": "functional",
    "info_nce": "retrieval",
    "linear_candidates": "candidates",
    "linear_cross_entropy": "functional",
    "LinearCrossEntropyOutput": "outputs",
    "LinearCrossEntropyLoss": "nn",
    "LinearDivergenceOutput": "_divergence",
    "LinearTopK": "outputs",
    "MultiHeadOutput": "multi_head",
    "QuantizedWeight": "quantized",
    "ScreenedWeight": "screened",
    "linear_divergence": "_divergence",
    "linear_log_probs": "functional",
    "linear_top_k": "functional",
    "multi_head_linear_cross_entropy": "multi_head",
    "sample": "sampling",
    "warm_up": "functional",
}


def __getattr__(name: str) -> Any:
    """Imports PyTorch, numpy, or the native library, which knows the version, at the first use that needs it."""
    if name == "__version__":
        return version()
    if name in ("candidates", "compat", "distributed", "jax", "layers", "nn", "numpy", "transformers", "trl"):
        return importlib.import_module(f".{name}", __name__)
    if name not in _TORCH:
        raise AttributeError(f"module 'logitless' has no attribute {name!r}")
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"logitless.{name} needs PyTorch 2.6 or newer, which is not installed; "
            "logitless.numpy.linear_cross_entropy works without it"
        ) from error
    value = getattr(importlib.import_module(f".{_TORCH[name]}", __name__), name)
    globals()[name] = value
    return value


warn_without_cuda()

# FlopCounterMode copies the registered formulas when it begins, so the operators are registered now if PyTorch is
# imported. An error is reported where they are used.
if "torch" in sys.modules:
    with contextlib.suppress(Exception):
        importlib.import_module(".autograd", __name__)
        importlib.import_module("._divergence", __name__)
        importlib.import_module(".candidates", __name__)
        importlib.import_module(".multi_head", __name__)
        importlib.import_module(".sampling", __name__)


def __dir__() -> list[str]:
    return sorted(__all__)
