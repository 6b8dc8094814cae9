"""logitless.compat.quack beside F.cross_entropy over logits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from exactness import check, head, logits_of
from logitless.compat import quack


def reference(input, weight, bias, target, **options):
    return F.cross_entropy(logits_of(input, weight, bias), target, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_function(reduction):
    leaves, target = head()
    check(
        lambda input, weight, bias: quack.linear_cross_entropy_func(
            input, weight, bias, target, reduction=reduction, inplace_backward=True
        ),
        lambda input, weight, bias: reference(input, weight, bias, target, reduction=reduction),
        leaves,
        [torch.float64, torch.float32, torch.bfloat16],
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("function", [quack.chunked_linear_cross_entropy, quack.scaled_exp_linear_cross_entropy])
def test_chunked_functions_take_every_size(function, reduction):
    leaves, target = head(15)
    del leaves["bias"]
    check(
        lambda input, weight: function(
            input.reshape(3, 5, -1), weight, target.reshape(3, 5), chunk_size=8, reduction=reduction
        ),
        lambda input, weight: reference(input, weight, None, target, reduction=reduction),
        leaves,
    )


@pytest.mark.parametrize("rows, vocab, hidden", list(itertools.product([1, 2], [1, 2], [1, 3])))
def test_tiny_shapes(rows, vocab, hidden):
    leaves, target = head(rows, vocab, hidden, ignored=())
    check(
        lambda input, weight, bias: quack.linear_cross_entropy_func(input, weight, bias, target),
        lambda input, weight, bias: reference(input, weight, bias, target),
        leaves,
    )


@pytest.mark.parametrize("rows", [0, 4])
def test_no_valid_row(rows):
    input, weight, target = torch.randn(rows, 5), torch.randn(7, 5), torch.full((rows,), 3)
    for function in (quack.chunked_linear_cross_entropy, quack.scaled_exp_linear_cross_entropy):
        assert function(input, weight, target, ignore_index=3).isnan()
        assert function(input, weight, target, ignore_index=3, reduction="sum") == 0
    rows_of = quack.linear_cross_entropy_func(input, weight, None, target, 3, "none")
    assert rows_of.shape == (rows,) and (rows_of == 0).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_module(reduction, bias):
    head = quack.LinearCrossEntropy(8, 11, bias, ignore_index=2, reduction=reduction, chunk_size=8)
    linear = torch.nn.Linear(8, 11, bias)
    assert list(head.state_dict()) == list(linear.state_dict())
    head.load_state_dict(linear.state_dict())
    input, target = torch.randn(2, 8, 8), torch.randint(0, 11, (2, 8))
    expected = F.cross_entropy(linear(input).flatten(0, 1), target.flatten(), ignore_index=2, reduction=reduction)
    got = head(input, target)
    torch.testing.assert_close(got, expected.reshape(got.shape))
    got.sum().backward(), expected.sum().backward()
    for a, b in zip(head.parameters(), linear.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


def test_refusals():
    input, weight, target = torch.randn(8, 8), torch.randn(16, 8), torch.zeros(8, dtype=torch.long)
    for function in (quack.chunked_linear_cross_entropy, quack.scaled_exp_linear_cross_entropy):
        with pytest.raises(ValueError, match='reduction: expected "mean" or "sum"'):
            function(input, weight, target, reduction="none")
    with pytest.raises(ValueError, match="reduction"):
        quack.linear_cross_entropy_func(input, weight, None, target, reduction="avg")
