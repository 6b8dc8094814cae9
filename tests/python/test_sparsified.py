"""Sparsified gradients: the mean over seeds is exact, draws repeat, and one forward serves any backward."""

import logitless
import pytest
import torch
from sparsified_cases import SPARSIFIED, TAU, check_mean_over_seeds, gradients, head, logits_problem
from support import DEVICES, lce

pytestmark = pytest.mark.parametrize("device", DEVICES)
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum", "scale": 0.7},
    "softcap": {"softcap": 2.0},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.1},
    "class_weight": {"class_weight": torch.linspace(0.5, 2.0, 50), "label_smoothing": 0.1},
    "token_weight": {"token_weight": torch.linspace(0.0, 1.0, 12), "num_items": 5},
    "shift": {"shift": 1},
    "none": {"reduction": "none"},
}


def options_on(device, name):
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in OPTIONS[name].items()}


def loss_of(tensors, target, options, **more):
    """Returns a scalar; per-token losses get their own upstream gradients."""
    input, weight, bias = tensors
    loss = lce(input, weight, target, bias=bias, **options, **more)
    return loss if loss.dim() == 0 else (loss * torch.linspace(-1, 2, len(loss), device=loss.device)).sum()


@pytest.mark.parametrize("name", OPTIONS)
def test_mean_over_seeds_is_the_exact_gradient(device, name):
    *tensors, target = head(device)
    options = options_on(device, name)

    def gradient(**more):
        return gradients(tensors, loss_of(tensors, target, options, **more))

    check_mean_over_seeds(lambda seed: gradient(**SPARSIFIED, seed=seed), gradient(), seeds=200)


@pytest.mark.parametrize("name", ["nll", "lse", "entropy"])
def test_gradients_of_statistics_are_unbiased(device, name):
    *tensors, target = head(device)
    input, weight, bias = tensors

    def gradients_with(**options):
        out = lce(input, weight, target, bias=bias, return_stats=[name], **options)
        upstream = torch.linspace(-1, 2, len(target), device=device)
        return gradients(tensors, (getattr(out, name) * upstream).sum())

    check_mean_over_seeds(lambda seed: gradients_with(**SPARSIFIED, seed=seed), gradients_with(), seeds=200)


def test_each_element_is_kept_or_drawn_as_it_should(device):
    if device == "cuda":
        pytest.skip("a CUDA device draws nothing in its dense columns")
    logits, weight, target = logits_problem(device)
    p = torch.softmax(logits.detach(), 1)
    onehot = torch.nn.functional.one_hot(target, p.shape[1])
    certain = (p >= TAU) | (onehot == 1)
    drawn, seeds = torch.zeros_like(p), 400
    for seed in range(seeds):
        loss = lce(logits, weight, target, reduction="sum", seed=seed, **SPARSIFIED)
        dz = torch.autograd.grad(loss, logits)[0]
        torch.testing.assert_close(dz[certain], (p - onehot)[certain])
        assert ((dz[~certain] == 0) | ((dz[~certain] - TAU).abs() < 1e-5)).all()
        drawn += ~certain & (dz != 0)
    share = p / TAU
    error = (share * (1 - share) / seeds).clamp_min(0).sqrt()
    assert ((drawn / seeds - share).abs()[~certain] <= 6 * error[~certain] + 1.0 / seeds).all()


def test_a_threshold_below_every_element_is_exact(device):
    *tensors, target = head(device)
    exact = gradients(tensors, loss_of(tensors, target, {}))
    sparsified = gradients(tensors, loss_of(tensors, target, {}, gradient="always-sparsified", threshold=1e-9, seed=3))
    for e, t in zip(exact, sparsified):
        torch.testing.assert_close(t, e, rtol=1e-5, atol=1e-7)


