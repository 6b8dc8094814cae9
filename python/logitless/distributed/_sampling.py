"""``logitless.distributed.sample``: samples of a head whose rows are spread over the ranks of a group.

Each rank samples from its shard, with the noise of global ids. The sample of the whole is that with the largest key.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._sampling.edits import logits_from
from ..errors import InvalidArgumentError
from ..options import LOGIT_NUMBERS
from ..run import are_unaligned
from ..sampling import Given, SampleOptions, SampleOutput, _truncation, accepts_samples
from ..sampling import sample as of_one_rank
from . import _agreement
from . import group as _group
from ._channel import all_gather

if TYPE_CHECKING:
    from typing_extensions import Unpack


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

    Arguments not listed here are those of :func:`logitless.sample`. Truncated rows whose largest logits do not hold the
    set are done again with the logits of all ranks.

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
        given = _Shared(hidden, weight, options, group)
        start, total = (
            _group._classes(name, value) for name, value in (("vocab_start", vocab_start), ("vocab_total", vocab_total))
        )
    given.agreed = agreed = _agreed(group, given, start, total)
    given.vocab, given.truncation = agreed.shard.total, _truncation(given.o, agreed.shard.total)
    out = given.sample()
    if agreed.new is not None:
        _agreement.keep(group, agreed)
    return out


class _Shared(Given):
    """A call whose ids are spread over ranks. All passes return the same on every rank."""

    agreed: _agreement.Agreed

    def __init__(self, hidden: Tensor, weight: Tensor, options: Mapping[str, Any], group: Any) -> None:
        super().__init__(hidden, weight, options, least_vocab=0)
        self.group = group

    def _own(self, make: Callable[[], Tensor], always: bool = False) -> Tensor:
        """Returns this rank's numbers. An error is that of all ranks, which would wait.

        Later calls of a known kind do not ask the others, except `always`: data decide whether such a step runs.
        """
        if self.agreed.new is None and not always:
            return make()
        error, made = None, self.hidden
        try:
            made = make()
        except Exception as raised:
            error = raised
        _agreement.of_all(self.group, None, error, "has no samples")
        return made

    def _every(self, mine: Tensor) -> Tensor:
        every = mine.new_empty((dist.get_world_size(self.group), *mine.shape))
        all_gather(every.view(-1), mine.contiguous().view(-1), group=self.group)
        return every

    def _sum(self, mine: Tensor) -> Tensor:
        """Adds up numbers of which one rank has each, and the others have 0."""
        dist.all_reduce(mine, group=self.group)
        return mine

    def _samples(self, bits: Tensor | None, merges: bool) -> Any:
        tokens, rows, shard = self.hidden.shape[0], self.weight.shape[0], self.agreed.shard

        def numbers() -> Tensor:  # keys, ids, logits, lse and entropy
            if rows == 0:
                no_column = self.hidden.new_full((tokens, 3 * self.count + 2), -math.inf, dtype=torch.float64)
                no_column[:, self.count : 2 * self.count] = shard.total
                return no_column
            part = [shard.start, shard.total] if rows < shard.total else []
            ids, log_probs, keys, lse, entropy = self.run(part, bits)
            entropy = entropy if self.o["return_entropy"] else torch.zeros_like(lse)
            of_row = lse.double()[:, None]
            logits = logits_from(log_probs, of_row)
            return torch.cat((keys.double(), ids.double(), logits, of_row, entropy.double()[:, None]), -1)

        every, sizes = self._every(self._own(numbers)), (*3 * (self.count,), 1, 1)
        keys, ids, logits, lse, entropies = every.split(sizes, dim=-1)  # type: ignore[no-untyped-call]
        best = keys.amax(0)
        is_best = (keys == best) | (keys.isnan() & best.isnan())
        chosen = torch.where(is_best, ids, math.inf).argmin(0, keepdim=True)  # the smallest of equal ones
        total = lse.logsumexp(0)
        log_probs = logits.gather(0, chosen)[0] - total
        # A rank without columns, or with masked ones alone, has no share.
        share = torch.where(lse == -math.inf, 0, (lse - total).exp() * (lse - entropies))
        entropy = (total - share.sum(0)).masked_fill(total == -math.inf, math.nan)[:, 0]
        of_ids, of_row = log_probs.to(self.stats), entropy.to(self.stats)
        return ids.gather(0, chosen)[0].long(), of_ids, best, total[:, 0], of_row

    def _largest(self, bits: Tensor | None, count: int, merges: bool) -> tuple[Tensor, Tensor, Tensor]:
        tokens, own = self.hidden.shape[0], min(count, self.weight.shape[0])

        def numbers() -> Tensor:  # ids, logits and lse
            made = self.hidden.new_full((tokens, 2 * count + 1), -math.inf, dtype=torch.float64)
            made[:, :count] = self.vocab
            if own > 0:
                ids, log_probs, _, lse, _ = self.run([], bits, 0, own)
                made[:, :own] = ids + self.agreed.shard.start
                made[:, -1] = lse
                z = logits_from(log_probs, made[:, -1:])
                # Log-probabilities are rounded by the shard's lse. These make equal logits equal on all ranks.
                exact = super(_Shared, self)._logits_of(ids)
                made[:, count : count + own] = torch.where(z.isfinite(), exact, z)
            return made

        every = self._every(self._own(numbers))
        total = every[..., -1:].logsumexp(0)
        ids, logits = (part.transpose(0, 1).flatten(1) for part in (every[..., :count], every[..., count:-1]))
        by_id = ids.argsort(stable=True)
        order = by_id.gather(-1, logits.gather(-1, by_id).argsort(stable=True, descending=True))[:, :count]
        return ids.gather(-1, order).long(), logits.gather(-1, order) - total, total[:, 0]

    def _lse_of_all(self) -> Tensor:
        def numbers() -> Tensor:
            if self.weight.shape[0] == 0:
                return self.hidden.new_full((self.hidden.shape[0], 1), -math.inf, dtype=torch.float64)
            return super(_Shared, self)._lse_of_all()

        return self._every(self._own(numbers)).logsumexp(0)

    def _in_weight(self, ids: Tensor) -> Tensor:
        start = self.agreed.shard.start
        return torch.where((ids >= start) & (ids < start + self.weight.shape[0]), ids - start, -1)

    def _logits_of(self, ids: Tensor) -> Tensor:
        rows = self._in_weight(ids)

        def numbers() -> Tensor:
            if self.weight.shape[0] == 0:
                return torch.zeros_like(ids, dtype=torch.float64)
            return torch.where(rows < 0, 0, super(_Shared, self)._logits_of(rows))

        return self._sum(self._own(numbers)).masked_fill(ids < 0, -math.inf)

    def _are_allowed(self, bits: Tensor, ids: Tensor) -> Tensor:
        return self._sum(super()._are_allowed(bits, ids).int()) > 0

    def _joined(self, make: Callable[[], Tensor]) -> Tensor:
        """Returns columns of all ranks, ``[R, V]``, from this rank's."""

        def placed() -> Tensor:
            of_rank, start = make(), self.agreed.shard.start
            joined = of_rank.new_zeros(of_rank.shape[0], self.vocab)
            joined[:, start : start + of_rank.shape[1]] = of_rank
            return joined

        return self._sum(self._own(placed, always=True))

    def _allowed(self, rows: Tensor) -> Tensor | None:
        if self.mask is None:
            return None
        of_rank = super()._allowed
        return self._joined(lambda: of_rank(rows).to(torch.uint8)).bool()  # type: ignore[union-attr]

    def _logits(self, rows: Tensor) -> Tensor:
        of_rank = super()._logits
        return self._joined(lambda: of_rank(rows))

    def _check_ids(self, ids: Tensor) -> None:
        error = None
        try:
            super()._check_ids(ids)
        except InvalidArgumentError as raised:
            error = raised
        _agreement.of_all(self.group, None, error, "refused its arguments")


