"""The stand-in for TRL's chunked log-probabilities, with its signature and returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import _zero3
from ..functional import linear_cross_entropy

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
STATS = {"mean_logits": "mean_logit"}  # outputs that have another name here

Returned = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class StandIn:
    """Fused heads behind ``apply``, the one method of an autograd function that TRL calls."""

    def __init__(self, original: Any, options: dict[str, Any]) -> None:
        self.original = original  # TRL's function, which this object replaces
        self.options = options  # the options of ``patch``


class LogProbs(StandIn):
    def apply(
        self,
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

        Log-probabilities and entropy have a gradient. TRL's logits are ``t(logit_scale * (h . w + b)) / temperature``;
        the fused head adds the bias after the factor. ``chunk_size`` is not used.
        """
        _zero3.gather_again_with_running_module(hidden, weight, bias)
        stats = {name: STATS.get(name, name) for name in OUTPUTS if name in outputs}
        results = linear_cross_entropy(
            hidden,
            weight,
            targets,
            bias=bias if bias is None or logit_scale == 1.0 else bias * logit_scale,
            reduction="none",
            scale=logit_scale,
            softcap=final_logit_softcapping,
            temperature=temperature,
            return_stats=tuple(stats.values()),
            **self.options,
        )
        entropy, *further = (getattr(results, stats[name]) if name in stats else None for name in OUTPUTS)
        return -results.loss, entropy, *(value if value is None else value.detach() for value in further)
