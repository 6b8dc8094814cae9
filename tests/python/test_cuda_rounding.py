"""CUDA with 16-bit operands: exp logits kept in bf16 are as good as gradients of logits rounded to bf16."""

import logitless
import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu


def head(tokens, vocab, hidden, spread):
    """Makes logits with standard deviation ``spread``, or for 0 eight likely tokens per row, one the target."""
    g = torch.Generator("cuda").manual_seed(tokens + vocab)
    weight = torch.randn(vocab, hidden, device="cuda", generator=g)
    weight /= weight.norm(dim=1, keepdim=True)
    target = torch.randint(0, vocab, (tokens,), device="cuda", generator=g)
    if spread:
        input = torch.randn(tokens, hidden, device="cuda", generator=g) * spread
    else:
        likely = torch.randint(0, vocab, (tokens, 8), device="cuda", generator=g)
        likely[torch.arange(tokens, device="cuda"), torch.randint(0, 8, (tokens,), device="cuda", generator=g)] = target
        input = (weight[likely] * (14 - torch.arange(8, device="cuda")[:, None] / 2)).sum(1)
    return input.bfloat16(), weight.bfloat16(), target


def relative(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


def gradients_of_rounded_dz(input, weight, target):
    """Returns logits in float64, dz of the mean rounded to bf16, and gradients rounded once.

    A divisor that is a power of two would make the targets' entries, nearly -1 / N, exact by luck. Then one row less
    divides.
    """
    tokens = len(target)
    divisor = tokens - 1 if tokens & (tokens - 1) == 0 else tokens
    dz = torch.softmax(input.double() @ weight.double().T, dim=1)
    dz[torch.arange(tokens, device="cuda"), target] -= 1
    rounded = (dz / divisor).bfloat16().double() * divisor / tokens
    dz /= tokens
    exact = dz @ weight.double(), dz.T @ input.double()
    return exact, ((rounded @ weight.double()).bfloat16(), (rounded.T @ input.double()).bfloat16())


@pytest.mark.parametrize("tokens", [1024, 5003])
@pytest.mark.parametrize("spread", [1, 3, 8, 0])
def test_kept_exps_lose_no_more_than_rounded_dz(tokens, spread):
    input, weight, target = (t.requires_grad_(t.is_floating_point()) for t in head(tokens, 16384, 512, spread))
    logitless.linear_cross_entropy(input, weight, target).backward()
    with torch.no_grad():
        exact, naive = gradients_of_rounded_dz(input, weight, target)
    ratios = [relative(leaf.grad, e) / relative(n, e) for leaf, e, n in zip((input, weight), exact, naive)]
    # d_weight has one more rounding, of hidden rows times their factors: sqrt(2) if dz is exact.
    assert ratios[0] <= 1.1 and ratios[1] <= 1.5, f"d_hidden, d_weight over the naive errors: {ratios}"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "tokens, hidden, vocab",
    [(8, 768, 32000), (16, 1024, 50264), (24, 768, 128256), (600, 512, 1536), (1024, 768, 2048)],
)
def test_within_twice_the_error_of_bf16_logits(tokens, hidden, vocab, reduction):
    """The largest differences from float64 stand beside those of eager PyTorch in bf16, with a tolerance of 1e-4."""
    torch.manual_seed(0)
    input = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) * 0.1
    weight = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
    target = torch.randint(0, vocab, (tokens,), device="cuda")

    def gradients(dtype, loss):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (input, weight)]
        loss(*leaves).backward()
        return [leaf.grad.double() for leaf in leaves]

    def eager(a, b):
        return F.cross_entropy(F.linear(a, b), target, reduction=reduction)

    exact = gradients(torch.float64, eager)
    naive = gradients(torch.bfloat16, eager)
    ours = gradients(torch.bfloat16, lambda a, b: logitless.linear_cross_entropy(a, b, target, reduction=reduction))
    # Kept exp logits are multiplied with hidden rows times the rows' factors, which are rounded. The naive dz of an
    # unlikely target is -1 exactly, and so is the gradient of a column with one target: two roundings are ours alone.
    roundings = {"d_hidden": 0, "d_weight": 2 * 2**-8}
    for name, e, n, o in zip(roundings, exact, naive, ours):
        allowed = 2 * (n - e).abs().max() + 1e-4 + roundings[name] * e.abs().max()
        assert (o - e).abs().max() < allowed, f"{name}: {(o - e).abs().max():.3g}, allowed {allowed:.3g}"
