"""The names of other libraries' fused heads, by Headroom: the same signatures and returns, so that a program changes
its import and nothing else.

    from headroom.compat.torch import linear_cross_entropy, LinearCrossEntropyLoss
    from headroom.compat.cut_cross_entropy import linear_cross_entropy, cce_patch
    from headroom.compat.liger_kernel import LigerFusedLinearCrossEntropyLoss
    from headroom.compat.fla import FusedLinearCrossEntropyLoss
    from headroom.compat.quack import LinearCrossEntropy, chunked_linear_cross_entropy
    from headroom.compat.verl import linear_cross_entropy
    from headroom.compat.prime_rl import FusedOutputLinear
    from headroom.compat.openrlhf import log_probs_from_hidden
    from headroom.compat.megatron import patch
    from headroom.compat.torchtitan import FusedHeadLoss

None of these libraries is imported here, but torchtitan by the module of its name. docs/compat.md, docs/trl.md and
docs/parallel_clients.md say what each argument does. In all of them losses and statistics are float32 (float64 of
float64 inputs), gradients are summed in float32, and what only steers the other library's kernels (chunk sizes, filters
of small gradients, implementations) is accepted and not used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["cut_cross_entropy", "fla", "liger_kernel", "megatron", "openrlhf", "prime_rl", "quack", "torch", "verl"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'headroom.compat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
