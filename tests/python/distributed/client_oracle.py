"""What several ranks compute, beside one process in float64: the bound is derived, not tuned."""

import torch
import torch.nn.functional as F


def excess(ours, theirs, true):
    """The largest error of ours, in units of what is allowed: twice that of the same computation by plain PyTorch, and
    a rounding of sums of some hundred terms of the largest element."""
    ours, theirs, true = (tensor.detach().double() for tensor in (ours, theirs, true))
    assert ours.shape == theirs.shape == true.shape, (ours.shape, theirs.shape, true.shape)
    allowed = 2 * (theirs - true).abs().max() + 2**-20 * true.abs().max()
    return float((ours - true).abs().max() / allowed)


def loss_and_gradients(hidden, classifier, target, bias=None, dtype=torch.float32, **options):
    """Of PyTorch on one process."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, classifier, *(() if bias is None else (bias,)))]
    logits = F.linear(leaves[0], leaves[1], leaves[2] if bias is not None else None)
    options = {name: value.to(dtype) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)
    (loss * factors(loss)).sum().backward()
    return [loss.detach().reshape(target.shape) if loss.dim() else loss.detach(), *(leaf.grad for leaf in leaves)]


def factors(loss):
    """Upstream gradients: of losses of rows, each another."""
    return torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
