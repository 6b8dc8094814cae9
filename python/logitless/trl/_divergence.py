"""What stands in the place of TRL's chunked divergence: called as it is, with its returns."""

from __future__ import annotations

from torch import Tensor

from .._divergence import linear_divergence
from ._log_probs import StandIn, check_present


class Divergences(StandIn):
    def apply(
        self,
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
        """Divergences of tokens, with a gradient of the student's tensors, and entropies of the student, without.

        TRL's logits are ``t(scale * (h . w + b)) / temperature``; the fused heads add the bias after the factor. The
        teacher's tensors may require grad, and get none, as TRL's.
        """
        check_present(student_hidden, student_weight, student_bias)
        found = linear_divergence(
            student_hidden,
            student_weight,
            teacher_hidden.detach(),
            teacher_weight.detach(),
            student_bias=_scaled(student_bias, student_logit_scale),
            teacher_bias=_scaled(None if teacher_bias is None else teacher_bias.detach(), teacher_logit_scale),
            beta=beta,
            temperature=temperature,
            student_scale=student_logit_scale,
            teacher_scale=teacher_logit_scale,
            student_softcap=student_final_logit_softcapping,
            teacher_softcap=teacher_final_logit_softcapping,
            reduction="none",
            return_stats=True,
            max_workspace_bytes=self.options["max_workspace_bytes"],
        )
        return found.loss, found.entropy


def _scaled(bias: Tensor | None, scale: float) -> Tensor | None:
    return bias if bias is None or scale == 1.0 else bias * scale
