"""Labels of context parallelism, where ranks have parts of the same sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._collectives import all_gather


def next_labels(labels: Tensor, *, group: Any = None, shift: int = 1, ignore_index: int = -100) -> Tensor:
    """Labels shifted to the left over the ranks of a group, which have consecutive parts of each sequence.

    The last ``shift`` positions get the first labels of the next rank's part, those of the last rank ``ignore_index``.
    One all-gather of ``shift`` labels a row, with no word on whether the ranks agree on shapes.

    Args:
        labels: ``[..., T]``, this rank's part, of at least ``shift`` positions, of one shape on all ranks.
        group: a ``torch.distributed`` process group in the order of the parts; None: the default one.

    Returns:
        ``[..., T]``: what each position predicts, to be used with ``shift=0``.

    Raises:
        ValueError: a part that is shorter than the shift.
    """
    if shift < 0 or labels.dim() < 1 or labels.shape[-1] < shift:
        raise ValueError(f"shift: expected 0 <= shift <= the last size of labels {list(labels.shape)}, got {shift}")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    first = labels[..., :shift].contiguous()
    every = first.new_empty((ranks, *first.shape))
    if first.numel() > 0:
        all_gather(every.view(-1), first.view(-1), group=group)
    following = every[rank + 1] if rank + 1 < ranks else torch.full_like(first, ignore_index)
    return torch.cat((labels[..., shift:], following), dim=-1)
