"""``logitless.distributed.linear_divergence``: two heads whose rows are spread over the ranks of a group."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _divergence
from .._divergence import _MORE, _OWN, DivergenceOptions, LinearDivergenceOutput, passes
from .._divergence.problem import Heads, Numbers, Problem, RowNumbers
from ..autograd import OtherPasses, of_group, other_passes
from ..call import Ranks
from ..options import BACKWARD, accepts
from ..passes import PassKey
from ..run import CODES, Tensors
from . import _agreement
from . import group as _group
from ._candidates import linear_candidates
from ._channel import Group, all_gather
from ._passes import _text, add_up, group_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


@accepts(DivergenceOptions, _OWN, **_MORE)
def linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_total: int | None = None,
    return_stats: bool = False,
    **options: Unpack[DivergenceOptions],
) -> Tensor | LinearDivergenceOutput:
    """Computes :func:`logitless.linear_divergence` for heads whose rows are spread over the ranks of a group.

    Both heads are cut alike: a rank has the same columns of the vocabulary of each. Every rank of the group must call
    it at the same time with the same options. It gets all results, with the same bits. The gradient of
    ``student_hidden`` is the sum over ranks, on every rank. Gradients of ``student_weight`` and ``student_bias`` are
    those of the rank's own rows. Upstream gradients must be the same on every rank.

    Values take two exchanges of small records for some rows at a time. A rank r first sends the lse of its columns of
    both heads, and the entropy of the student's softmax over them::

        lse     = log sum_r exp(lse_r)
        entropy = sum_r exp(lse_r - lse) (entropy_r + lse - lse_r)

    With p and q of these lse, each rank then sends its part of a row's divergence and of KL(p || m), which are sums
    over columns. All ranks add up the parts in one order. Every term of these sums is at least 0, as on one device, so
    no digits are lost where the heads nearly agree.

    Arguments not listed here are those of :func:`logitless.linear_divergence`.

    Args:
        student_hidden: Hidden states, ``[..., D]``, the same on every rank.
        student_weight: This rank's rows of the student's weight, ``[V_r, D]``, of any number, including 0.
        teacher_hidden: Hidden states, ``[..., E]``, the same on every rank.
        teacher_weight: The same rows of the teacher's weight, ``[V_r, E]``.
        group: As in :func:`logitless.distributed.linear_cross_entropy`.
        vocab_start: As in :func:`logitless.distributed.linear_cross_entropy`.
        vocab_total: As in :func:`logitless.distributed.linear_cross_entropy`.
        student_bias: The shard's bias, ``[V_r]``.
        teacher_bias: The shard's bias, ``[V_r]``.
        ids: Ids of the whole vocabulary, the same on every rank.
        mask: The same on every rank, as weights of tokens are. Ranks compare it on CPUs.

    Raises:
        InvalidArgumentError: Ranks differ, by the name of the argument, or shards do not make up ``vocab_total``.
        TypeError, ValueError, BudgetTooSmallError: As in :func:`logitless.linear_divergence`.
    """
    group = _group.checked_group(group)
    heads = (student_hidden, student_weight, teacher_hidden, teacher_weight)
    if _group.is_whole_head(group, student_weight, vocab_start, vocab_total):
        return _divergence.prepared(*heads, return_stats, options).result()
    with _group.refused_for_all(group):
        places = {"vocab_start": vocab_start, "vocab_total": vocab_total}
        start, total = (_group._classes(name, value) for name, value in places.items())
        ranks = Ranks(group.group_name, dist.get_world_size(group), start, total, False, False, False)
        prepared = _divergence.prepared(*heads, return_stats, options, ranks)
    if prepared.lists is not None:
        _agree_on_rows(group, ranks, prepared)
    return prepared.result(functools.partial(linear_candidates, group=group, **places))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _agree_on_rows(group: Any, ranks: Ranks, prepared: _divergence.Prepared) -> None:
    """Compares what linear_candidates of all ranks does not see: which rows the mask leaves, and beta."""
    mask = prepared.heads.mask
    fields = {
        "device": prepared.weight.device.type,
        "function": "linear_divergence with ids",
        "mask": _text(mask),
        "beta": Numbers(*prepared.call.options["numbers"]).beta,
        "seed": None,
        "vocab_start given": ranks.vocab_start >= 0,
        "vocab_total": None if ranks.vocab_total < 0 else ranks.vocab_total,
    }
    own = _agreement.RankInfo(prepared.heads.student_weight.shape[0], ranks.vocab_start, 0, 0)
    agreed = _agreement.agree(group, fields, own, mask, "mask", 0)
    if agreed.new is not None:
        _agreement.keep(group, agreed)


class _Exchange:
    """Gathers of all ranks' numbers of some rows. Each rank merges the same numbers in the same order."""

    def __init__(self, group: Group, shard: _agreement.Shard) -> None:
        self._group, self.ranks, self.columns = group, shard.ranks, shard.largest

    def _gathered(self, *numbers: Tensor) -> list[Tensor]:
        """Returns each number of every rank in float64, ``[ranks, rows]``."""
        mine = torch.stack(numbers)
        every = mine.new_empty((self.ranks, *mine.shape))
        all_gather(every.view(-1), mine.view(-1), group=self._group)
        return list(every.double().unbind(1))

    def merge_sums(self, numbers: RowNumbers) -> None:
        student, teacher, entropy = self._gathered(numbers.student_lse, numbers.teacher_lse, numbers.entropy)
        lse = student.logsumexp(0)
        share = (student - lse).exp()
        # A part without a possible column has no entropy.
        parts = torch.where(share == 0, 0, share * (entropy + (lse - student)))
        numbers.student_lse.copy_(lse)
        numbers.teacher_lse.copy_(teacher.logsumexp(0))
        numbers.entropy.copy_(parts.sum(0))

    def merge_terms(self, numbers: RowNumbers) -> None:
        pair = numbers.divergence, numbers.student_kl
        for number, parts in zip(pair, self._gathered(*pair)):
            number.copy_(parts.sum(0))


