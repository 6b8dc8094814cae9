"""The stand-in for TRL's chunked log-probabilities, with its signature and returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..functional import linear_cross_entropy
from ._step import StandIn, fused_head

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
STATS = {"mean_logits": "mean_logit"}  # outputs that have another name here

Returned = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class LogProbs(StandIn):
    def fused(
        self,
        options: dict[str, Any],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> Returned:
        """Returns log-probabilities and then each of ``OUTPUTS``, or None for those not requested.

        Log-probabilities and entropy have a gradient. TRL's logits are ``t(logit_scale * (h . w + b)) / temperature``.
        ``chunk_size`` is not used.
        """
        hidden, weight, bias, scale = fused_head(hidden, weight, bias, logit_scale)
        stats = {name: STATS.get(name, name) for name in OUTPUTS if name in outputs}
        results = linear_cross_entropy(
            hidden,
            weight,
            targets,
            bias=bias,
            reduction="none",
            scale=scale,
            softcap=final_logit_softcapping,
            temperature=temperature,
            return_stats=tuple(stats.values()),
            **options,
        )
        entropy, *further = (getattr(results, stats[name]) if name in stats else None for name in OUTPUTS)
        return -results.loss, entropy, *(value if value is None else value.detach() for value in further)
