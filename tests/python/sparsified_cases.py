"""Shared parts of tests of sparsified gradients: devices, problems whose gradient is dz, means over seeds."""

import support
import torch

TAU = 0.25
SPARSIFIED = {"gradient": "always-sparsified", "threshold": TAU}


def head(device, tokens=12, vocab=50, hidden=6, dtype=torch.float32, spread=1.0):
    """Returns leaves input, weight and bias, and a target whose first row is ignored."""
    input, weight, bias, target = support.head(tokens, vocab, hidden, torch.float32, device)
    return *(t.detach().to(dtype).requires_grad_() for t in (input, spread * weight, bias)), target


def logits_problem(device, tokens=8, vocab=40, seed=0, spread=2.0):
    """Makes a problem with logits as input and an identity as weight: the input's gradient is dz."""
    g = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(tokens, vocab, generator=g)).to(device).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), generator=g).to(device)
    return logits, torch.eye(vocab, device=device), target


def gradients(tensors, loss):
    trained = [t for t in tensors if t is not None and t.requires_grad]
    return [g.double().cpu() for g in torch.autograd.grad(loss, trained)]


def check_mean_over_seeds(draw, exact, seeds, unit=1e-5, bias=None):
    """Checks that draw(seed) gives gradients with the mean `exact`, up to a rounding of `unit`, and to a known `bias`.

    Each component's mean over S seeds has a standard error, known from its own spread. Six of them have a probability
    of 2e-9. If few seeds drew anything, the mean has the tail of a Poisson variable instead. Bernstein's bound for that
    probability then holds. Its range need not show in a component's own draws, so the widest of all is used. Over all
    components, the squared distance is S times less than the variance, up to a factor. With twenty effective degrees of
    freedom that factor exceeds 3 with a probability below 1e-6.
    """
    samples = [draw(seed) for seed in range(seeds)]
    for index, expected in enumerate(exact):
        drawn = torch.stack([sample[index] for sample in samples])
        mean, variance = drawn.mean(0), drawn.var(0)
        rounding = unit * expected.abs().max() + 1e-12 + (torch.zeros_like(mean) if bias is None else bias[index])
        tail = 6**2 / 2 * (drawn - mean).abs().max() / (3 * seeds)
        assert ((mean - expected).abs() <= 6 * (variance / seeds).sqrt() + tail + rounding).all()
        assert (mean - expected).norm() <= (3 * variance.sum() / seeds).sqrt() + rounding.norm()
        assert variance.sum() > 0
