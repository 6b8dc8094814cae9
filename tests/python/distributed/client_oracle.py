"""Compares several ranks with one process in float64; the bound is derived, not tuned."""

import pytest
import torch
import torch.nn.functional as F


def on(ranks):
    """Marks a test that takes ranks for that fixture and for two GPUs."""
    return pytest.mark.parametrize("ranks", [ranks, pytest.param("two_gpus", marks=pytest.mark.gpu)], indirect=True)


def excess(ours, theirs, true):
    """Returns the largest error of ours in units of the allowed one.

    The allowed error is twice that of the same computation by plain PyTorch, plus a rounding of sums of some hundred
    terms of the largest element.
    """
    ours, theirs, true = (tensor.detach().double() for tensor in (ours, theirs, true))
    assert ours.shape == theirs.shape == true.shape, (ours.shape, theirs.shape, true.shape)
    allowed = 2 * (theirs - true).abs().max() + 2**-20 * true.abs().max()
    return float((ours - true).abs().max() / allowed)


def check_values(by_rank, theirs, true):
    """Compares the ranks' values, given in the order of the references."""
    for rank, values in enumerate(by_rank):
        for place, three in enumerate(zip(values, theirs, true, strict=True)):
            assert excess(*three) <= 1, (rank, place)


def check_steps(by_rank, true):
    """Compares each rank's losses and gradients by name, of the stock head and of the fused one."""
    for stock, fused in by_rank:
        torch.testing.assert_close(fused[0], stock[0])
        assert fused[1].keys() == true.keys()
        for name, gradient in true.items():
            assert excess(fused[1][name], stock[1][name], gradient) <= 1, name


def loss_and_gradients(hidden, weight, target, bias=None, class_weight=None, dtype=torch.float32, **options):
    """Computes loss and gradients by PyTorch on one process."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight, *(() if bias is None else (bias,)))]
    logits = F.linear(leaves[0], leaves[1], leaves[2] if bias is not None else None)
    class_weight = None if class_weight is None else class_weight.to(dtype)
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), weight=class_weight, **options)
    (loss * factors(loss)).sum().backward()
    return [loss.detach().reshape(target.shape) if loss.dim() else loss.detach(), *(leaf.grad for leaf in leaves)]


def factors(loss):
    """Returns upstream gradients of the rows' losses, all different."""
    return torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype, device=loss.device).reshape(loss.shape)
