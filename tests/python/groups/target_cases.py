"""Several targets per row and log-probabilities of given ids, on every rank and in one process."""

from types import SimpleNamespace

import logitless
import pytest
import torch
import torch.distributed as dist
from logitless.compat import cut_cross_entropy, megatron, verl

from groups.common import (
    Data,
    Targets,
    add_cases,
    agree,
    agree_compiled,
    agree_sequence_parallel,
    call,
    check,
    of_group,
    of_whole,
    refused,
)
from groups.ranks import sizes

SEVERAL = {"target_weight": "@target_weight"}
LOG_PROBS = {"function": "linear_log_probs"}
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1, "token_weight": "@token_weight", "reduction": "sum"},
    "none": {"reduction": "none", "z_loss": 0.1, "softcap": 3.0},
    "statistics": {"return_stats": True, "temperature": "@temperature"},
    "small_budget": {"max_workspace_bytes": 200_000, "shift": 1},
}
OPTIONS = {name: SEVERAL | options for name, options in OPTIONS.items()}
add_cases(globals(), OPTIONS, (torch.float64, torch.float32), "targets_", kind=Targets)
add_cases(globals(), {"plain": SEVERAL}, (torch.bfloat16,), "targets_", kind=Targets)


def case_targets_sequence_parallel(ranks):
    agree_sequence_parallel(ranks, Targets(ranks), SEVERAL)


@sizes(2)
def case_one_token_a_rank_with_its_own_temperature(ranks):
    data, options = Targets(ranks, shape=(2,)), SEVERAL | {"temperature": "@temperature"}
    agree(data, of_group(ranks, data, options, own=True), of_whole(data, options), ranks.part(data))


def case_log_probs(ranks):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for options in ({}, {"scale": 0.7, "temperature": 1.5, "max_workspace_bytes": 200_000}, {"softcap": 4.0}):
            check(ranks, options, True, dtype, kind=Targets, **LOG_PROBS)


def case_log_probs_sequence_parallel_and_learned(ranks):
    data, scale = Targets(ranks), torch.tensor(0.8, requires_grad=True)
    whole = of_whole(data, {"scale": scale}, **LOG_PROBS)
    for own in (True, False):
        learned = torch.tensor(0.8, requires_grad=True)
        group = of_group(ranks, data, {"scale": learned}, own=own, **LOG_PROBS)
        agree(data, group, whole, ranks.part(data), gradients=1e-13)
        torch.testing.assert_close(learned.grad, scale.grad, rtol=1e-6, atol=0)


@sizes(2)
def case_log_probs_compiled_and_of_more_dimensions(ranks):
    agree_compiled(ranks, Targets(ranks, shape=(4, 6)), **LOG_PROBS)


@sizes(2)
def case_log_probs_in_a_group_of_one(ranks):
    alone = [dist.new_group([rank]) for rank in range(ranks.size)][ranks.rank]
    data = Targets(ranks)
    got = call(ranks.within(alone), data, weight=data.weight, **LOG_PROBS)
    assert torch.equal(got, logitless.linear_log_probs(data.input, data.weight, data.target))


@sizes(2)
def case_targets_that_one_rank_alone_has(ranks):
    data = Targets(ranks)
    several = {"targets": data.target, "target_weight": data.target_weight}
    refused(ranks, r"targets: expected the same .* \[24, 5\]' on rank 1", **several)
    refused(ranks, r"targets: expected the same .* \[24, 5\]' on rank 0 and .*\[24, 4\]' on rank 1", normal=several,
            targets=data.target[:, :4], target_weight=data.target_weight[:, :4])  # fmt: skip
    match = "rank 1 .* refused .*: " if ranks.rank != 1 else "^"
    refused(ranks, match + "target_weight: expected shape", normal=several, target_weight=data.target_weight[:, :4])
    refused(
        ranks,
        match + "class_weight: expected None with several targets a row",
        normal=several,
        class_weight=data.class_weight,
    )
    refused(ranks, match + "targets: expected at most 64", normal=several, targets=data.target.repeat(1, 13),
            target_weight=data.target_weight.repeat(1, 13))  # fmt: skip
    refused(ranks, match + "targets: expected shape .* need target_weight", normal=several, target_weight=None)
    wrong = data.target.clone()
    wrong[3, 2] = data.vocab
    refused(ranks, rf"targets: expected 0 <= target < {data.vocab} .* at targets\[3, 2\]", on="all", targets=wrong,
            target_weight=data.target_weight)  # fmt: skip


