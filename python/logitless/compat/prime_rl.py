"""The heads of prime-rl that return log-probabilities and entropies instead of logits.

Written for prime-rl 0.8.0 (August 2026), and for the sampling masks of its later main branch (pull request 3431). Its
``inject_prime_lm_head`` looks the heads up under these names:

    from prime_rl.trainer.models.layers import lm_head, lm_head_gemma

    lm_head.FusedOutputLinear = logitless.compat.prime_rl.FusedOutputLinear
    lm_head_gemma.GemmaFusedOutputLinear = logitless.compat.prime_rl.GemmaFusedOutputLinear
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from ..candidates import linear_candidates
from ..functional import linear_cross_entropy
from ..options import Budget, accepts, check_names, names_of, shape_text
from ..run import torch_dtype
from ._targets import indices, lists_of_ids

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FusedOutputLinear", "GemmaFusedOutputLinear", "PrimeLmOutput"]


class PrimeLmOutput(TypedDict, total=False):
    """The output of a head of prime-rl; the heads here return no logits and no loss."""

    logits: Tensor | None
    logprobs: Tensor | None
    entropy: Tensor | None
    mask_logprobs: Tensor | None
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

    Attributes:
        return_mask_logprobs: Whether the output has the log-probabilities of all ids of the sampling mask.
    """

    softcap: float | None = None
    return_mask_logprobs = False

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

        A row whose sampling mask has its label is normalized over the mask. Other rows are normalized over the
        vocabulary, and so are all entropies.

        Args:
            hidden_states: ``[B, S, D]``.
            labels: Class indices ``[B, S]``, or as many in another shape, already shifted. Rows with label -100 have 0
                for both results.
            temperature: One for each token, ``[B, S]`` or as many in another shape, or one for all.
            sampling_mask: The ids that sampling kept for each token, ``[B, S, K]``, int32 or int64, filled up with -1.

        Returns:
            ``{"logprobs", "entropy"}``, each ``[B, S]`` float32. With ``return_mask_logprobs`` and a mask also
            ``mask_logprobs``, ``[B, S, K]``: 0 for -1, and in rows that are not normalized over their mask.

        Raises:
            AssertionError: Labels or temperature are missing; as in prime-rl.
            ValueError: ``hidden_states`` have another number of dimensions; as in prime-rl.
            RuntimeError: The number of labels, or of rows of the mask, differs from that of tokens; as in prime-rl.
            TypeError: The mask has another dtype, such as bool.
            InvalidTargetError: An id is out of range on the CPU. On CUDA its row is NaN.
        """
        name = type(self).__name__
        if labels is None:
            raise AssertionError(f"{name} requires labels, one for each token; got None")
        if temperature is None:
            raise AssertionError(f"{name} requires per-token temperatures: temperature is None")
        if hidden_states.dim() != 3:
            raise ValueError(f"hidden_states: expected shape [B, S, D], got {shape_text(hidden_states.shape)}")
        rows = hidden_states.shape[:-1]
        labels = indices("labels", labels, rows, RuntimeError, any_shape=True)
        if isinstance(temperature, Tensor) and temperature.numel() == labels.numel():
            temperature = temperature.reshape(rows)
        options: dict[str, Any] = {"reduction": "none", "softcap": self.softcap, "temperature": temperature}
        options["max_workspace_bytes"] = self.max_workspace_bytes
        outputs = linear_cross_entropy(hidden_states, self.weight, labels, return_stats=("entropy",), **options)
        output = PrimeLmOutput(logprobs=-outputs.loss, entropy=outputs.entropy)
        if sampling_mask is None:
            return output
        kept = lists_of_ids("sampling_mask", sampling_mask, rows, RuntimeError, any_shape=True)
        is_replayed = ((kept == labels[..., None]) & (kept >= 0)).any(-1)
        replayed = linear_candidates(
            hidden_states,
            self.weight,
            kept.masked_fill(~is_replayed[..., None], -1),
            targets=labels.masked_fill(~is_replayed, -100),
            **options,
        )
        assert replayed.target_log_probs is not None
        output["logprobs"] = torch.where(is_replayed, replayed.target_log_probs, -outputs.loss)
        if self.return_mask_logprobs:
            is_id = is_replayed[..., None] & (kept >= 0)
            output["mask_logprobs"] = torch.where(is_id, replayed.log_probs, 0)
        return output


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