def test_the_loss_is_exact(device):
    *tensors, target = head(device)
    out = lce(*tensors[:2], target, gradient="always-sparsified", threshold=1.0, return_stats=True)
    expected = lce(*tensors[:2], target, return_stats=True)
    for name in ("loss", "nll", "lse", "entropy", "argmax", "correct_count"):
        torch.testing.assert_close(getattr(out, name), getattr(expected, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_same_seed_gives_the_same_bits(device, reduction):
    *tensors, target = head(device)

    def draw(seed):
        return gradients(tensors, loss_of(tensors, target, SPARSIFIED, reduction=reduction, seed=seed))

    first = draw(7)
    for seed in (7, torch.tensor(7, device=device), torch.tensor([7], device=device)):
        assert all(torch.equal(a, b) for a, b in zip(draw(seed), first))
    for other in (8, -7, 7 + (1 << 40), (1 << 63) - 1):
        assert not all(torch.equal(a, b) for a, b in zip(draw(other), first))


def test_default_seeds_follow_manual_seed_and_generators(device):
    *tensors, target = head(device)

    def draw(seed=None):
        return gradients(tensors, loss_of(tensors, target, SPARSIFIED, seed=seed))

    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    for expected in (first, second):
        assert all(torch.equal(a, b) for a, b in zip(draw(), expected))
    assert not torch.equal(first[0], second[0])
    generators = [torch.Generator(device).manual_seed(5) for _ in range(2)]
    state = torch.random.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(*(draw(g) for g in generators)))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_no_seed_is_drawn_without_need(device):
    *tensors, target = head("cpu")
    state = torch.random.get_rng_state()
    loss_of(tensors, target, {}).backward()
    constants = [tensor.detach() for tensor in tensors]
    loss_of(constants, target, SPARSIFIED)
    with torch.no_grad():
        loss_of(constants, target, SPARSIFIED)
        loss_of(tensors, target, SPARSIFIED, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.no_grad():  # the first pass of a reentrant checkpoint does so
        loss_of(tensors, target, SPARSIFIED)
    assert not torch.equal(torch.random.get_rng_state(), state)


def test_one_forward_pass_serves_any_upstream_gradient(device):
    *tensors, target = head(device)
    input, weight, bias = tensors
    options = SPARSIFIED | {"bias": bias, "seed": 4}
    out = lce(input, weight, target, reduction="none", return_stats=["nll", "lse", "entropy"], **options)
    g = torch.Generator().manual_seed(0)
    upstream = [torch.randn(3, len(target), generator=g).to(device) for _ in range(2)]

    def gradients_of(u):
        total = (u[0] * out.loss + u[1] * out.lse + u[2] * out.entropy).sum()
        return [d.double() for d in torch.autograd.grad(total, tensors, retain_graph=True)]

    parts = [gradients_of(u) for u in upstream]
    for a, b, both in zip(*parts, gradients_of(upstream[0] + upstream[1])):
        torch.testing.assert_close(a + b, both, rtol=1e-4, atol=1e-5)
    summed = gradients(tensors, lce(input, weight, target, reduction="sum", **options))
    ones = torch.autograd.grad(out.loss.sum(), tensors)
    for a, b in zip(summed, ones):
        torch.testing.assert_close(b.double().cpu(), a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_sides_do_not_change_the_draw(device, reduction):
    *tensors, target = head(device)
    options = SPARSIFIED | {"seed": 4, "reduction": reduction}
    together = gradients(tensors, loss_of(tensors, target, options))
    for index in range(3):
        given = [t if i == index else t.detach() for i, t in enumerate(tensors)]
        alone = gradients(given, loss_of(given, target, options))
        torch.testing.assert_close(alone[0], together[index], rtol=1e-5, atol=1e-6)


def test_main_grad_and_half_precision(device):
    input, weight, _, target = head(device)
    options = SPARSIFIED | {"seed": 4}
    expected = torch.autograd.grad(lce(input, weight, target, **options), weight)[0]
    buffer = torch.ones_like(weight.detach())
    lce(input, weight, target, main_grad=buffer, **options).backward()
    torch.testing.assert_close(buffer, expected + 1, rtol=1e-5, atol=1e-6)
    if device == "cuda":
        return  # kernels of other operands draw other elements
    half = [t.detach().half().requires_grad_() for t in (input, weight)]
    wide = [t.detach().float().requires_grad_() for t in half]
    got = gradients(half, 1024 * lce(*half, target, **options))
    for a, b in zip(got, gradients(wide, 1024 * lce(*wide, target, **options))):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3 * b.abs().max().item())


def test_autocast(device):
    input, weight, _, target = head(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = lce(input, weight, target, seed=1, **SPARSIFIED)
    got = torch.autograd.grad(loss, (input, weight))
    assert all(g.dtype == torch.float32 for g in got)
    short = [t.detach().bfloat16().requires_grad_() for t in (input, weight)]
    expected = torch.autograd.grad(lce(*short, target, seed=1, **SPARSIFIED), short)
    for a, b in zip(got, expected):  # rounded once more, on CUDA twice
        bound = 2 * 2.0**-8 * b.float().norm()
        assert (a - b.float()).norm() <= bound


def test_rows_that_are_all_ignored(device):
    input, weight, _, target = head(device)
    target.fill_(-100)
    loss = lce(input, weight, target, reduction="sum", gradient="always-sparsified")
    for g in torch.autograd.grad(loss, (input, weight)):
        assert (g == 0).all()


def test_module(device):
    model = logitless.LinearCrossEntropyLoss(6, 50, device=device, **SPARSIFIED)
    input, _, _, target = head(device)
    model(input, target, seed=2).backward()
    weight = model.linear.weight
    (expected,) = torch.autograd.grad(lce(input, weight, target, seed=2, **SPARSIFIED), weight)
    assert torch.equal(model.linear.weight.grad, expected)
    assert "gradient=always-sparsified, threshold=0.25" in repr(model)