def _plain(value: Any) -> bool | int | float | str | None:
    """Returns an option that is text or a number of any type; None for others."""
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, Tensor) or not (hasattr(value, "__index__") or hasattr(value, "__float__")):
        return None
    return operator.index(value) if hasattr(value, "__index__") else float(value)


def _agreed(group: Any, given: _Shared, start: int, total: int) -> _agreement.Agreed:
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
        "penalties": None if given.penalties is None else f"{list(given.penalties[0].shape)}",
        **{name: number for name, value in o.items() if name != "seed" and (number := _plain(value)) is not None},
        **dict(zip(LOGIT_NUMBERS, given.numbers)),
        "seed": f"{list(seed.shape)}",
        "seed given": not drawn,
        "vocab_start given": start >= 0,
        "vocab_total": None if total < 0 else total,
    }
    on_host = given.hidden.device.type == "cpu"
    unaligned = are_unaligned(given.hidden, given.weight)
    own = _agreement.RankInfo(given.weight.shape[0], start, torch.get_num_threads() if on_host else 0, int(unaligned))
    shared = {} if drawn else {"seed": [seed]}
    if on_host:
        shared |= {} if given.penalties is None else {"penalties": [*given.penalties]}
        shared |= {} if given.row_temperature is None else {"temperatures of rows": [given.row_temperature]}
    parts = [each.reshape(-1).contiguous() for some in shared.values() for each in some]
    if on_host:
        parts = [part.view(torch.uint8) for part in parts]
    number = int(seed) if drawn else 0
    agreed = _agreement.agree(group, fields, own, torch.cat(parts) if parts else None, ", ".join(shared), number)
    if drawn:
        given.seed = torch.full_like(seed, agreed.seed)
    return agreed
