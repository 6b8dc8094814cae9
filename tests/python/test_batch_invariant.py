"""batch_invariant: a row's statistics have the same bits alone, in any batch, and with or without gradients."""

import logitless
import logitless.numpy
import numpy as np
import pytest
import torch

STATS = ("nll", "lse", "entropy")
OPTIONS = {"batch_invariant": True, "reduction": "none", "return_stats": STATS}


def problem(dtype, tokens=300, vocab=1500, hidden=48):
    g = torch.Generator().manual_seed(1)
    input = torch.randn(tokens, hidden, generator=g).to(dtype)
    weight = torch.randn(vocab, hidden, generator=g).to(dtype)
    return input, weight, torch.randint(0, vocab, (tokens,), generator=g)


def same(got, expected, rows):
    for name in STATS:
        assert torch.equal(getattr(got, name), getattr(expected, name)[rows]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 7, 128, 300])
def test_rows_alone_and_shuffled(dtype, count):
    input, weight, target = problem(dtype)
    expected = logitless.linear_cross_entropy(input, weight, target, softcap=20, **OPTIONS)
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(2))[:count]
    same(logitless.linear_cross_entropy(input[rows], weight, target[rows], softcap=20, **OPTIONS), expected, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_temperatures_of_their_own_alone(dtype):
    input, weight, target = problem(dtype, tokens=24)
    temperature = torch.linspace(0.4, 2.1, 24)
    options = OPTIONS | {"scale": 0.7, "softcap": 30}
    expected = logitless.linear_cross_entropy(input, weight, target, temperature=temperature, **options)
    for row in range(24):
        rows = slice(row, row + 1)
        alone = logitless.linear_cross_entropy(
            input[rows], weight, target[rows], temperature=temperature[rows], **options
        )
        same(alone, expected, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("budget", [None, 3 << 20])
def test_rollout_equals_trainer(dtype, budget):
    input, weight, target = problem(dtype)
    rollout = logitless.linear_cross_entropy(input, weight, target, **OPTIONS)
    options = OPTIONS | {"reduction": "mean", "differentiable_stats": False, "max_workspace_bytes": budget}
    trained = logitless.linear_cross_entropy(input.requires_grad_(), weight.requires_grad_(), target, **options)
    same(trained, rollout, slice(None))
    trained.loss.backward()
    assert input.grad is not None


def test_module_numpy_and_compiled_code():
    input, weight, target = problem(torch.float32)
    expected = logitless.linear_cross_entropy(input, weight, target, **OPTIONS)
    options = {"reduction": "none", "batch_invariant": True}
    module, head = logitless.LinearCrossEntropyLoss(48, 1500, **options), logitless.nn.FusedHead(48, 1500, **options)
    module.linear.weight = head.weight = torch.nn.Parameter(weight)
    for made in (module, head):
        assert "batch_invariant=True" in repr(made)
        same(made(input[5:9], target[5:9], return_stats=STATS), expected, slice(5, 9))
    result = logitless.numpy.linear_cross_entropy(input[5:9].numpy(), weight.numpy(), target[5:9].numpy(), **OPTIONS)
    assert np.array_equal(result.nll, expected.nll[5:9].numpy())
    compiled = torch.compile(logitless.linear_cross_entropy, fullgraph=True, backend="eager")
    same(compiled(input[:3], weight, target[:3], **OPTIONS), expected, slice(0, 3))


def test_the_plan_says_so():
    assert "in any batch" in logitless.plan(64, 1000, 32, batch_invariant=True).reason
    assert "in any batch" not in logitless.plan(64, 1000, 32).reason
