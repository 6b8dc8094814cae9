"""The stand-in for TRL's chunked divergence, with its signature and returns."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from torch import Tensor

from .. import _zero3
from .._divergence import linear_divergence
from ._step import StandIn, fused_head


class Divergences(StandIn):
    def fused(
        self,
        options: dict[str, Any],
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns divergences of tokens, and entropies of the student's distributions.

        The divergences have gradients for the student's tensors, the entropies have none. As in TRL, the teacher's
        tensors may require grad and get no gradient. TRL's logits are ``t(scale * (h . w + b)) / temperature``; the
        fused heads add the bias after the factor.
        """
        with _gathered(student_weight, student_bias), _gathered(teacher_weight, teacher_bias):
            student_hidden, student_weight, student_bias, student_scale = fused_head(
                student_hidden, student_weight, student_bias, student_logit_scale
            )
            outputs = linear_divergence(
                student_hidden,
                student_weight,
                teacher_hidden.detach(),
                teacher_weight.detach(),
                student_bias=student_bias,
                teacher_bias=None if teacher_bias is None else teacher_bias.detach() * teacher_logit_scale,
                beta=beta,
                temperature=temperature,
                student_scale=student_scale,
                teacher_scale=teacher_logit_scale,
                student_softcap=student_final_logit_softcapping,
                teacher_softcap=teacher_final_logit_softcapping,
                reduction="none",
                return_stats=True,
                max_workspace_bytes=options["max_workspace_bytes"],
            )
        return outputs.loss, outputs.entropy


def _gathered(*tensors: Tensor | None) -> Any:
    """Returns TRL's context for reading tensors that ZeRO-3 partitions, which TRL's own function enters itself."""
    if not any(map(_zero3.is_partitioned, tensors)):
        return contextlib.nullcontext()
    return sys.modules["trl.trainer.utils"].maybe_gather_lm_head_ctx(*tensors)
