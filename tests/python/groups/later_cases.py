"""Backward passes after their forward pass: all ranks learn first if one of them cannot run it."""

import contextlib

import logitless
import logitless.distributed
import pytest
import torch
from logitless import native
from logitless import options as _options
from logitless.distributed import _passes
from logitless.distributed._channel import Channel

from groups.common import D, Data, call, objective, tensors_of
from groups.ranks import sizes

HIDDEN, TOKENS, VOCAB = 64, 24, 3000  # a head that more threads plan differently
LATER = {"reduction": "none"}


def least_budget(pass_, ranks, threads=1):
    """Returns the least budget of a float32 head whose shards have VOCAB rows each."""
    gradients = () if pass_ == _options.FORWARD else ("d_hidden", "d_weight")
    tensors = dict.fromkeys(("hidden", "weight", *gradients), _options.F32) | {"targets": _options.I64}
    spec = native.spec(
        (TOKENS, VOCAB, HIDDEN), tensors, pass_=pass_, reduction="none", group_size=ranks.size, group_vocab=VOCAB,
        vocab_total=VOCAB * ranks.size, max_workspace_bytes=1,
    )  # fmt: skip
    with pytest.raises(logitless.BudgetTooSmallError) as caught:
        native.Plan(spec, threads)
    return caught.value.required_bytes


def large_head(ranks, budget, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_(requires_grad)
    shard = torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_(requires_grad)
    target = torch.randint(0, VOCAB * ranks.size, (TOKENS,), generator=generator)
    return logitless.distributed.linear_cross_entropy(
        hidden, shard, target, group=ranks.group, max_workspace_bytes=budget, **LATER
    )


def case_budget_that_no_backward_pass_fits(ranks):
    budget = least_budget(_options.FORWARD, ranks)
    assert budget < least_budget(_options.BACKWARD, ranks)
    assert torch.isfinite(large_head(ranks, budget, requires_grad=False)).all()
    for _ in range(2):
        with pytest.raises(logitless.BudgetTooSmallError, match="max_workspace_bytes: expected at least"):
            large_head(ranks, budget)


@sizes(2)
def case_budget_that_one_ranks_backward_pass_does_not_fit(ranks):
    """More threads need more memory. The second call has a configuration that was compared before."""
    budget = least_budget(_options.BACKWARD, ranks)
    assert least_budget(_options.FORWARD, ranks, 2) <= budget
    if least_budget(_options.BACKWARD, ranks, 2) <= budget:
        return  # this machine's kernels have the same plan for both
    mine = ranks.rank == 1
    error = logitless.BudgetTooSmallError if mine else logitless.InvalidArgumentError
    match = "max_workspace_bytes: expected at least"
    try:
        torch.set_num_threads(2 if mine else 1)
        for _ in range(2):
            with pytest.raises(error, match=match if mine else f"rank 1 of the group has no plan.*{match}"):
                large_head(ranks, budget).sum().backward()
    finally:
        torch.set_num_threads(1)
    large_head(ranks, budget).sum().backward()


@sizes(2, 3)
def case_gradients_that_one_rank_alone_wants(ranks):
    data = Data(ranks)
    leaf, shard, _ = data.leaves(columns=data.shard)
    match = "tensors that require grad: expected the same .* on rank 1"
    both = LATER | {"hidden": leaf, "weight": shard}
    refused_later(ranks, match, normal=both, hidden=data.input)
    refused_later(ranks, match, normal=both, weight=shard.detach())
    refused_later(ranks, match, normal=both, scale=torch.tensor(1.0, requires_grad=True))
    with torch.no_grad() if ranks.rank == 1 else contextlib.nullcontext(), pytest.raises(ValueError, match=match):
        call(ranks, data, **both)
    call(ranks, data, **both).sum().backward()
    assert leaf.grad is not None and shard.grad is not None


def refused_later(ranks, match, error=ValueError, normal=None, **options):
    """Checks for errors as refused() does, for a call whose head without gradients has other options."""
    data = Data(ranks)
    with pytest.raises(error, match=match):
        call(ranks, data, **(normal or {}) | (options if ranks.rank == 1 else {})).sum().backward()


@sizes(2)
def case_main_grad_that_one_rank_alone_has_or_cannot_use(ranks):
    data = Data(ranks, torch.float32)
    leaf, rows = data.input.clone().requires_grad_(), data.weight[data.shard]
    flat = torch.zeros(2 * rows.numel() - 1)
    shard = flat[: rows.numel()].view(rows.shape).copy_(rows).requires_grad_()
    buffer = torch.zeros_like(shard)
    both = {"hidden": leaf, "weight": shard, "main_grad": buffer}
    for reduction in ("none", "mean"):
        refused_later(ranks, "main_grad: expected the same .* got 'given' on rank 0 and None on rank 1",
                      normal=both | {"reduction": reduction}, main_grad=None)  # fmt: skip
    for error, wrong in (
        (TypeError, buffer.bfloat16()),
        (ValueError, buffer[1:]),
        (ValueError, shard.detach()),
        (ValueError, flat[rows.numel() - 1 :].view(rows.shape)),
    ):
        error, match = (error, "main_grad") if ranks.rank == 1 else (ValueError, "rank 1 .* refused .*: main_grad")
        refused_later(ranks, match, error, normal=both | LATER, main_grad=wrong)
    call(ranks, data, **both | LATER).sum().backward()
    assert (buffer != 0).any() and shard.grad is None


@contextlib.contextmanager
def counted(owner, name):
    """Counts calls of owner.name within the block."""
    calls, original = [], getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *args, **keywords: calls.append(args) or original(*args, **keywords))
        yield calls


PLANNED = {
    "plain": {},
    "statistics": {"return_stats": ("entropy", "nll", "lse")},
    "temperature": {"temperature": "@temperature", "num_items": 7, "reduction": "mean", "return_stats": ("nll", "lse")},
    "main_grad": {"main_grad": True},
    "learned": {"scale": True},
    "gathered": {"sequence_parallel": True},
}


def case_the_backward_pass_is_the_one_that_was_planned(ranks):
    """The configuration is new; a known one is not compared again."""
    for index, (name, options) in enumerate(PLANNED.items()):
        options = options | {"z_loss": 0.125 * (index + 1)}  # each case gets its own pass
        data = Data(ranks, torch.float32, seed=3)
        if options.get("sequence_parallel"):
            data.input = data.input[ranks.part(data)]
        given = tensors_of(data, LATER | options)
        if "main_grad" in options:
            given["main_grad"] = torch.zeros(data.rows_here, D)
        if "scale" in options:
            given["scale"] = torch.tensor(0.5, requires_grad=True)
        for is_new in (True, False):
            leaves = dict(zip(("hidden", "weight", "bias"), data.leaves(columns=data.shard)))
            with counted(Channel, "objects") as compared, counted(_passes, "GroupRun") as planned:
                out = call(ranks, data, **leaves, **given)
                assert (len(compared), len(planned)) == ((1, 3) if is_new else (0, 0)), name
                objective(out, data).backward()
                assert (len(compared), len(planned)) == ((1, 3) if is_new else (0, 0)), name
