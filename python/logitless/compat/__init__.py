"""Other libraries' fused heads, computed by Logitless: the signatures and returns stay, a program changes its import.

    from logitless.compat.torch import linear_cross_entropy, LinearCrossEntropyLoss
    from logitless.compat.cut_cross_entropy import linear_cross_entropy, cce_patch
    from logitless.compat.liger_kernel import LigerFusedLinearCrossEntropyLoss
    from logitless.compat.fla import FusedLinearCrossEntropyLoss
    from logitless.compat.quack import LinearCrossEntropy, chunked_linear_cross_entropy
    from logitless.compat.verl import linear_cross_entropy
    from logitless.compat.prime_rl import FusedOutputLinear
    from logitless.compat.openrlhf import log_probs_from_hidden
    from logitless.compat.skyrl import sample_support_scores
    from logitless.compat.veomni import chunk_topk_distill_function
    from logitless.compat.megatron import patch
    from logitless.compat.torchtitan import FusedHeadLoss

None of these libraries is imported here, except torchtitan by the module of its name. docs/pytorch.md,
docs/hugging_face.md and docs/distributed.md say what each argument does. Losses and statistics are float32 (float64
for float64 inputs). Gradients are summed in float32. Arguments that only steer the other library's kernels (chunk
sizes, filters of small gradients, implementations) are accepted and not used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["cut_cross_entropy", "fla", "liger_kernel", "megatron", "openrlhf", "prime_rl", "quack", "skyrl", "torch"]
__all__ += ["veomni", "verl"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'logitless.compat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
