"""A common offset of a row's logits changes no loss and no gradient in any interface."""

import functools

import logitless
import logitless.numpy
import numpy as np
import pytest
import torch
import torch.nn.functional as F

ROWS, VOCAB, HIDDEN = 9, 50, 4


def head(dtype):
    """Returns logits that are even numbers, exact at every offset below, and upstream gradients."""
    rng = np.random.default_rng(0)
    input = rng.integers(-2, 3, (ROWS, HIDDEN)).astype(dtype)
    input[:, -1] = 1
    weight = 2 * rng.integers(-1, 2, (VOCAB, HIDDEN)).astype(dtype)
    weight[:, -1] = 0
    target, upstream = rng.integers(0, VOCAB, ROWS), rng.standard_normal(ROWS).astype(dtype)
    target[3] = -100
    return input, weight, np.zeros(VOCAB, dtype), target, upstream


def canonical(input, weight, bias, target, upstream, dtype):
    """Returns the loss of each row and gradients in that precision."""
    leaves = [torch.tensor(a, dtype=dtype).requires_grad_() for a in (input, weight, bias)]
    loss = F.cross_entropy(F.linear(*leaves), torch.tensor(target), reduction="none")
    loss.backward(torch.tensor(upstream, dtype=dtype))
    return [loss.detach().double().numpy()] + [leaf.grad.double().numpy() for leaf in leaves]


def by_numpy(arrays, target, upstream, **options):
    input, weight, bias = arrays
    loss_shape = upstream if options["reduction"] == "none" else None
    got = logitless.numpy.linear_cross_entropy(
        input, weight, target, bias=bias, gradients=True, grad_loss=loss_shape, **options
    )
    return got.loss, got.d_hidden, got.d_weight, got.d_bias


def by_torch(function, arrays, target, upstream, **options):
    leaves = [torch.tensor(a).requires_grad_() for a in arrays]
    loss = function(leaves[0], leaves[1], torch.tensor(target), bias=leaves[2], **options)
    loss.backward(torch.tensor(upstream) if options["reduction"] == "none" else None)
    return [loss.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves)]


def by_log_probs(arrays, target, upstream, **_):
    leaves = [torch.tensor(a).requires_grad_() for a in arrays]
    log_probs = logitless.linear_log_probs(leaves[0], leaves[1], torch.tensor(target)[:, None], bias=leaves[2])
    (-log_probs[:, 0]).backward(torch.tensor(upstream))
    return [-log_probs[:, 0].detach().numpy(), *(leaf.grad.numpy() for leaf in leaves)]


def compiled(*args, **options):
    return torch.compile(logitless.linear_cross_entropy, backend="aot_eager", fullgraph=True)(*args, **options)


INTERFACES = {
    "numpy": by_numpy,
    "eager": functools.partial(by_torch, logitless.linear_cross_entropy),
    "compiled": functools.partial(by_torch, compiled),
    "log_probs": by_log_probs,
}
SPARSIFIED = {"gradient": "sparsified", "threshold": 2.0**-126, "seed": 1}  # every element is kept


OFFSETS = [(0.0, "bias"), (1e4, "bias"), (-1e6, "column"), (3e7, "bias"), (2.0**50, "column")]


@pytest.mark.parametrize("offset,place", OFFSETS)
@pytest.mark.parametrize("options", [{}, SPARSIFIED], ids=["exact", "sparsified"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    "interface", [pytest.param(name, marks=pytest.mark.slow if name == "compiled" else ()) for name in INTERFACES]
)
def test_changes_nothing(interface, dtype, reduction, options, offset, place):
    if offset == 2.0**50 and dtype == np.float32:
        pytest.skip("even numbers beside it are not exact")
    if interface == "log_probs" and (reduction == "sum" or options):
        pytest.skip("has no such option")
    if interface == "compiled" and (reduction == "sum" or options) and offset != 3e7:
        pytest.skip("the operators are those of the other cases")
    input, weight, bias, target, upstream = head(dtype)
    if reduction == "sum":
        upstream = np.ones_like(upstream)
    truth = canonical(input, weight, bias, target, upstream, torch.float64)
    if dtype == np.float32:
        naive = canonical(input, weight, bias, target, upstream, torch.float32)
        bounds = [2 * np.abs(a - b).max() + 2.0**-24 * np.abs(b).max() for a, b in zip(naive, truth)]
    else:
        bounds = [ROWS * VOCAB * 2.0**-53 * np.abs(b).max() for b in truth]
    if place == "bias":
        bias += dtype(offset)
    else:
        weight[:, -1] = offset
    got = list(INTERFACES[interface]((input, weight, bias), target, upstream, reduction=reduction, **options))
    if reduction == "sum":
        truth[0], bounds[0] = truth[0].sum(), ROWS * bounds[0]
    features = slice(None, -1)  # in the weight's last column all differences are of numbers like the offset
    truth[1], got[1] = truth[1][:, features], got[1][:, features]
    for name, a, b, bound in zip(("loss", "d_hidden", "d_weight", "d_bias"), got, truth, bounds):
        assert np.abs(a - b).max() <= bound, name
