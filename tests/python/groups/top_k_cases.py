"""The largest logits of a head that ranks share, against the single-process function."""

import functools

import logitless
import torch

from groups.common import Data, assert_close, call, largest_logit, refused
from groups.ranks import sizes

top_k = functools.partial(call, function="linear_top_k")


def case_top_k(ranks):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for k, options in ((1, {}), (57, {"scale": 0.5, "softcap": 2.0}), (20, {"temperature": "rows"})):
            data = Data(ranks, dtype)
            wide, logit = data.to(torch.float64), largest_logit(data, True) * 2
            expected = []
            for of in (data, wide):
                given = options | ({"temperature": of.temperature} if "temperature" in options else {})
                expected.append(logitless.linear_top_k(of.input, of.weight, k, bias=of.bias, **given))
            options = options | ({"temperature": data.temperature} if "temperature" in options else {})
            got = top_k(ranks, data, k=k, bias=data.bias[data.shard], **options)
            assert_close("log_probs", got.log_probs, *(each.log_probs for each in expected), logit, ranks)
            assert torch.equal(got.ids, expected[0].ids)  # a column has the same logits in any shard here
            every = ranks.gather(tuple(got))
            assert all(torch.equal(one, other) for pair in every for one, other in zip(pair, got)), "between ranks"


def case_top_k_of_equal_logits(ranks):
    """The smallest ids come first on whichever rank they are."""
    data = Data(ranks)
    data.weight[10:] = data.weight[torch.arange(10, data.vocab) % 10]
    got = top_k(ranks, data, k=5)
    assert torch.equal(got.ids[:, 0], got.ids[:, 0] % 10)
    assert torch.equal(got.ids, got.ids[:, :1] + 10 * torch.arange(5))
    assert torch.equal(got.ids, logitless.linear_top_k(data.input, data.weight, 5).ids)


def case_top_k_sequence_parallel(ranks):
    data = Data(ranks, shape=(24, 3))
    mine = ranks.part(data)
    expected = logitless.linear_top_k(data.input, data.weight, 6, temperature=data.temperature)
    for temperature in (data.temperature, data.temperature[mine]):
        hidden = data.input[mine].clone().requires_grad_()
        got = top_k(ranks, data, k=6, hidden=hidden, temperature=temperature, sequence_parallel=True)
        assert got.ids.shape == (24, 3, 6) and torch.equal(got.ids, expected.ids)
        torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=1e-12, atol=0)


@sizes(2)
def case_top_k_of_starts_that_are_given(ranks):
    data = Data(ranks)
    data.start = sum(data.rows[ranks.rank + 1 :])
    got = top_k(ranks, data, k=12, vocab_start=data.start)
    assert torch.equal(got.ids, logitless.linear_top_k(data.input, data.weight, 12).ids)


@sizes(2, 3)
def case_top_k_that_one_rank_asks_for_otherwise(ranks):
    otherwise = functools.partial(refused, ranks, function="linear_top_k")
    otherwise("k: expected the same .* got 9 on rank.* and 8 on rank 1", k=8)
    otherwise("k: expected a number in .1, 57. .the rows of all ranks' shards., got 58", k=58, on="all")
    otherwise("k: expected a number in .1, 64.*got 65", k=65, on="all")
    otherwise("k: expected" if ranks.rank == 1 else "rank 1 .* refused .*: k: expected", k=0)
    otherwise("softcap: expected the same", softcap=3.0)
    otherwise("tensor temperature: expected the same", temperature=Data(ranks).temperature)
    otherwise("max_workspace_bytes: expected at least", on="all", max_workspace_bytes=64)
