"""Heads and cuts used in turn, whose shards may have equal sizes on a rank.

Each call must equal the single-process head, and ranks with different heads must all raise the same error.
"""

import random

import logitless
import logitless.distributed
import pytest
import torch
import torch.distributed as dist
from logitless.distributed import _agreement

from groups.common import Data, call, check, of_group
from groups.ranks import sizes


class Head(Data):
    """A head on the rank's device; ``order`` is the ranks' order of shards in the vocabulary."""

    def __init__(self, ranks, rows, order=None, dtype=None, seed=0):
        dtype = dtype or dtype_on(ranks)
        super().__init__(ranks, dtype, seed, rows=rows)
        order = order or list(range(ranks.size))
        self.start = sum(rows[rank] for rank in order[: order.index(ranks.rank)])
        self.is_in_order = order == sorted(order)
        self.weight /= 4  # logits of size 1
        self.__dict__ |= vars(self.map(lambda tensor: tensor.to(ranks.device)))
        self.target[0] = self.vocab - 1

    @property
    def starts(self):
        return {} if self.is_in_order else {"vocab_start": self.start}


def dtype_on(ranks):
    return torch.float64 if ranks.device.type == "cpu" else torch.float32


def ceil_cut(vocab, ranks):
    """Cuts like most frameworks: all shards but the last ones have equal sizes."""
    most = -(-vocab // ranks)
    return [max(0, min(most, vocab - rank * most)) for rank in range(ranks)]


def random_cut(chance, vocab, ranks):
    ends = sorted(chance.randint(0, vocab) for _ in range(ranks - 1))
    return [end - start for start, end in zip([0, *ends], [*ends, vocab])]


def check_head(ranks, rows, options, order=None, seed=0):
    def kind(_, dtype, seed):
        return Head(ranks, rows, order, dtype, seed)

    more = Head(ranks, rows, order, seed=seed).starts
    check(ranks, options, dtype=dtype_on(ranks), seed=seed, kind=kind, **more)


def check_log_probs(ranks, rows, order=None, seed=0):
    head = Head(ranks, rows, order, seed=seed)
    ids = torch.stack([head.target, head.target.flip(0)], dim=-1)
    got = call(ranks, head, "linear_log_probs", ids=ids, **head.starts)
    wide = head.to(torch.float64)
    truth = logitless.linear_log_probs(wide.input, wide.weight, ids)
    naive = logitless.linear_log_probs(head.input, head.weight, ids)
    unit = torch.finfo(got.dtype).eps * max(1, truth.abs().max())
    assert (got - truth).abs().max() <= (ranks.size + 1) * (2 * (naive - truth).abs().max() + unit)


OPTIONS = (
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.2, "reduction": "none"},
    {"class_weight": "@class_weight", "label_smoothing": 0.1, "reduction": "sum"},
)


@sizes(2, 3, 4)
def case_two_vocabularies_cut_by_ceil(ranks):
    for step in range(3):
        for vocab in (100, 99):
            check_head(ranks, ceil_cut(vocab, ranks.size), {"label_smoothing": 0.1}, seed=step)
            check_log_probs(ranks, ceil_cut(vocab, ranks.size), seed=step)


@sizes(2, 3, 4)
def case_heads_and_cuts_in_random_turns(ranks):
    for seed in range(4):
        chance = random.Random(seed)
        first, other = (random_cut(chance, 20, ranks.size) for _ in range(2))
        longer = [*first[:-1], first[-1] + 1]  # equal sizes on all ranks but one
        mixed = [*first[:1], *other[1:]]  # each rank has the size of another cut
        shuffled = chance.sample(range(ranks.size), ranks.size)
        heads = [(first, None), (other, None), (longer, None), (mixed, None), (first, shuffled), (longer, shuffled)]
        options = chance.sample(OPTIONS, 2)
        for step in range(24):
            rows, order = chance.choice(heads)
            if chance.random() < 0.25:
                check_log_probs(ranks, rows, order, seed=step)
            else:
                check_head(ranks, rows, chance.choice(options), order, seed=step)


