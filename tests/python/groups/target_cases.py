"""Several targets a row and log-probabilities of given ids: what every rank finds, against one process."""

from types import SimpleNamespace

import logitless
import logitless.distributed
import pytest
import torch
import torch.distributed as dist
from logitless.compat import cut_cross_entropy, megatron, verl

from groups.fault_cases import call, refused
from groups.group_cases import Data, assert_close, check
from groups.ranks import sizes


class Targets(Data):
    """Five of them a row, some of which are none or come twice."""

    def __init__(self, ranks, dtype=torch.float64, seed=0, shape=(24,), count=5):
        super().__init__(ranks, dtype, seed, shape)
        generator = torch.Generator().manual_seed(seed + 1)
        several = torch.randint(0, self.vocab, (*shape, count), generator=generator)
        several[..., 1][torch.rand(shape, generator=generator) < 0.3] = -100
        several[..., 2] = several[..., 0]
        several[self.target == -100] = -100
        self.target = several
        weight = torch.rand((*shape, count), generator=generator, dtype=torch.float64) - 0.25
        self.target_weight = weight.to(torch.float64 if dtype == torch.float64 else torch.float32)
        self.upstream_of_ids = torch.randn((*shape, count), generator=generator, dtype=torch.float64)


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1, "token_weight": "@token_weight", "reduction": "sum"},
    "none": {"reduction": "none", "z_loss": 0.1, "softcap": 3.0},
    "statistics": {"return_stats": True, "temperature": "@temperature"},
    "small_budget": {"max_workspace_bytes": 200_000, "shift": 1},
}


def _make(name, options, dtype):
    def case(ranks):
        check(ranks, {"target_weight": "@target_weight"} | options, has_bias=name == "plain", dtype=dtype, kind=Targets)

    case.sizes = (2, 3, 4) if name == "plain" else ((3,) if dtype == torch.float64 else (2,))
    globals()[f"case_targets_{name}_{str(dtype).removeprefix('torch.')}"] = case


for _name, _options in OPTIONS.items():
    for _dtype in (torch.float64, torch.float32):
        _make(_name, _options, _dtype)
_make("plain", {}, torch.bfloat16)


def parts(data, ranks):
    """This rank's tokens."""
    count = data.input.shape[0] // ranks.size
    return slice(ranks.rank * count, (ranks.rank + 1) * count)


