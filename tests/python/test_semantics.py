"""PyTorch's F.cross_entropy is the oracle of semantics; edge values and shapes."""

import logitless
import pytest
import torch
import torch.nn.functional as F


def head(tokens=12, vocab=17, hidden=5, dtype=torch.float64):
    input = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, hidden, dtype=dtype, requires_grad=True)
    target = torch.randint(0, vocab, (tokens,))
    target[::4] = -100
    return input, weight, target


def gradients(loss, *tensors):
    return torch.autograd.grad(loss.sum(), tensors)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("is_ignored", [False, True])
@pytest.mark.parametrize("vocab", [1, 2, 17])
@pytest.mark.parametrize("shape", [(5,), (0, 5), (1, 1), (1, 3), (2, 1), (2, 3), (12, 5)], ids=str)
def test_shapes_and_no_valid_row(shape, vocab, is_ignored, reduction):
    input = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab, shape[-1], dtype=torch.float64, requires_grad=True)
    target = torch.full(shape[:-1], -100) if is_ignored else torch.randint(0, vocab, shape[:-1])
    got = logitless.linear_cross_entropy(input, weight, target, reduction=reduction)
    expected = F.cross_entropy(F.linear(input, weight), target, reduction=reduction)
    torch.testing.assert_close(got, expected, equal_nan=True)
    got_gradients = gradients(got, input, weight)
    if is_ignored or target.numel() == 0:  # rows that cost nothing have no gradient, whatever the divisor
        assert all(g.shape == t.shape and not g.any() for g, t in zip(got_gradients, (input, weight)))
    else:
        torch.testing.assert_close(got_gradients, gradients(expected, input, weight))


def test_zero_weight_of_all_valid_rows_is_nan():
    input, weight, target = head()
    got = logitless.linear_cross_entropy(input, weight, target, class_weight=torch.zeros(17, dtype=torch.float64))
    assert got.isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_large_logits(sign, dtype):
    input = torch.full((3, 4), 50.0, dtype=dtype, requires_grad=True)
    weight = torch.zeros(9, 4, dtype=dtype)
    weight[2] = sign * 50.0  # a logit of 1e4 beside zeros
    target = torch.tensor([2, 0, 8])
    got = logitless.linear_cross_entropy(input, weight, target, return_stats=True, reduction="none")
    expected = F.cross_entropy(F.linear(input.double(), weight.double()), target, reduction="none")
    torch.testing.assert_close(got.loss.double(), expected, rtol=1e-6, atol=1e-6)
    got.loss.sum().backward()
    assert input.grad.isfinite().all() and got.entropy.isfinite().all()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_bad_values_stay_in_their_row(bad):
    input, weight, target = head(dtype=torch.float32)
    with torch.no_grad():
        input[1, 2] = bad
    got = logitless.linear_cross_entropy(input, weight, target, reduction="none")
    expected = F.cross_entropy(F.linear(input, weight), target, reduction="none")
    assert torch.equal(got.isfinite(), expected.isfinite())
    clean = torch.ones(12, dtype=torch.bool)
    clean[1] = False
    torch.testing.assert_close(got[clean], expected[clean], rtol=1e-5, atol=1e-5)
    assert gradients(got[clean], input)[0][clean].isfinite().all()


def test_bad_values_of_ignored_rows_cost_nothing():
    input, weight, target = head(dtype=torch.float32)
    with torch.no_grad():
        input[0] = float("nan")
    assert target[0] == -100
    got = logitless.linear_cross_entropy(input, weight, target)
    assert got.isfinite()
    d_hidden, d_weight = gradients(got, input, weight)
    assert (d_hidden[0] == 0).all() and d_weight.isfinite().all()


def test_forbidden_token_as_minus_infinity_bias():
    input, weight, target = head(dtype=torch.float32)
    target = target.clamp(0, 15)
    bias = torch.zeros(17)
    bias[16] = float("-inf")
    got = logitless.linear_cross_entropy(input, weight, target, bias=bias, return_stats=True)
    torch.testing.assert_close(got.loss, F.cross_entropy(F.linear(input, weight, bias), target))
    assert got.entropy.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(got.loss, input, weight))


def test_expanded_input_and_upstream():
    input, weight = torch.randn(1, 5), torch.randn(9, 5, requires_grad=True)
    target = torch.tensor([1, 2, 3])
    got = logitless.linear_cross_entropy(input.expand(3, 5), weight, target, reduction="none")
    expected = F.cross_entropy(F.linear(input.expand(3, 5), weight), target, reduction="none")
    torch.testing.assert_close(gradients(got, weight), gradients(expected, weight))  # sum() sends an expanded 1


def test_int32_targets_and_leading_dimensions():
    input, weight = torch.randn(2, 3, 5), torch.randn(9, 5)
    target = torch.randint(0, 9, (2, 3))
    got = logitless.linear_cross_entropy(input, weight, target.int(), reduction="none", return_stats=True)
    expected = F.cross_entropy(F.linear(input, weight).flatten(0, 1), target.flatten(), reduction="none").view(2, 3)
    torch.testing.assert_close(got.loss, expected)
    assert all(getattr(got, name).shape == (2, 3) for name in ("nll", "lse", "entropy", "argmax"))


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 9])
def test_shift_equals_slices(shift):
    input, weight = torch.randn(2, 4, 5, requires_grad=True), torch.randn(9, 5, requires_grad=True)
    target = torch.randint(0, 9, (2, 4))
    got = logitless.linear_cross_entropy(input, weight, target, shift=shift, reduction="sum", return_stats=["nll"])
    rows = max(0, 4 - shift)
    logits = F.linear(input[:, :rows], weight).flatten(0, 1)
    expected = F.cross_entropy(logits, target[:, 4 - rows :].flatten(), reduction="sum")
    torch.testing.assert_close(got.loss, expected)
    torch.testing.assert_close(gradients(got.loss, input, weight), gradients(expected, input, weight))
    assert (got.nll[:, rows:] == 0).all()