@sizes(2, 3)
def case_log_probs_that_one_rank_asks_for_otherwise(ranks):
    data = Targets(ranks)

    def refused_log_probs(match, **options):
        refused(ranks, match, data=data, **LOG_PROBS, **options)

    refused_log_probs("scale: expected the same .* on rank.* and 2.0 on rank 1", scale=2.0)
    refused_log_probs("ids: expected the same .* got others on rank 1", ids=data.target.flip(0))
    refused_log_probs(r"ids: expected the same .*\[24, 5\]' on rank.* \[24, 4\]' on rank 1", ids=data.target[:, :4])
    refused_log_probs("tensors that require grad: expected the same", hidden=data.leaves()[0])
    wrong = data.target.clone()
    wrong[3, 2] = data.vocab
    refused_log_probs(rf"ids: expected 0 <= target < {data.vocab} .* at ids\[3, 2\]", on="all", ids=wrong)
    mine = ranks.rank == 1
    refused_log_probs("ids: expected" if mine else "rank 1 .* refused .*: ids: expected", ids=data.target[:, 0])
    refused_log_probs("max_workspace_bytes: expected at least", on="all", max_workspace_bytes=64)
    with pytest.raises(ValueError, match="function: expected the same .*'linear_log_probs' on rank 1"):
        call(ranks, data, **LOG_PROBS if mine else {"target_weight": data.target_weight})


@sizes(2)
def case_labels_of_megatron(ranks):
    """It takes labels that fit its indexing of logits [s, b, V / tp]. Others are an IndexError on every rank."""
    data = Data(ranks, torch.float32, shape=(4, 3))
    fields = {"sequence_parallel": False, "skip_bias_add": True, "gradient_accumulation_fusion": False}
    layer = SimpleNamespace(tp_group=ranks.group, **fields)
    deferred = megatron._Deferred(layer, data.input, data.weight[data.shard])
    labels = data.target.t()
    expected = logitless.linear_cross_entropy(data.input, data.weight, data.target, reduction="none").t()
    for dtype in (torch.int64, torch.int32):
        torch.testing.assert_close(megatron._loss(labels.to(dtype), deferred, {}), expected)
    shapes = ((3, 4, 2), (3, 4, 1), (3, 5), (2, 4), (4, 3), (12, 1), (12,), ())
    wrong = [torch.zeros(shape, dtype=torch.int64) for shape in shapes] + [labels.float(), labels.short(), labels > 0]
    for other in wrong:
        with pytest.raises(IndexError):
            megatron._loss(other, deferred, {})
    with pytest.raises(IndexError if ranks.rank == 1 else ValueError, match="labels: expected"):
        megatron._loss(wrong[0] if ranks.rank == 1 else labels, deferred, {})
    torch.testing.assert_close(megatron._loss(labels, deferred, {}), expected)


@sizes(2)
def case_targets_that_verl_and_cce_assert(ranks):
    """All ranks raise, even if only one of them has other targets."""
    data = Data(ranks, torch.float32, shape=(4, 3))
    start = data.start
    part = cut_cross_entropy.VocabParallelOptions(start, start + data.rows[ranks.rank], ranks.group)
    shard = data.weight[data.shard]
    calls = (
        lambda target: verl.linear_cross_entropy(data.input, shard, target, 1.0, "none", ranks.group)[0],
        lambda target: cut_cross_entropy.linear_cross_entropy(data.input, shard, target, vocab_parallel_options=part),
    )
    wrong = data.target[..., None].expand(4, 3, 2)
    for named in calls:
        before = named(data.target)
        with pytest.raises(AssertionError, match="expected shape"):
            named(wrong)
        with pytest.raises(AssertionError if ranks.rank == 1 else ValueError, match="expected shape"):
            named(wrong if ranks.rank == 1 else data.target)
        assert torch.equal(named(data.target), before)
