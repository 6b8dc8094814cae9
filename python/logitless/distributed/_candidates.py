"""``logitless.distributed.linear_candidates``: lists of ids for a head whose rows are spread over the ranks of a group.

Each id is a column of one rank, which makes its logit; the others add 0. So the sum over ranks rounds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..autograd import for_each, refuse_double_backward
from ..candidates import (
    CandidateOptions,
    Given,
    LinearCandidatesOutput,
    accepts_candidates,
    checked,
    of_vocabulary,
    wrong_ids,
)
from ..candidates import linear_candidates as of_one_rank
from ..options import LOGIT_NUMBERS
from . import _agreement
from . import group as _group

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _sum_over_ranks(part: Tensor, group: Any) -> Tensor:
    whole = part.contiguous().clone()
    dist.all_reduce(whole, group=group)
    return whole


class _SumOfLogits(torch.autograd.Function):
    """Adds up the ranks' logits; each rank's part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        return _sum_over_ranks(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_double_backward("linear_candidates")
        return grad, None


def _with_sum_of_gradients(shared: Tensor, group: Any) -> Tensor:
    """Returns a tensor that all ranks have, whose gradient is then the sum over ranks."""
    own = shared.view_as(shared)

    def summed(grad: Tensor) -> Tensor:
        return for_each(lambda given: {"sum": _sum_over_ranks(given["grad"], group)}, {"grad": grad})["sum"]

    if own.requires_grad:
        own.register_hook(summed)  # type: ignore[no-untyped-call]
    return own


@torch.compiler.disable  # type: ignore[untyped-decorator]
@accepts_candidates
def linear_candidates(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None = None,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_total: int | None = None,
    **options: Unpack[CandidateOptions],
) -> LinearCandidatesOutput:
    """Computes :func:`logitless.linear_candidates` for a head whose rows are spread over the ranks of a group.

    Every rank of the group must call it at the same time with the same options. It gets all results, with the same
    bits. The gradient of ``hidden`` is the sum over ranks, on every rank. Gradients of ``weight`` and ``bias`` are
    those of the rank's own rows. The upstream gradients must be the same on every rank.

    Arguments not listed here are those of :func:`logitless.linear_candidates`.

    Args:
        hidden: Hidden states, ``[..., D]``, the same on every rank.
        weight: This rank's rows of the head's weight, ``[V_r, D]``, of any number, including 0.
        ids: Ids of the whole vocabulary, the same on every rank.
        offsets: The same on every rank.
        group: As in :func:`logitless.distributed.linear_cross_entropy`.
        vocab_start: As in :func:`logitless.distributed.linear_cross_entropy`.
        vocab_total: As in :func:`logitless.distributed.linear_cross_entropy`.
        bias: The shard's bias, ``[V_r]``.

    Raises:
        InvalidArgumentError: Ranks differ, by the name of the argument, or shards do not make up a vocabulary.
        TypeError, ValueError, BudgetTooSmallError: As in :func:`logitless.linear_candidates`.
    """
    group = _group.checked_group(group)
    if _group.is_whole_head(group, weight, vocab_start, vocab_total):
        return of_one_rank(hidden, weight, ids, offsets, **options)
    with _group.refused_for_all(group):
        given = checked("linear_candidates", hidden, weight, ids, offsets, options, least_vocab=0)
        start, total = (
            _group._classes(name, value) for name, value in (("vocab_start", vocab_start), ("vocab_total", vocab_total))
        )
        given.check_budget()  # which shards of other sizes may exceed
    shard = _agreed(group, given, start, total)
    is_wrong = wrong_ids(ids, shard.total, given.o["ignore_id"])
    is_none, own = ids == given.o["ignore_id"], ids - shard.start
    is_here = ~is_none & (own >= 0) & (own < weight.shape[0])
    local = given._replace(
        hidden=_with_sum_of_gradients(hidden, group),
        learned={name: _with_sum_of_gradients(number, group) for name, number in given.learned.items()},
        ids=torch.where(is_here, own, -1),
        o=given.o | {"ignore_id": -1},
    )
    part = local.logits() if weight.shape[0] > 0 else _no_logits(local)
    z: Tensor = _SumOfLogits.apply(part.masked_fill(~is_here, 0), group)  # type: ignore[no-untyped-call]
    z = z.masked_fill(is_none, -torch.inf).masked_fill(is_wrong, torch.nan)
    places = {"group": group, "vocab_start": vocab_start, "vocab_total": vocab_total}
    return given.output(z, lambda g: of_vocabulary(g, _group.linear_cross_entropy, **places))


def _no_logits(given: Given) -> Tensor:
    """Returns the logits of a rank without rows: zeros, through which its tensors take part in the backward pass."""
    hidden, bias = given.hidden, given.o["bias"]
    never = torch.zeros((), dtype=torch.bool, device=hidden.device)
    nothing = torch.where(never, hidden.sum(), given.weight.sum())  # a NaN of a hidden state stays out
    if bias is not None:
        nothing = nothing + bias.sum()
    for number in given.learned.values():
        nothing = nothing + torch.where(never, number, 0)
    return nothing.to(given.stats) + hidden.new_zeros(given.shape, dtype=given.stats)


def _text(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _agreed(group: Any, given: Given, start: int, total: int) -> _agreement.Shard:
    """Compares the calls of all ranks. Returns the place of this rank's rows."""
    o, weight = given.o, given.weight
    tensors = ("targets", "log_weights")
    fields = {
        "device": given.hidden.device.type,
        "function": "linear_candidates",
        "hidden": _text(given.hidden),
        "weight": f"{weight.dtype} [*, {weight.shape[1]}]",
        "ids": _text(given.ids),
        "offsets": _text(given.offsets),
        "bias": None if o["bias"] is None else str(o["bias"].dtype),
        **{name: _text(o[name]) for name in tensors},
        "hidden requires grad": torch.is_grad_enabled() and given.hidden.requires_grad,
        **{
            f"{name} requires grad": torch.is_grad_enabled() and name in given.learned
            for name in ("scale", "temperature")
        },
        "temperature for each row": given.row_temperature is not None,
        **{name: o[name] for name in o if name in CandidateOptions.__annotations__ and _is_plain(o[name])},
        **dict(zip(LOGIT_NUMBERS, given.numbers)),
        "seed": None,
        "vocab_start given": start >= 0,
        "vocab_total": None if total < 0 else total,
    }
    own = _agreement.RankInfo(weight.shape[0], start, 0, 0)
    agreed = _agreement.agree(group, fields, own, given.ids, "ids", 0)
    if agreed.new is not None:
        _agreement.keep(group, agreed)
    return agreed.shard


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
