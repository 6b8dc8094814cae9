"""torchtitan's ``ChunkedLossWrapper`` with the fused head: no logits and no chunks.

    from logitless.compat.torchtitan import FusedHeadLoss
    config.loss = FusedHeadLoss.Config()            # was ChunkedLossWrapper.Config(...)

Written for torchtitan 0.3.0, which is imported here and must be installed. The trainer calls ``set_lm_head``, leaves
the head out of the model's forward, and calls the loss with hidden states. See docs/distributed.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed.spmd_types import spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend

from .. import options as _options
from ..errors import UnsupportedError
from ..functional import linear_cross_entropy
from ._targets import check_as_cross_entropy

__all__ = ["FusedHeadLoss"]


class FusedHeadLoss(ChunkedLossWrapper):  # type: ignore[misc]
    """The sum of cross entropies over this rank's tokens, divided by ``global_valid_tokens``.

    It is computed from hidden states and ``lm_head``. A head that FSDP2 has sharded, alone or in a group with the norm,
    is gathered once as a unit. FSDP reduces the gradients and frees the unit after the backward pass. A head that is
    sharded over a tensor-parallel mesh (a DTensor, backend "partial_dtensor") is computed with a part of the vocabulary
    on each rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):  # type: ignore[misc]
        """Options. ``num_chunks`` is not used, and ``loss_fn`` must be torchtitan's cross entropy.

        Attributes:
            max_workspace_bytes: As in :func:`logitless.linear_cross_entropy`.
            gradient: As there.
            threshold: As there.
            screen: As there.
        """

        max_workspace_bytes: int | str | None = None
        gradient: str = "exact"
        threshold: float = _options.DEFAULT_THRESHOLD
        screen: str = "none"

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        if type(config.loss_fn) is not CrossEntropyLoss.Config:
            raise UnsupportedError(
                "logitless.compat.torchtitan: loss_fn: expected CrossEntropyLoss.Config, got "
                f"{type(config.loss_fn).__qualname__} (it needs logits)"
            )
        self.num_chunks = 1
        self.lm_head: nn.Module | None = None
        self._options: dict[str, Any] = {
            "max_workspace_bytes": config.max_workspace_bytes,
            "gradient": config.gradient,
            "threshold": config.threshold,
            "screen": config.screen,
        }

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Sets the head; raises UnsupportedError unless it is a linear layer."""
        if not isinstance(lm_head, nn.Linear) or type(lm_head).forward is not nn.Linear.forward:
            raise UnsupportedError(
                f"logitless.compat.torchtitan: lm_head: expected a linear layer, got a {type(lm_head).__qualname__}"
            )
        self.lm_head = lm_head

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Any = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the differentiable loss, and no metrics.

        Args:
            pred: Hidden states ``[..., D]``.
            labels: Class indices ``[...]``, int64 or uint8; rows with -100 cost nothing.
            global_valid_tokens: The divisor, or None for none.

        Raises:
            ValueError: The number of labels differs from that of rows, as in F.cross_entropy.
            RuntimeError: Labels have another dtype or too many dimensions, as in F.cross_entropy.
            UnsupportedError: There are other inputs of a loss, or the parallelism is not supported.
        """
        head: Any = self.lm_head
        assert head is not None, "lm_head: expected set_lm_head() before the first call"
        unused = [name for name, value in loss_inputs.items() if value is not None]
        if unused:
            raise UnsupportedError(f"logitless.compat.torchtitan: expected no {', '.join(unused)} (not supported)")
        if get_spmd_backend() == "spmd_types" and spmd_mesh_size("tp") > 1:
            raise UnsupportedError(
                'logitless.compat.torchtitan: the backend "spmd_types" with tensor parallelism: use "partial_dtensor"'
            )
        labels = check_as_cross_entropy("labels", labels, pred.shape[:-1])
        is_unit = hasattr(head, "unshard")
        if is_unit:
            head.unshard()
        loss: Any = linear_cross_entropy(
            _as_weight(pred, head.weight),
            head.weight,
            labels,
            bias=head.bias,
            ignore_index=IGNORE_INDEX,
            reduction="sum" if global_valid_tokens is None else "mean",
            num_items=global_valid_tokens,
            **self._options,
        )
        if is_unit and not (torch.is_grad_enabled() and loss.requires_grad):
            head.reshard()
        return (loss.to_local() if isinstance(loss, DTensor) else loss), {}


def _as_weight(pred: Tensor, weight: Any) -> Tensor:
    """Returns hidden states as a DTensor where the weight is one; all tensor-parallel ranks have the same ones."""
    if not isinstance(weight, DTensor):
        if isinstance(pred, DTensor):
            raise UnsupportedError(
                "logitless.compat.torchtitan: pred: expected a plain tensor (lm_head's weight is one)"
            )
        return pred
    mesh = weight.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    if mesh.ndim != 1 or (isinstance(pred, DTensor) and list(pred.placements) != everywhere):
        raise UnsupportedError(
            "logitless.compat.torchtitan: expected lm_head's weight on a mesh of one dimension and pred the same on "
            f"all its ranks, got a mesh of {mesh.ndim} dimensions and placements {getattr(pred, 'placements', None)}"
        )
    return pred if isinstance(pred, DTensor) else DTensor.from_local(pred, mesh, everywhere, run_check=False)
