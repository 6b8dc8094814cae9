"""Ranks with different arguments: every rank raises, and a right call works afterwards."""

import pytest

from groups.common import Data, call, refused
from groups.ranks import sizes


@sizes(2, 3)
def case_options_that_differ(ranks):
    refused(ranks, "label_smoothing: expected the same on all ranks of the group, got 0.0 on rank.* and 0.1 on rank 1",
            label_smoothing=0.1)  # fmt: skip
    refused(ranks, "reduction: expected the same .* got 'mean' on rank 0 and 'sum' on ranks? 1", on=0,
            normal={"reduction": "sum"}, reduction="mean")  # fmt: skip
    refused(ranks, "ignore_index: expected the same", ignore_index=3)
    refused(ranks, "batch_invariant: expected the same", batch_invariant=True)
    refused(ranks, "return_stats: expected the same", return_stats=True)
    refused(
        ranks, "sequence_parallel: expected the same .* got False on rank.* and True on rank 1", sequence_parallel=True
    )


@sizes(2)
def case_options_that_change_on_one_rank(ranks):
    """Each rank has had these configurations before."""
    data = Data(ranks)
    for scale in (0.5, 0.25):
        call(ranks, data, scale=scale)
    refused(ranks, "scale: expected the same", scale=0.5, normal={"scale": 0.25})


@sizes(2)
def case_tensors_that_differ(ranks):
    data = Data(ranks)
    refused(ranks, r"hidden: expected the same .* \[24, 12\]' on rank.* \[20, 12\]' on rank 1", hidden=data.input[:20],
            targets=data.target[:20])  # fmt: skip
    refused(ranks, "targets: expected the same .* got others on rank 1 than on rank 0", targets=data.target.flip(0))
    refused(ranks, "bias: expected the same", bias=data.bias[data.shard])
    shard = data.weight[data.shard]
    refused(ranks, r"weight: expected the same .* 'torch.float32 .*' on rank.* 'torch.bfloat16 .*' on rank 1",
            normal={"hidden": data.input.float(), "weight": shard.float()},
            weight=shard.bfloat16())  # fmt: skip
    refused(ranks, "tensor token_weight: expected the same", token_weight=data.token_weight)
    refused(ranks, "tensors that require grad: expected the same", hidden=data.leaves()[0])


@sizes(2)
def case_arguments_that_one_rank_refuses(ranks):
    match = "rank 1 of the group refused its arguments: TypeError" if ranks.rank != 1 else "targets: expected"
    error = ValueError if ranks.rank != 1 else TypeError
    refused(ranks, match, error, targets=Data(ranks).target.double())


@sizes(2)
def case_targets_out_of_range(ranks):
    data = Data(ranks)
    target = data.target.clone()
    target[5] = data.vocab
    message = rf"targets: expected 0 <= target < {data.vocab} or ignore_index -100, got {data.vocab} at targets\[5\]"
    refused(ranks, message, on="all", targets=target)
    refused(ranks, "targets: expected the same", targets=target)


@sizes(2)
def case_shards_that_make_no_vocabulary(ranks):
    data = Data(ranks)
    refused(ranks, rf"vocab_total: expected {data.vocab} .the rows of all ranks' shards.*, got 56", on="all",
            vocab_total=56)  # fmt: skip
    refused(ranks, "vocab_start: expected shards that follow one another", on="all", vocab_start=ranks.rank)
    refused(ranks, "vocab_start given: expected the same", vocab_start=0)
    refused(ranks, "weight: expected rows on one rank", on="all", weight=data.weight[:0])
    refused(ranks, rf"class_weight: expected shape \[{data.vocab}\]", on="all", class_weight=data.class_weight[1:])


@sizes(2)
def case_what_groups_do_not_do(ranks):
    refused(ranks, "max_workspace_bytes: expected at least", on="all", max_workspace_bytes=64)
    refused(ranks, "kept_count only with", on="all", return_stats=("kept_count",))


@sizes(2)
def case_sequence_parallel_parts_that_differ(ranks):
    data = Data(ranks)
    count = 5 if ranks.rank == 1 else 4
    with pytest.raises(ValueError, match=r"hidden: expected the same on all ranks of the group"):
        call(ranks, data, hidden=data.input[:count], targets=data.target[:count], sequence_parallel=True)
    with pytest.raises(ValueError, match=r"targets: expected shape .* with sequence_parallel"):
        call(ranks, data, targets=data.target[:5], sequence_parallel=True)
