"""The largest logits of a head that ranks share, against the single-process function."""

import logitless
import logitless.distributed
import pytest
import torch
import torch.distributed as dist

from groups.group_cases import Data, assert_close
from groups.ranks import sizes


def top_k(ranks, data, k=9, **options):
    arguments = {"input": data.input, "shard": data.weight[data.shard]} | options
    return logitless.distributed.linear_top_k(
        arguments.pop("input"), arguments.pop("shard"), k, group=ranks.group, **arguments
    )


def case_top_k(ranks):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        data = Data(ranks, dtype)
        for k, options in ((1, {}), (57, {"scale": 0.5, "softcap": 2.0}), (20, {"temperature": data.temperature})):
            exact_options = {
                name: value.double() if torch.is_tensor(value) else value for name, value in options.items()
            }
            wide = data.to(torch.float64)
            exact = logitless.linear_top_k(wide.input, wide.weight, k, linear_bias=wide.bias, **exact_options)
            naive = logitless.linear_top_k(data.input, data.weight, k, linear_bias=data.bias, **options)
            got = top_k(ranks, data, k, linear_bias=data.bias[data.shard], **options)
            logit = (wide.input @ wide.weight.T + wide.bias).abs().max() * 2
            assert_close("log_probs", got.log_probs, naive.log_probs, exact.log_probs, logit, ranks)
            assert torch.equal(got.ids, naive.ids)  # logits of a column are the same in any shard here
            every = [None] * ranks.size
            dist.all_gather_object(every, tuple(got))
            assert all(torch.equal(one, other) for pair in every for one, other in zip(pair, got)), "between ranks"


def case_top_k_of_equal_logits(ranks):
    """The smallest ids come first, wherever they are."""
    data = Data(ranks)
    data.weight[10:] = data.weight[torch.arange(10, data.vocab) % 10]
    got = top_k(ranks, data, 5)
    assert torch.equal(got.ids[:, 0], got.ids[:, 0] % 10)
    assert torch.equal(got.ids, got.ids[:, :1] + 10 * torch.arange(5))
    assert torch.equal(got.ids, logitless.linear_top_k(data.input, data.weight, 5).ids)


def case_top_k_sequence_parallel(ranks):
    data = Data(ranks, shape=(24, 3))
    count = 24 // ranks.size
    mine = slice(ranks.rank * count, (ranks.rank + 1) * count)
    for rows, own in (("all", data.temperature), ("own", data.temperature[mine])):
        expected = logitless.linear_top_k(data.input, data.weight, 6, temperature=data.temperature)
        got = top_k(ranks, data, 6, input=data.input[mine], temperature=own, sequence_parallel=True)
        assert got.ids.shape == (24, 3, 6), rows
        assert torch.equal(got.ids, expected.ids)
        torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=1e-12, atol=0)


@sizes(2)
def case_top_k_of_starts_that_are_given(ranks):
    data = Data(ranks)
    expected = logitless.linear_top_k(data.input, data.weight, 12)
    data.start = sum(data.rows[ranks.rank + 1 :])
    got = top_k(ranks, data, 12, shard=data.weight[data.shard], vocab_start=data.start)
    assert torch.equal(got.ids, expected.ids)


@sizes(2, 3)
def case_top_k_that_one_rank_asks_for_otherwise(ranks):
    data = Data(ranks)

    def refused(match, error=ValueError, k=9, on=1, **options):
        mine = on in (ranks.rank, "all")
        with pytest.raises(error, match=match):
            top_k(ranks, data, k if mine else 9, **(options if mine else {}))
        assert top_k(ranks, data).ids.shape == (24, 9)

    refused("k: expected the same .* got 9 on rank.* and 8 on rank 1", k=8)
    refused("k: expected a number in .1, 57., the rows of all ranks' shards, got 58", k=58, on="all")
    refused("k: expected a number in .1, 64.*got 65", k=65, on="all")
    refused("k: expected" if ranks.rank == 1 else "rank 1 .* refused .*: k: expected", k=0)
    refused("softcap: expected the same", softcap=3.0)
    refused("tensor temperature: expected the same", temperature=data.temperature)
    refused("max_workspace_bytes: expected at least", on="all", max_workspace_bytes=64)
