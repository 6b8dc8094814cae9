"""What the tests of sparsified gradients share: devices, problems whose gradient is dz itself, and means over seeds."""

import support
import torch

TAU = 0.25
SPARSIFIED = {"gradient": "always-sparsified", "threshold": TAU}


def head(device, tokens=12, vocab=50, hidden=6, dtype=torch.float32, spread=1.0):
    """Leaves input, weight and bias, and a target whose first row is ignored."""
    input, weight, bias, target = support.head(tokens, vocab, hidden, torch.float32, device)
    return *(t.detach().to(dtype).requires_grad_() for t in (input, spread * weight, bias)), target


def logits_problem(device, tokens=8, vocab=40, seed=0, spread=2.0):
    """Logits as input and an identity as weight: the gradient of the input is dz."""
    g = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(tokens, vocab, generator=g)).to(device).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), generator=g).to(device)
    return logits, torch.eye(vocab, device=device), target


def gradients(tensors, loss):
    trained = [t for t in tensors if t is not None and t.requires_grad]
    return [g.double().cpu() for g in torch.autograd.grad(loss, trained)]


def check_mean_over_seeds(draw, exact, seeds, unit=1e-5):
    """draw(seed) gives gradients whose mean should be `exact`, but for a rounding of `unit`.

    Each component's mean over S seeds has a standard error, known from its own spread: six of them are a chance of
    2e-9. Where few seeds drew anything the mean has the tail of a Poisson variable instead (Bernstein's bound, of that
    chance), whose range a component's own draws need not show: the widest of all is taken. All together, the squared
    distance is S times less than the variance, up to a factor that twenty effective degrees of freedom exceed with a
    chance below 1e-6: 3.
    """
    samples = [draw(seed) for seed in range(seeds)]
    for index, expected in enumerate(exact):
        drawn = torch.stack([sample[index] for sample in samples])
        mean, variance = drawn.mean(0), drawn.var(0)
        rounding = unit * expected.abs().max() + 1e-12
        tail = 6**2 / 2 * (drawn - mean).abs().max() / (3 * seeds)
        assert ((mean - expected).abs() <= 6 * (variance / seeds).sqrt() + tail + rounding).all()
        assert (mean - expected).square().sum() <= 3 * variance.sum() / seeds + rounding**2 * expected.numel()
        assert variance.sum() > 0
