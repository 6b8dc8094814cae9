"""The heads of prime-rl that have log-probabilities and entropies in place of logits.

Written from prime-rl 0.8.0's source (August 2026), whose ``inject_prime_lm_head`` finds its heads under these names:

    from prime_rl.trainer.models.layers import lm_head, lm_head_gemma

    lm_head.FusedOutputLinear = logitless.compat.prime_rl.FusedOutputLinear
    lm_head_gemma.GemmaFusedOutputLinear = logitless.compat.prime_rl.GemmaFusedOutputLinear
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn

from ..functional import linear_cross_entropy
from ..options import Budget, accepts, check_names, names_of, shape_text
from ..run import torch_dtype
from ._targets import indices

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FusedOutputLinear", "GemmaFusedOutputLinear", "PrimeLmOutput"]


class PrimeLmOutput(TypedDict, total=False):
    """What a head of prime-rl returns; these have log-probabilities and entropies only."""

    logits: Tensor | None
    logprobs: Tensor | None
    entropy: Tensor | None
    loss: Tensor | None


class _Options(Budget, total=False):
    device: torch.device | str | None
    dtype: torch.dtype | str | None


class FusedOutputLinear(nn.Linear):
    """A head without bias; its state dict is a Linear's.

    Args:
        in_features: D.
        out_features: V.
        chunk_size: accepted, without meaning here.
        max_workspace_bytes: as in :func:`logitless.linear_cross_entropy`.
    """

    softcap: float | None = None

    @accepts(_Options, device=None, dtype=None)
    def __init__(
        self, in_features: int, out_features: int, chunk_size: int | None = None, **options: Unpack[_Options]
    ) -> None:
        check_names(type(self).__name__, options, names_of(_Options))
        device, dtype = options.get("device"), torch_dtype(options.get("dtype"))
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)
        self.chunk_size = chunk_size
        self.max_workspace_bytes = options.get("max_workspace_bytes")

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        temperature: Tensor | float | None = None,
        sampling_mask: Tensor | None = None,
    ) -> PrimeLmOutput:
        """``{"logprobs", "entropy"}``, each ``[B, S]`` float32, of ``hidden_states @ weight.T / temperature``.

        Args:
            hidden_states: ``[B, S, D]``.
            labels: ``[B, S]`` or as many in another shape, already shifted. Those of -100 have 0 for both.
            temperature: ``[B, S]``, one for each token; or one for all.
            sampling_mask: must be None.

        Raises:
            AssertionError: without labels or temperature, or with a sampling mask; as prime-rl does.
            ValueError: hidden states of other dimensions; RuntimeError: another number of labels. Both as prime-rl.
        """
        name = type(self).__name__
        if labels is None:
            raise AssertionError(f"{name} requires labels, one for each token; got None")
        if temperature is None:
            raise AssertionError(f"{name} requires per-token temperatures: temperature is None")
        if sampling_mask is not None:
            raise AssertionError(f"sampling_mask: {name} expected None, got a tensor of {list(sampling_mask.shape)}")
        if hidden_states.dim() != 3:
            raise ValueError(f"hidden_states: expected shape [B, S, D], got {shape_text(hidden_states.shape)}")
        found = linear_cross_entropy(
            hidden_states,
            self.weight,
            indices("labels", labels, hidden_states.shape[:-1], RuntimeError, any_shape=True),
            reduction="none",
            softcap=self.softcap,
            temperature=temperature,
            return_stats=("entropy",),
            max_workspace_bytes=self.max_workspace_bytes,
        )
        return PrimeLmOutput(logprobs=-found.loss, entropy=found.entropy)


class GemmaFusedOutputLinear(FusedOutputLinear):
    """The same of ``softcap * tanh(hidden_states @ weight.T / softcap) / temperature``.

    Args:
        in_features, out_features, chunk_size, max_workspace_bytes: as in :class:`FusedOutputLinear`.
        softcap: above 0.
    """

    @accepts(_Options, device=None, dtype=None)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        chunk_size: int | None,
        softcap: float,
        **options: Unpack[_Options],
    ) -> None:
        super().__init__(in_features, out_features, chunk_size, **options)
        self.softcap = softcap
