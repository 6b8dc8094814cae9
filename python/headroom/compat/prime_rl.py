"""``FusedOutputLinear`` of prime-rl, whose trainer asks for a temperature of each token.

Written for prime-rl as of August 2026, of which no package was at hand: this is the contract, not run inside of it.

    prime_rl.trainer.models.layers.lm_head.FusedOutputLinear = headroom.compat.prime_rl.FusedOutputLinear
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor, nn

from ..functional import linear_cross_entropy

__all__ = ["FusedOutputLinear", "PrimeLmOutput"]


class PrimeLmOutput(TypedDict, total=False):
    """What a head of prime-rl returns; the fused one has no logits."""

    logits: Tensor | None
    logprobs: Tensor | None
    entropy: Tensor | None


class FusedOutputLinear(nn.Linear):
    """A head without bias, with log-probabilities and entropies in place of logits; its state dict is a Linear's.

    Args:
        in_features: D.
        out_features: V.
        chunk_size: accepted, without meaning here.
        max_workspace_bytes: as in :func:`headroom.linear_cross_entropy`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        chunk_size: int | None = None,
        *,
        max_workspace_bytes: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)
        self.chunk_size = chunk_size
        self.max_workspace_bytes = max_workspace_bytes

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, labels: Tensor | None = None, temperature: Tensor | float | None = None
    ) -> PrimeLmOutput:
        """Of ``hidden_states @ weight.T / temperature``; the entropy has no gradient.

        Args:
            hidden_states: ``[B, S, D]``.
            labels: ``[B, S]``, already shifted.
            temperature: ``[B, S]``, one for each token; or one for all.

        Raises:
            ValueError: without labels or temperature.
        """
        if labels is None or temperature is None:
            missing = "labels" if labels is None else "temperature"
            raise ValueError(f"{missing}: FusedOutputLinear expected one for each token, got None")
        found = linear_cross_entropy(
            hidden_states,
            self.weight,
            labels,
            reduction="none",
            temperature=temperature,
            return_stats=("entropy",),
            differentiable_stats=False,
            max_workspace_bytes=self.max_workspace_bytes,
        )
        return PrimeLmOutput(logprobs=-found.loss, entropy=found.entropy)
