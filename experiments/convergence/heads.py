"""The heads that are compared: hidden states [N, D], weight [V, D] and targets [N] to a mean loss with gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS = ("exact", "thinned-2^-9", "thinned-2^-11", "cce", "cce_kahan_full_c", "canonical")
CHUNK_BYTES = 4 << 30  # of fp32 logits that the canonical head holds at once


def canonical(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Whole logits, in as few chunks of tokens as memory needs; a chunk's logits are made again for its gradient."""

    def part(rows: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return functional.cross_entropy((rows @ weight.T).float(), ids, reduction="sum")

    rows = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    parts = list(zip(hidden.split(rows), target.split(rows)))
    if len(parts) == 1:
        return part(hidden, weight, target) / len(target)
    sums = [checkpoint(part, x, weight, y, use_reentrant=False) for x, y in parts]
    return torch.stack(sums).sum() / len(target)  # type: ignore[arg-type]


def _logitless(**options: object) -> Head:
    import logitless

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        found: Tensor = logitless.linear_cross_entropy(hidden, weight, target, **options)  # type: ignore[arg-type]
        return found

    return loss


def _apple(impl: str) -> Head:
    from cut_cross_entropy import linear_cross_entropy as cce

    return lambda hidden, weight, target: cce(hidden, weight, target, impl=impl)


def make_head(name: str) -> Head:
    """Raises ImportError where the head's package is missing."""
    if name == "exact":
        return _logitless()
    if name.startswith("thinned-2^-") and name[11:].isdigit():
        return _logitless(gradient="thinned", threshold=2.0 ** -int(name[11:]))
    if name in ("cce", "cce_kahan_full_c", "cce_exact"):
        return _apple(name)
    if name == "canonical":
        return canonical
    raise ValueError(f"--heads: expected names out of {', '.join(HEADS)} (any thinned-2^-K), got {name!r}")
