"""The heads of prime-rl that return log-probabilities and entropies instead of logits.

Written for prime-rl 0.8.0 (August 2026). Its ``inject_prime_lm_head`` looks the heads up under these names:

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
    """The output of a head of prime-rl; the heads here return only log-probabilities and entropies."""

    logits: Tensor | None
    logprobs: Tensor | None
    entropy: Tensor | None
    loss: Tensor | None


class _Options(Budget, total=False):
    device: torch.device | str | None
    dtype: torch.dtype | str | None


class FusedOutputLinear(nn.Linear):
    """A head without bias, with the state dict of a Linear.

    Args:
        in_features: D.
        out_features: V.
        chunk_size: Accepted and not used.
        device: As in ``torch.nn.Linear``.
        dtype: As in ``torch.nn.Linear``, or its name.
        max_workspace_bytes: As in :func:`logitless.linear_cross_entropy`.
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
        """Returns log-probabilities and entropies of the logits ``hidden_states @ weight.T / temperature``.

        Args:
            hidden_states: ``[B, S, D]``.
            labels: Class indices ``[B, S]``, or as many in another shape, already shifted. Rows with label -100 have 0
                for both results.
            temperature: One for each token, ``[B, S]``, or one for all.
            sampling_mask: Must be None.

        Returns:
            ``{"logprobs", "entropy"}``, each ``[B, S]`` float32.

        Raises:
            AssertionError: Labels or temperature are missing, or there is a sampling mask; as in prime-rl.
            ValueError: ``hidden_states`` have another number of dimensions; as in prime-rl.
            RuntimeError: The number of labels differs from that of tokens; as in prime-rl.
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
        outputs = linear_cross_entropy(
            hidden_states,
            self.weight,
            indices("labels", labels, hidden_states.shape[:-1], RuntimeError, any_shape=True),
            reduction="none",
            softcap=self.softcap,
            temperature=temperature,
            return_stats=("entropy",),
            max_workspace_bytes=self.max_workspace_bytes,
        )
        return PrimeLmOutput(logprobs=-outputs.loss, entropy=outputs.entropy)


class GemmaFusedOutputLinear(FusedOutputLinear):
    """A :class:`FusedOutputLinear` of the logits ``softcap * tanh(hidden_states @ weight.T / softcap) / temperature``.

    Args:
        in_features: D.
        out_features: V.
        chunk_size: Accepted and not used.
        softcap: Bound of the logits, above 0.
        max_workspace_bytes: As in :func:`logitless.linear_cross_entropy`.
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
