"""``logitless.distributed.info_nce``: pairs that are spread over the ranks of a group.

Only the rows of ``a`` travel. A rank has the similarities of all rows of ``a`` to its own rows of ``b``: a shard of the
vocabulary of one direction, and whole rows of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..autograd import for_each, refuse_double_backward
from ..call import Arguments, Number, check_numbers
from ..errors import InvalidArgumentError, UnsupportedError
from ..functional import linear_cross_entropy
from ..options import DEFAULTS, InfoNCEOptions, accepts
from ..outputs import loss_of
from ..retrieval import checked
from ..retrieval import info_nce as of_one_rank
from ..run import stats_dtype
from . import _agreement
from . import group as _group
from ._channel import channel_of, reduce_scatter
from ._passes import gathered

if TYPE_CHECKING:
    from typing_extensions import Unpack


@torch.compiler.disable  # type: ignore[untyped-decorator]
@accepts(InfoNCEOptions)
def info_nce(
    a: Tensor,
    b: Tensor,
    temperature: Number = 1.0,
    *,
    symmetric: bool = False,
    targets: Tensor | None = None,
    group: Any = None,
    **options: Unpack[InfoNCEOptions],
) -> Tensor:
    """Computes :func:`logitless.info_nce` over the pairs of all ranks of a group, without gathering similarities.

    Every rank of the group must call it at the same time with the same options, and run the backward pass. It gets the
    loss of all pairs, with the same bits. The rows of ``a`` are gathered once, and their gradient is reduce-scattered
    once, for one direction and for both.

    **Gradients are this rank's parts.** Those of ``a``, ``b`` and ``bias`` are of its own rows. Those of
    ``temperature`` and ``scale`` add up over the ranks, as the gradients of encoders do. DDP and FSDP average gradients
    over ranks, so multiply the loss by the number of ranks before ``backward()`` there.

    Arguments not listed here are those of :func:`logitless.info_nce`.

    Args:
        a: This rank's rows, ``[N_r, D]``, of any number, including 0.
        b: This rank's rows, ``[M_r, D]``, of any number from N_r on. With ``targets`` any number will do.
        temperature: A number, or a tensor of one element, the same on every rank.
        symmetric: As in :func:`logitless.info_nce`, only without ``targets``.
        targets: Rows of all ranks' ``b``, one rank after another, ``[N_r]``.
        group: A ``torch.distributed`` process group. None means the default one.
        bias: Of this rank's rows of ``b``, ``[M_r]``.
        reduction: ``"mean"`` or ``"sum"`` over the pairs of all ranks.
        token_weight: Weights of this rank's pairs, ``[N_r]``.

    The gathered rows of ``a`` and a gradient of theirs for each direction, ``[N, D]``, come beside the budget.

    Raises:
        InvalidArgumentError: Ranks differ, by the name of the argument, or no rank has rows.
        UnsupportedError: ``reduction`` is ``"none"``, ``symmetric`` comes with ``targets``, or there is a screen.
        CommunicationError: A collective failed.
        TypeError, ValueError, BudgetTooSmallError: As in :func:`logitless.info_nce`.
    """
    group = _group.checked_group(group)
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return of_one_rank(a, b, temperature, symmetric=symmetric, targets=targets, **options)
    with _group.refused_for_all(group):
        given = checked(a, b, temperature, symmetric, targets, options, in_group=True)
        reduction, weights = given.get("reduction", DEFAULTS["reduction"]), given.pop("token_weight", None)
        if reduction == "none":
            raise UnsupportedError('reduction: expected "mean" or "sum" in a group of ranks, got "none"')
        if symmetric and targets is not None:
            raise UnsupportedError("targets: expected None with symmetric in a group of ranks, got a tensor")
        if weights is not None:
            check_numbers("token_weight", weights, (a.shape[0],), "one for each row of a", "it has no gradient")
    _agree(group, a, b, symmetric=symmetric, targets=targets is not None, token_weight=weights is not None)
    sizes, sizes_of_b = zip(*channel_of(group).numbers([a.shape[0], b.shape[0]]))
    for name, counts in (("a", sizes), ("b", sizes_of_b)):
        if sum(counts) == 0:
            raise InvalidArgumentError(f"{name}: expected rows on one rank of the group at least, got none on all")

    every: Tensor = _RowsOfAll.apply(a, group, sizes)  # type: ignore[no-untyped-call]
    if targets is None:
        starts = accumulate(sizes_of_b, initial=0)
        of_ranks = [torch.arange(start, start + count, device=a.device) for start, count in zip(starts, sizes)]
        targets = torch.cat(of_ranks)
    else:
        targets = _of_all(targets.long(), sizes, group)
    if weights is not None:
        weights = _of_all(weights.to(stats_dtype(a)), sizes, group)
    given |= {"temperature": temperature, "token_weight": weights}
    with _group.refused_for_all(group):
        back = _own_pairs(b, every, sizes, dist.get_rank(group), given) if symmetric else None
        shard = Arguments(every, b, targets, **given)
        prepared, rows = _group._prepared(shard, "linear_cross_entropy", group, None, None, False, adds_up=False)
    loss: Any = loss_of(prepared, rows)
    made: Tensor = loss
    if back is None:
        return made
    whole: Tensor = _SumOfRanks.apply(back, group)  # type: ignore[no-untyped-call]
    if reduction == "mean":
        whole = whole / (sum(sizes) if weights is None else weights.sum())
    return (made + whole) / 2


def _agree(group: Any, a: Tensor, b: Tensor, **fields: Any) -> None:
    """Compares what decides the collectives before the loss, which compares the rest."""
    fields = {
        "device": a.device.type,
        "function": "info_nce",
        "a": f"{a.dtype} [*, {a.shape[1]}]",
        "b": f"{b.dtype} [*, {b.shape[1]}]",
        **fields,
        "seed": None,
        "vocab_total": None,
    }
    agreed = _agreement.agree(group, fields, _agreement.RankInfo(1, -1, 0, 0), None, "targets", 0)
    if agreed.new is not None:
        _agreement.keep(group, agreed)


def _own_pairs(b: Tensor, every: Tensor, sizes: Sequence[int], rank: int, given: dict[str, Any]) -> Tensor:
    """Returns the sum over this rank's pairs of the loss of b's row among all rows of a."""
    start, count = sum(sizes[:rank]), sizes[rank]
    weights, targets = given["token_weight"], torch.arange(start, start + count, device=b.device)
    own = {"token_weight": None if weights is None else weights[start : start + count], "reduction": "sum"}
    loss: Any = linear_cross_entropy(b[:count], every, targets, **given | own)
    made: Tensor = loss
    return made


def _of_all(part: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """Returns the rows of all ranks, which travel with as many rows a rank as the largest part has."""
    most = max(sizes)
    every = gathered(group, len(sizes), _padded(part, most))
    if min(sizes) == most:
        return every
    return torch.cat([rows[:count] for rows, count in zip(every.split(most), sizes)])  # type: ignore[no-untyped-call]


def _padded(part: Tensor, rows: int) -> Tensor:
    return part if part.shape[0] == rows else torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])


class _RowsOfAll(torch.autograd.Function):
    """Gathers the ranks' rows. The gradient of a rank's rows is the sum of all ranks' gradients of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _of_all(part, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_double_backward("info_nce")
        group, sizes = ctx.group, ctx.sizes
        own = for_each(lambda given: {"own": _own_sum(given["of_all"], sizes, group)}, {"of_all": gradient})["own"]
        return own, None, None


def _own_sum(of_all: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """Returns the sum over ranks of this rank's rows."""
    most = max(sizes)
    if min(sizes) < most:
        of_all = torch.cat([_padded(part, most) for part in of_all.split(sizes)])  # type: ignore[no-untyped-call]
    own = of_all.new_empty(most, *of_all.shape[1:])
    reduce_scatter(own, of_all.contiguous(), group=group)
    return own[: sizes[dist.get_rank(group)]]


class _SumOfRanks(torch.autograd.Function):
    """Adds up the ranks' numbers in one order. Each rank's number has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        return gathered(group, dist.get_world_size(group), part[None]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