def case_targets_sequence_parallel(ranks):
    data = Targets(ranks)
    mine = parts(data, ranks)
    whole, weight = data.input.clone().requires_grad_(), data.weight.clone().requires_grad_()
    expected = logitless.linear_cross_entropy(whole, weight, data.target, target_weight=data.target_weight)
    expected.backward()
    for own in (True, False):
        leaf, shard = data.input[mine].clone().requires_grad_(), data.weight[data.shard].clone().requires_grad_()
        rows = mine if own else slice(None)
        loss = logitless.distributed.linear_cross_entropy(
            leaf, shard, data.target[rows], group=ranks.group, target_weight=data.target_weight[rows],
            sequence_parallel=True,
        )  # fmt: skip
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(leaf.grad, whole.grad[mine], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(shard.grad, weight.grad[data.shard], rtol=1e-12, atol=1e-14)


@sizes(2)
def case_one_token_a_rank_with_its_own_temperature(ranks):
    data = Targets(ranks, shape=(2,))
    mine = slice(ranks.rank, ranks.rank + 1)
    expected = logitless.linear_cross_entropy(
        data.input, data.weight, data.target, target_weight=data.target_weight, temperature=data.temperature
    )
    loss = logitless.distributed.linear_cross_entropy(
        data.input[mine], data.weight[data.shard], data.target[mine], group=ranks.group, sequence_parallel=True,
        target_weight=data.target_weight[mine], temperature=data.temperature[mine],
    )  # fmt: skip
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def log_probs_of_whole(data, options):
    leaves = [t.clone().requires_grad_() for t in (data.input, data.weight, data.bias)]
    found = logitless.linear_log_probs(leaves[0], leaves[1], data.target, linear_bias=leaves[2], **options)
    (found * data.upstream_of_ids.to(found.dtype)).sum().backward()
    return found.detach(), [leaf.grad for leaf in leaves]


def case_log_probs(ranks):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for options in ({}, {"scale": 0.7, "temperature": 1.5, "max_workspace_bytes": 200_000}, {"softcap": 4.0}):
            data = Targets(ranks, dtype)
            exact, exact_gradients = log_probs_of_whole(data.to(torch.float64), options)
            naive, naive_gradients = log_probs_of_whole(data, options)
            leaves = [data.input.clone().requires_grad_()]
            leaves += [t[data.shard].clone().requires_grad_() for t in (data.weight, data.bias)]
            found = logitless.distributed.linear_log_probs(
                leaves[0], leaves[1], data.target, group=ranks.group, linear_bias=leaves[2], **options
            )
            (found * data.upstream_of_ids.to(found.dtype)).sum().backward()
            logit = (data.input.double() @ data.weight.double().T + data.bias.double()).abs().max()
            assert_close("log_probs", found, naive, exact, max(logit, exact.abs().max()), ranks)
            for leaf, part, near, whole in zip(
                leaves, (slice(None), data.shard, data.shard), naive_gradients, exact_gradients
            ):
                assert_close("gradient", leaf.grad, near[part], whole[part], max(1, logit) * whole.abs().max(), ranks)
            every = [None] * ranks.size
            dist.all_gather_object(every, found.detach())
            assert all(torch.equal(other, found) for other in every), "between ranks"


def case_log_probs_sequence_parallel_and_learned(ranks):
    data = Targets(ranks)
    mine = parts(data, ranks)
    scale, whole = torch.tensor(0.8, requires_grad=True), data.input.clone().requires_grad_()
    expected = logitless.linear_log_probs(whole, data.weight, data.target, scale=scale)
    (expected * data.upstream_of_ids).sum().backward()
    for own in (True, False):
        leaf, learned = data.input[mine].clone().requires_grad_(), torch.tensor(0.8, requires_grad=True)
        found = logitless.distributed.linear_log_probs(
            leaf, data.weight[data.shard], data.target[mine if own else slice(None)], group=ranks.group, scale=learned,
            sequence_parallel=True,
        )  # fmt: skip
        (found * data.upstream_of_ids).sum().backward()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(leaf.grad, whole.grad[mine], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(learned.grad, scale.grad, rtol=1e-6, atol=0)


@sizes(2)
def case_log_probs_compiled_and_of_more_dimensions(ranks):
    data = Targets(ranks, shape=(4, 6))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(hidden, shard, ids):
        return logitless.distributed.linear_log_probs(torch.tanh(hidden), shard, ids, group=ranks.group) * 2

    leaf, other = data.input.clone().requires_grad_(), data.input.clone().requires_grad_()
    found = step(leaf, data.weight[data.shard], data.target)
    found.sum().backward()
    expected = logitless.linear_log_probs(torch.tanh(other), data.weight, data.target) * 2
    expected.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-12, atol=1e-14)


@sizes(2)
def case_log_probs_in_a_group_of_one(ranks):
    alone = [dist.new_group([rank]) for rank in range(ranks.size)][ranks.rank]
    data = Targets(ranks)
    got = logitless.distributed.linear_log_probs(data.input, data.weight, data.target, group=alone)
    assert torch.equal(got, logitless.linear_log_probs(data.input, data.weight, data.target))


@sizes(2)
def case_targets_that_one_rank_alone_has(ranks):
    data = Targets(ranks)
    several = {"target": data.target, "target_weight": data.target_weight}
    refused(ranks, r"target: expected the same .* \[24, 5\]' on rank 1", **several)
    refused(ranks, r"target: expected the same .* \[24, 5\]' on rank 0 and .*\[24, 4\]' on rank 1", normal=several,
            target=data.target[:, :4], target_weight=data.target_weight[:, :4])  # fmt: skip
    match = "rank 1 .* refused .*: " if ranks.rank != 1 else "^"
    refused(ranks, match + "target_weight: expected shape", normal=several, target_weight=data.target_weight[:, :4])
    refused(ranks, match + "weight: expected None with several targets a row", normal=several, weight=data.class_weight)
    refused(ranks, match + "target: expected at most 64", normal=several, target=data.target.repeat(1, 13),
            target_weight=data.target_weight.repeat(1, 13))  # fmt: skip
    refused(ranks, match + "target: expected shape .* want target_weight", normal=several, target_weight=None)
    wrong = data.target.clone()
    wrong[3, 2] = data.vocab
    refused(ranks, rf"target: expected 0 <= target < {data.vocab} .* at target\[3, 2\]", on="all", target=wrong,
            target_weight=data.target_weight)  # fmt: skip


def log_probs(ranks, data, **options):
    arguments = {"input": data.input, "shard": data.weight[data.shard], "ids": data.target} | options
    return logitless.distributed.linear_log_probs(
        arguments.pop("input"), arguments.pop("shard"), arguments.pop("ids"), group=ranks.group, **arguments
    )


@sizes(2, 3)
def case_log_probs_that_one_rank_asks_for_otherwise(ranks):
    data = Targets(ranks)

    def refused_log_probs(match, error=ValueError, on=1, **options):
        with pytest.raises(error, match=match):
            log_probs(ranks, data, **(options if on in (ranks.rank, "all") else {}))
        assert torch.isfinite(log_probs(ranks, data)).all()

    refused_log_probs("scale: expected the same .* on rank.* and 2.0 on rank 1", scale=2.0)
    refused_log_probs("ids: expected the same .* got others on rank 1", ids=data.target.flip(0))
    refused_log_probs(r"ids: expected the same .*\[24, 5\]' on rank.* \[24, 4\]' on rank 1", ids=data.target[:, :4])
    refused_log_probs("tensors that require grad: expected the same", input=data.input.clone().requires_grad_())
    wrong = data.target.clone()
    wrong[3, 2] = data.vocab
    refused_log_probs(rf"ids: expected 0 <= target < {data.vocab} .* at ids\[3, 2\]", on="all", ids=wrong)
    mine = ranks.rank == 1
    refused_log_probs("ids: expected" if mine else "rank 1 .* refused .*: ids: expected", ids=data.target[:, 0])
    refused_log_probs("max_workspace_bytes: expected at least", on="all", max_workspace_bytes=64)
    with pytest.raises(ValueError, match="function: expected the same .*'linear_log_probs' on rank 1"):
        if mine:
            log_probs(ranks, data)
        else:
            call(ranks, data, target_weight=data.target_weight)


@sizes(2)
def case_labels_of_megatron(ranks):
    """Those that its indexing of logits [s, b, V / tp] takes; the others are an IndexError on every rank."""
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
    """Told to all ranks, also where one of them alone has others."""
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