@sizes(2, 3)
def case_two_groups_of_the_same_ranks(ranks):
    others = [ranks.within(dist.new_group(list(range(ranks.size)))) for _ in range(2)]
    for step in range(3):
        for index, group in enumerate(others):
            check_head(group, ceil_cut(40 - index, ranks.size), {"label_smoothing": 0.1}, seed=step)
    heads = [Head(ranks, ceil_cut(40 - index, ranks.size)) for index in range(2)]
    options = {"label_smoothing": 0.1, "reduction": "none"}
    alone = [of_group(group, head, options) for group, head in zip(others, heads)]
    # Backward passes follow both forward passes.
    leaves = [head.leaves(columns=head.shard)[:2] for head in heads]
    losses = [
        call(group, head, hidden=input, weight=shard, **options)
        for (input, shard), head, group in zip(leaves, heads, others)
    ]
    for index in (1, 0):
        (losses[index] * heads[index].upstream).sum().backward()
        assert torch.equal(losses[index], alone[index][0])
        assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves[index], alone[index][1]))


def refused_alike(ranks, match, head, right=None, **wrong):
    """Checks that every rank raises the same error; right calls work before and after. ``wrong`` are rank 1's
    arguments."""
    right = right or {}
    expected = call(ranks, head, **right)
    for _ in range(2):
        with pytest.raises(logitless.InvalidArgumentError, match=match) as caught:
            call(ranks, head, **right | (wrong if ranks.rank == 1 else {}))
        every = ranks.gather(str(caught.value))
        assert len(set(every)) == 1, every
        assert torch.equal(call(ranks, head, **right), expected)


@sizes(2, 3)
def case_ranks_that_mean_other_heads(ranks):
    heads = [Head(ranks, ceil_cut(vocab, ranks.size)) for vocab in (100, 97)]
    for _ in range(2):
        for head in heads:
            of_group(ranks, head, {}, vocab_total=head.vocab)
    large, small = heads
    other = small.weight[small.shard] if ranks.size == 2 else small.weight[: small.rows[1] - 1]
    refused_alike(ranks, "vocab_total: expected the same .* got 100 on ranks? .* and 97 on rank 1", large,
                  {"vocab_total": 100}, weight=other, vocab_total=97)  # fmt: skip
    refused_alike(ranks, "vocab_total: expected 9. .the rows of all ranks' shards", large, {"vocab_total": 100},
                  weight=other)  # fmt: skip
    if ranks.size == 3:  # fewer rows on the last rank are another vocabulary, which is right
        refused_alike(ranks, "vocab_start: expected shards that follow one another", large,
                      {"vocab_start": large.start}, weight=other)  # fmt: skip
    refused_alike(ranks, "vocab_start: expected shards that follow one another", large, {"vocab_start": large.start},
                  vocab_start=large.start - 1)  # fmt: skip
    refused_alike(
        ranks, r"class_weight: expected shape \[9.\]", large, {"class_weight": large.class_weight}, weight=other
    )


@sizes(2)
def case_targets_that_differ(ranks):
    head = Head(ranks, ceil_cut(50, ranks.size))
    head.target[:4] = torch.tensor([3, 40, 7, 40])
    if ranks.device.type != "cpu":  # no host reads them
        expected = of_group(ranks, head, {})
        if ranks.rank == 1:
            head.target[:2] += torch.tensor([2, -1], device=ranks.device)
        loss, (d_hidden, d_shard, _) = of_group(ranks, head, {})
        counts = head.target != -100
        assert loss.isnan() and d_shard.isnan().all()
        assert d_hidden[counts].isnan().all() and not d_hidden[~counts].any()  # as if all rows were ignored
        if ranks.rank == 1:
            head.target[:2] -= torch.tensor([2, -1], device=ranks.device)
        assert torch.equal(of_group(ranks, head, {})[0], expected[0])
        return
    for places, values in (((0, 1), (5, 39)), ((0, 1), (40, 3)), ((0, 2), (7, 3)), ((0,), (4,)), ((1,), (-100,))):
        other = head.target.clone()
        other[list(places)] = torch.tensor(values)
        refused_alike(ranks, "targets: expected the same .* got others on rank 1", head, targets=other)
    several = torch.stack([head.target, head.target.flip(0)], dim=-1)
    for ids in (several, several.int()):
        given = {"targets": ids, "target_weight": torch.ones(several.shape)}
        refused_alike(ranks, "targets: expected the same", head, given, targets=ids.flip(-1))


@sizes(2, 3)
def case_a_rank_that_has_forgotten(ranks):
    """Such a rank was interrupted after the others had gone on."""
    for vocab in (60, 59, 60):
        check_head(ranks, ceil_cut(vocab, ranks.size), {"label_smoothing": 0.1})
        if ranks.rank == 1:
            _agreement._memories.pop(ranks.group)