# ---- passes


def _fields(pass_key: PassKey, p: Problem, given: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the properties of a call that must be the same on all ranks, by the names of arguments."""
    assert pass_key.ranks is not None
    parts = {name: given[name] for name in Heads._fields if name.endswith(("weight", "bias")) and name in given}
    shards = {name: f"{part.dtype}, of a row {list(part.shape[1:])}" for name, part in parts.items()}
    return {
        "device": p.device.type,
        "function": pass_key.function,
        "student_hidden": _text(given["student"]),
        "teacher_hidden": _text(given["teacher"]),
        **shards,
        "mask": _text(given.get("mask")),
        "rows that mask leaves": p.rows,
        **dict(zip(Numbers._fields, options["numbers"])),
        "max_workspace_bytes": p.budget,
        "dtype of autocast": str(p.rounded),
        "dtypes of products": tuple(CODES[dtype] for dtype in p.dtypes),
        "tensors that require grad": tuple(pass_key.flags.wants()),
        "gradients together with the loss": pass_key.kind,
        "seed": None,
        "vocab_start given": pass_key.ranks.vocab_start >= 0,
        "vocab_total": None if pass_key.ranks.vocab_total < 0 else pass_key.ranks.vocab_total,
    }


def _run(pass_key: PassKey, given: dict[str, Tensor], main_grad: Tensor | None, options: Mapping[str, Any]) -> Tensors:
    ranks = pass_key.ranks
    assert ranks is not None
    group, p = group_of(ranks), passes.problem_of(given, options)
    if pass_key.kind != BACKWARD:  # which exchanges gradients alone
        own = _agreement.RankInfo(p.vocab, ranks.vocab_start, 0, 0)
        agreed = _agreement.agree(group, _fields(pass_key, p, given, options), own, given.get("mask"), "mask", 0)
        if agreed.new is not None:
            _agreement.keep(group, agreed)
        p.exchange = _Exchange(group, agreed.shard)
    outputs = passes.run(p, pass_key, given)
    add_up(group, ranks.group_size, outputs, sequence_parallel=False)
    return outputs


other_passes[of_group("linear_divergence")] = OtherPasses(_run, passes.results, passes.flops)
