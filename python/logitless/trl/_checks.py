"""What the functions in the place of TRL's refuse."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UnsupportedError


def check_present(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The head's tensors will be there in the backward pass."""
    trained = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    if trained and hasattr(weight, "ds_id"):
        raise UnsupportedError(
            "logitless.trl: the head's weight is partitioned by DeepSpeed ZeRO-3, which takes it away again before the "
            "backward pass; use ZeRO-2, or logitless.trl.unpatch()"
        )
