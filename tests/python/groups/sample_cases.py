"""Samples of a head that ranks share, against the single-process function."""

import functools

import logitless
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


def case_sample_with_a_mask(ranks):
    """Some rows have ids in one shard alone, and row 1 has none."""
    for dtype in (torch.float64, torch.float32):
        data = Data(ranks, dtype)
        tokens, vocab = len(data.input), len(data.weight)
        mask = torch.rand(tokens, vocab, generator=torch.Generator().manual_seed(3)) < 0.5
        mask[0, : vocab - 1] = False
        mask[0, -1] = True
        mask[1] = False
        expected = logitless.sample(data.input, data.weight, seed=5, mask=mask, **ALL)
        own = mask[:, data.shard]
        for given in (own, packed(own)):
            got = sample(ranks, data, seed=5, mask=given, **ALL)
            assert torch.equal(got.ids, expected.ids)
            assert (got.ids[1] == -1).all()
            for name in ("log_probs", "full_log_probs", "entropy"):
                torch.testing.assert_close(getattr(got, name), getattr(expected, name), equal_nan=True)


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
    otherwise("return_kept: expected False for a head that ranks share", on="all", mask=mask, return_kept=True)
    otherwise("top_k: expected None for a head that ranks share", top_k=3, on="all")
    otherwise("max_workspace_bytes: expected at least", on="all", max_workspace_bytes=64)
