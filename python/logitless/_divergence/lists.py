"""Divergences over a list of ids for each row, from both heads' probabilities of these ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import candidates
from .._candidates.segments import Lists
from ..errors import InvalidArgumentError
from .problem import Heads, Numbers


class IdLists(NamedTuple):
    """Lists of ids as logitless.linear_candidates takes them, and its options beside those of a head."""

    ids: Tensor
    offsets: Tensor | None
    options: Mapping[str, Any]

    def check(self, hidden: Tensor, weight: Tensor, least_vocab: int) -> None:
        candidates.checked("linear_candidates", hidden, weight, self.ids, self.offsets, self.options, least_vocab)

    def of_rows(self, rows: int, index: Tensor | None) -> IdLists:
        """Returns the lists of some of the rows, or with None of all, which have one dimension then."""
        ids, offsets = self.ids, self.offsets
        if offsets is None:
            if ids.dim() == 1:  # one list for all rows
                return self
            ids = ids.reshape(rows, ids.shape[-1])
            return self._replace(ids=ids if index is None else ids[index])
        if index is None:
            return self
        lists = Lists((rows,), ids.shape[0], offsets)
        starts, of_elements = lists.offsets, lists.rows
        assert starts is not None and of_elements is not None
        if not torch.equal(starts, offsets.long()) or starts[[0, -1]].tolist() != [0, ids.shape[0]]:
            raise InvalidArgumentError(f"offsets: expected to ascend from 0 to {ids.shape[0]}, got {offsets.tolist()}")
        counts = starts.diff()[index]
        is_kept = torch.zeros(rows, dtype=torch.bool, device=ids.device).index_fill_(0, index, True)
        ends = counts.cumsum(0)
        return self._replace(ids=ids[is_kept[of_elements]], offsets=torch.cat([ends.new_zeros(1), ends]))


def divergences(
    heads: Heads,
    lists: IdLists,
    numbers: Numbers,
    weight: Tensor,
    with_entropy: bool,
    linear_candidates: Callable[..., candidates.LinearCandidatesOutput],
) -> tuple[Tensor, Tensor]:
    """Returns each row's divergence, which has gradients, and the student's entropy, or zeros without with_entropy.

    Rows that the mask leaves out are left out of the products and have 0. Rows of weight 0 have no gradient.
    linear_candidates: of a group or not.
    """
    rows, hiddens = heads.student.shape[0], [heads.student, heads.teacher]
    index = None if heads.mask is None else heads.mask.nonzero().reshape(-1)
    if index is not None:
        hiddens, weight = [hidden[index] for hidden in hiddens], weight[index]
    lists = lists.of_rows(rows, index)

    def of_head(name: str, other: str, hidden: Tensor, **more: bool) -> candidates.LinearCandidatesOutput:
        given = {n: v for n, v in numbers._asdict().items() if n != "beta" and not n.startswith(other)}
        given = {n.removeprefix(f"{name}_"): v for n, v in given.items()}
        classes, bias = (getattr(heads, f"{name}_{part}") for part in ("weight", "bias"))
        return linear_candidates(hidden, classes, lists.ids, lists.offsets, bias=bias, **given, **lists.options, **more)

    student = of_head("student", "teacher", hiddens[0], return_entropy=with_entropy)
    with torch.no_grad():
        teacher = of_head("teacher", "student", hiddens[1])
    log_probs = student.log_probs
    elements = lists.ids.shape[0] if lists.offsets is not None else 0
    # Where a row of weight 0 has an infinite divergence, its gradient would be 0 * inf.
    is_left_out = Lists(weight.shape, elements, lists.offsets).spread(weight == 0)
    divergence = candidates.generalized_jsd(
        torch.where(is_left_out, log_probs.detach(), log_probs),
        teacher.log_probs,
        lists.offsets,
        beta=numbers.beta,
        other=lists.options["normalize"] == "vocabulary",
    )
    entropy = torch.zeros_like(divergence) if student.entropy is None else student.entropy
    values = divergence, entropy.detach()
    if index is None:
        return values
    by_row = [value.new_zeros(rows).index_copy(0, index, value) for value in values]
    return by_row[0], by_row[1]
