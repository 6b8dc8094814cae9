"""``logitless.distributed.sample``: samples of a head whose rows are spread over the ranks of a group.

Each rank samples from its shard, with the noise of global ids. The sample of the whole is that with the largest key.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._sampling.edits import logits_from
from ..options import LOGIT_NUMBERS
from ..sampling import Given, SampleOptions, SampleOutput, accepts_samples
from ..sampling import sample as of_one_rank
from . import _agreement
from . import group as _group
from ._channel import all_gather

if TYPE_CHECKING:
    from typing_extensions import Unpack


NOT_SHARED = ("top_k", "top_p", "min_p", "penalties")


@torch.compiler.disable  # type: ignore[untyped-decorator]
@accepts_samples
def sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_total: int | None = None,
    **options: Unpack[SampleOptions],
) -> SampleOutput:
    """Computes :func:`logitless.sample` for a head whose rows are spread over the ranks of a group.

    Every rank of the group must call it at the same time with the same options. All ranks get the same
    samples of the whole vocabulary: those that one device has with this seed, unless two ids nearly tie. Ranks exchange
    a few numbers a row.

    Arguments not listed here are those of :func:`logitless.sample`. Truncation, penalties and ``return_kept`` are not
    supported.

    Args:
        hidden: Hidden states, ``[..., D]``, the same on every rank.
        weight: This rank's rows of the head's weight, ``[V_r, D]``, of any number, including 0.
        group: As in :func:`logitless.distributed.linear_cross_entropy`.
        vocab_start: As in :func:`logitless.distributed.linear_cross_entropy`.
        vocab_total: As in :func:`logitless.distributed.linear_cross_entropy`.
        seed: The same on every rank. None and generators: rank 0's.
        bias: The shard's bias, ``[V_r]``.
        mask: The shard's ids that may be sampled: bools ``[..., V_r]``, or bits ``[..., ceil(V_r / 32)]``. Every rank
            has one, or none has.

    Raises:
        InvalidArgumentError: Ranks differ, by the name of the argument, or shards do not make up a vocabulary.
        TypeError, ValueError, BudgetTooSmallError: As in :func:`logitless.sample`.
    """
    group = _group.checked_group(group)
    if _group.is_whole_head(group, weight, vocab_start, vocab_total):
        return of_one_rank(hidden, weight, **options)
    with _group.refused_for_all(group):
        given = Given(hidden, weight, options, least_vocab=0)
        for name in NOT_SHARED:
            if given.o[name] is not None:
                raise ValueError(
                    f"{name}: expected None for a head that ranks share, got {type(given.o[name]).__name__}"
                )
        if given.o["return_kept"]:
            raise ValueError("return_kept: expected False for a head that ranks share, got True")
        start, total = (
            _group._classes(name, value) for name, value in (("vocab_start", vocab_start), ("vocab_total", vocab_total))
        )
    agreed = _agreed(group, given, start, total)
    if agreed.new is None:
        return _merged(group, given, _numbers(given, agreed.shard))
    error, numbers = None, given.hidden
    try:
        numbers = _numbers(given, agreed.shard)
    except Exception as raised:
        error = raised
    _agreement.of_all(group, None, error, "has no samples")  # a rank without a plan would keep the others waiting
    _agreement.keep(group, agreed)
    return _merged(group, given, numbers)


def _numbers(given: Given, shard: _agreement.Shard) -> Tensor:
    """Returns the numbers that ranks exchange, ``[N, 3 S + 3]`` in float64.

    They are keys, ids, logits, lse, entropy, and the lse without a mask where log-probabilities are wanted.
    """
    tokens, rows = given.hidden.shape[0], given.weight.shape[0]
    if rows == 0:
        no_column = given.hidden.new_full((tokens, 3 * given.count + 3), -math.inf, dtype=torch.float64)
        no_column[:, given.count : 2 * given.count] = shard.total
        return no_column
    part = [shard.start, shard.total] if rows < shard.total else []
    ids, log_probs, keys, lse, entropy = given.run(part, given.mask)
    of_all = given.run(part, count=0)[3] if given.mask is not None and given.o["return_logprobs"] else lse
    entropy = entropy if given.o["return_entropy"] else torch.zeros_like(lse)
    of_row = lse.double()[:, None]
    logits = logits_from(log_probs, of_row)
    return torch.cat(
        (keys.double(), ids.double(), logits, of_row, entropy.double()[:, None], of_all.double()[:, None]), -1
    )


def _merged(group: Any, given: Given, mine: Tensor) -> SampleOutput:
    ranks, count, stats = dist.get_world_size(group), given.count, given.stats
    every = mine.new_empty((ranks, *mine.shape))
    all_gather(every.view(-1), mine.contiguous().view(-1), group=group)
    keys, ids, logits, lse, entropies, of_all = every.split((count, count, count, 1, 1, 1), dim=-1)  # type: ignore[no-untyped-call]
    best = keys.amax(0)
    is_best = (keys == best) | (keys.isnan() & best.isnan())
    chosen = torch.where(is_best, ids, math.inf).argmin(0, keepdim=True)  # the smallest of equal ones
    logits, total = logits.gather(0, chosen)[0], lse.logsumexp(0)
    # A rank without columns, or with masked ones alone, has no share.
    share = torch.where(lse == -math.inf, 0, (lse - total).exp() * (lse - entropies))
    entropy = (total - share.sum(0)).masked_fill(total == -math.inf, math.nan)[:, 0]
    log_probs, full = ((logits - each).to(stats) for each in (total, of_all.logsumexp(0)))
    full = full.masked_fill(log_probs.isnan(), math.nan)
    return given.output(ids.gather(0, chosen)[0].long(), log_probs, entropy.to(stats), full)


def _agreed(group: Any, given: Given, start: int, total: int) -> _agreement.Agreed:
    """Compares the calls of all ranks, and gives them rank 0's seed."""
    o, seed = given.o, given.seed
    drawn = o["seed"] is None or isinstance(o["seed"], torch.Generator)
    fields = {
        "device": given.hidden.device.type,
        "function": "sample",
        "hidden": f"{given.hidden.dtype} {list(given.hidden.shape)}",
        "weight": f"{given.weight.dtype} [*, {given.weight.shape[1]}]",
        "bias": None if given.bias is None else str(given.bias.dtype),
        "temperatures of rows": given.row_temperature is not None,
        "mask": given.mask is not None,
        **{name: o[name] for name in o if name != "seed" and isinstance(o[name], (bool, int, float, str))},
        **dict(zip(LOGIT_NUMBERS, given.numbers)),
        "seed": f"{list(seed.shape)}",
        "seed given": not drawn,
        "vocab_start given": start >= 0,
        "vocab_total": None if total < 0 else total,
    }
    own = _agreement.RankInfo(given.weight.shape[0], start, 0, 0)
    number = int(seed) if drawn else 0
    agreed = _agreement.agree(group, fields, own, None if drawn else seed, "seed", number)
    if drawn:
        given.seed = torch.full_like(seed, agreed.seed)
    return agreed
