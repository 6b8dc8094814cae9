"""Samples of a head that ranks share, against the single-process function."""

import functools

import logitless
import logitless.sampling
import numpy
import pytest
import torch
from logitless._sampling.edits import packed

from groups.common import Data, assert_close, call, largest_logit, refused
from groups.ranks import sizes

sample = functools.partial(call, function="sample")
ALL = {"num_samples": 3, "return_logprobs": True, "return_entropy": True}


def case_sample(ranks):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        data = Data(ranks, dtype)
        wide, logit = data.to(torch.float64), largest_logit(data, True) * 2
        seeds = torch.arange(len(data.input)) * 7 - 3
        for seed, names in ((5, ()), (seeds, ("temperature",)), (torch.tensor(-1), ())):
            expected = []
            for of in (data, wide):
                given = {name: getattr(of, name) for name in names}
                expected.append(logitless.sample(of.input, of.weight, bias=of.bias, seed=seed, **ALL, **given))
            given = {name: getattr(data, name) for name in names}
            got = sample(ranks, data, bias=data.bias[data.shard], seed=seed, **ALL, **given)
            assert torch.equal(got.ids, expected[0].ids)  # a column has the same logits in any shard here
            if torch.equal(expected[0].ids, expected[1].ids):
                pairs = (each.log_probs for each in expected)
                assert_close("log_probs", got.log_probs, *pairs, logit, ranks)
            assert_close("entropy", got.entropy, *(each.entropy for each in expected), logit, ranks)
            every = ranks.gather(tuple(got[:4]))
            assert all(torch.equal(one, other) for four in every for one, other in zip(four, got)), "between ranks"


def case_sample_without_a_seed(ranks):
    """Rank 0's seed is everyone's, and every call has another."""
    data = Data(ranks)
    torch.manual_seed(ranks.rank)
    first, second = sample(ranks, data, num_samples=8).ids, sample(ranks, data, num_samples=8).ids
    assert not torch.equal(first, second)
    assert all(torch.equal(first, other) for other in ranks.gather(first))


SETS = (
    {"top_k": 5},
    {"top_k": 1 << 40},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"top_k": 9, "top_p": 0.5, "min_p": 0.01},
    {"return_kept": True, "top_p": 0.9},
)


def edits_of(data):
    """Returns a mask and penalties. Row 0 has one id, row 1 none, and row 2 edited ones alone."""
    tokens, vocab = len(data.input), len(data.weight)
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(tokens, vocab, generator=generator) < 0.5
    mask[:3] = False
    mask[0, -1] = True
    ids = torch.randint(-1, vocab, (tokens, 6), generator=generator)
    mask[2, ids[2].clamp(min=0)] = True
    return mask, (ids, torch.randn(tokens, 6, generator=generator))


def case_sample_of_some_ids(ranks):
    for dtype in (torch.float64, torch.float32):
        data = Data(ranks, dtype)
        mask, penalties = edits_of(data)
        for more in ({}, *SETS):
            for edits in ({}, {"mask": mask}, {"penalties": penalties}, {"mask": mask, "penalties": penalties}):
                if not more and not edits:
                    continue
                given = ALL | more | edits | {"temperature": data.temperature}
                expected = logitless.sample(data.input, data.weight, seed=5, bias=data.bias, **given)
                forms = [given]
                if "mask" in given:
                    own = mask[:, data.shard]
                    forms = [given | {"mask": own}, given | {"mask": packed(own)}]
                for form in forms:
                    got = sample(ranks, data, seed=5, bias=data.bias[data.shard], **form)
                    assert torch.equal(got.ids, expected.ids), (more, edits.keys())
                    for name in ("log_probs", "full_log_probs", "entropy"):
                        torch.testing.assert_close(getattr(got, name), getattr(expected, name), equal_nan=True)
                    if got.kept is not None:
                        assert torch.equal(got.kept.offsets, expected.kept.offsets)
                        assert torch.equal(got.kept.ids, expected.kept.ids)


def case_sample_of_equal_logits(ranks):
    """The smaller of equal ids is kept, whatever rank has it."""
    data = Data(ranks)
    vocab, ids = len(data.weight), torch.zeros(len(data.input), 1, dtype=torch.int64)
    numbers = torch.full(ids.shape, -1.0)
    for weight in (torch.full_like(data.weight, 0.02), data.weight[: -(-vocab // 2)].repeat(2, 1)[:vocab]):
        for more in ({"top_k": 1}, {"top_k": 5}, {"top_k": 5, "penalties": (ids, numbers)}, {"min_p": 1.0}):
            given = {"seed": 2, "return_kept": True} | more
            expected = logitless.sample(data.input, weight, **given)
            got = sample(ranks, data, weight=weight[data.shard], **given)
            assert torch.equal(got.ids, expected.ids), more
            assert torch.equal(got.kept.ids, expected.kept.ids), more


@sizes(2)
def case_sample_with_logits_that_one_rank_cannot_make(ranks):
    """Whether rows are done again depends on data, so it may be the first time in a call of a known kind."""
    data = Data(ranks)
    peaked, flat = data.input * 100, data.input * 0
    weight = data.weight.repeat(20, 1)
    shard = slice(ranks.rank * len(weight) // 2, (ranks.rank + 1) * len(weight) // 2)
    given = {"weight": weight[shard], "top_p": 0.5, "seed": 1}
    sample(ranks, data, hidden=peaked, **given)
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(logitless.sampling, "dense_logits", _out_of_memory)
        with pytest.raises((RuntimeError, ValueError), match="no memory"):
            sample(ranks, data, hidden=flat, **given)
    expected = logitless.sample(flat, weight, top_p=0.5, seed=1)
    assert torch.equal(sample(ranks, data, hidden=flat, **given).ids, expected.ids)


def _out_of_memory(*_):
    raise RuntimeError("no memory")


@sizes(2)
def case_sample_of_starts_that_are_given(ranks):
    data = Data(ranks)
    data.start = sum(data.rows[ranks.rank + 1 :])
    got = sample(ranks, data, seed=3, vocab_start=data.start, num_samples=5)
    assert torch.equal(got.ids, logitless.sample(data.input, data.weight, seed=3, num_samples=5).ids)


@sizes(2, 3)
def case_sample_that_one_rank_asks_for_otherwise(ranks):
    otherwise = functools.partial(refused, ranks, function="sample")
    otherwise("seed: expected the same on all ranks", seed=1, normal={"seed": 0})
    otherwise("num_samples: expected the same", num_samples=2)
    otherwise("softcap: expected the same", softcap=3.0)
    data = Data(ranks)
    mask = torch.ones(len(data.input), data.rows[ranks.rank], dtype=torch.bool)
    otherwise("mask: expected the same on all ranks", mask=mask)
    otherwise("top_k: expected the same", top_k=3)
    ids = torch.full((len(data.input), 1), len(data.weight))
    wrong = (ids, torch.zeros(ids.shape))
    otherwise(f"penalties.0.: expected ids in .0, {len(data.weight)}. or -1", on="all", penalties=wrong)
    otherwise("penalties: expected the same", penalties=wrong)
    ids = ids.clamp(max=0)
    normal = {"penalties": (ids, torch.ones(ids.shape))}
    otherwise("penalties: expected the same", penalties=wrong, normal=normal)
    otherwise("penalties: expected the same", penalties=(ids, torch.zeros(ids.shape)), normal={"seed": 0} | normal)
    otherwise("top_k: expected the same", top_k=numpy.int64(3), normal={"top_k": numpy.int64(4)})
    otherwise("max_workspace_bytes: expected at least", on="all", max_workspace_bytes=64)
