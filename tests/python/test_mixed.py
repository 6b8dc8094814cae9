"""Products in another dtype than the tensors': autocast over float32 parameters, mixed dtypes, and TF32."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from support import DEVICES, SHORT, assert_same, lce, peak_of, results

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def head(device, tokens=260, vocab=515, hidden=72, dtypes=(torch.float32, torch.float32)):
    input = torch.randn(tokens, hidden)
    weight = torch.randn(vocab, hidden) / hidden**0.5
    target = torch.randint(0, vocab, (tokens,))
    target[::5] = -100
    tensors = [t.to(device, dtype).requires_grad_() for t, dtype in zip((input, weight), dtypes)]
    return *tensors, target.to(device)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def exact(input, weight, target, dtype, reduction="mean"):
    """Computes in float64 with operands rounded to dtype."""
    leaves = [t.detach().to(dtype).double().requires_grad_() for t in (input, weight)]
    loss = F.cross_entropy(F.linear(*leaves), target, reduction=reduction)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]


def distance(a, b):
    return torch.linalg.vector_norm(a.double() - b.double()).item()


def check(got, short, truth):
    """Asserts an error of at most twice that of 16-bit tensors, plus a rounding unit of float32."""
    for a, b, t in zip(got, short, truth):
        assert a.dtype == torch.float32
        assert distance(a, t) <= 2 * distance(b, t) + UNIT[torch.float32] * torch.linalg.vector_norm(t).item()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_autocast_gradients_are_float32(device, dtype, reduction):
    input, weight, target = head(device)
    with torch.autocast(device, dtype=dtype):
        loss = lce(input, weight, target, reduction=reduction)
    got = [loss.detach(), *torch.autograd.grad(loss.sum(), (input, weight))]
    short = [t.detach().to(dtype).requires_grad_() for t in (input, weight)]
    expected = results(*short, target, reduction=reduction)
    truth = exact(input, weight, target, dtype, reduction)
    check(got, expected, truth)
    assert all((g.to(dtype).float() != g).any() for g in got[1:]), "rounded to 16 bits on the way"


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_autocast_of_mixed_tensors(device, dtypes):
    input, weight, target = head(device, dtypes=dtypes)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = results(input, weight, target)
    short = [t.detach().bfloat16().requires_grad_() for t in (input, weight)]
    expected = results(*short, target)
    torch.testing.assert_close(got[0], expected[0], rtol=UNIT[torch.float32] * 64, atol=0)
    for gradient, tensor, other in zip(got[1:], (input, weight), expected[1:]):
        assert gradient.dtype == tensor.dtype
        bound = 2 * UNIT[torch.bfloat16] * torch.linalg.vector_norm(other.double()).item()
        assert distance(gradient, other) <= bound


def test_autocast_adds_to_main_grad(device):
    input, weight, target = head(device)
    main_grad = torch.ones_like(weight, requires_grad=False)
    with torch.autocast(device, dtype=torch.bfloat16):
        lce(input, weight, target, main_grad=main_grad).backward()
        (expected,) = torch.autograd.grad(lce(input, weight, target, reduction="none").sum(), weight)
    assert weight.grad is None
    expected /= (target >= 0).sum()
    bound = 4 * UNIT[torch.bfloat16] * expected.norm().item() + UNIT[torch.float32] * main_grad.norm().item()
    assert distance(main_grad - 1, expected) <= bound


def test_autocast_with_the_weight_as_main_grad_is_refused(device):
    input, weight, target = head(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        with pytest.raises(ValueError, match="main_grad: expected a buffer of its own"):
            lce(input, weight, target, main_grad=weight.detach())


def test_autocast_of_a_learned_scale(device):
    input, weight, target = head(device)
    scale = torch.tensor(0.7, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        (gradient,) = torch.autograd.grad(lce(input, weight, target, scale=scale), scale)
    leaves = [t.detach().bfloat16().double() for t in (input, weight)]
    wide = scale.detach().to(device, torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(wide * F.linear(*leaves), target), wide)
    assert abs(gradient.item() - expected.item()) <= 4 * UNIT[torch.bfloat16] * abs(expected.item())


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("sizes", [(260, 515, 72), (64, 1031, 100), (300, 30001, 64)], ids=str)
def test_mixed_dtypes_without_autocast(device, sizes, dtypes):
    input, weight, target = head(device, *sizes, dtypes=dtypes)
    got = results(input, weight, target)
    with torch.no_grad():
        alone = lce(input, weight, target)
    wide = [t.detach().float().requires_grad_() for t in (input, weight)]
    expected = results(*wide, target)
    truth = exact(*wide, target, torch.float32)
    torch.testing.assert_close(alone, got[0], rtol=UNIT[torch.float32] * 64, atol=0)
    for a, b, t in zip(got, expected, truth):
        rounding = UNIT[a.dtype] * torch.linalg.vector_norm(t).item()
        assert distance(a, t) <= 2 * distance(b, t) + rounding


@contextlib.contextmanager
def tf32(allowed):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_tf32_is_the_same_on_the_cpu():
    input, weight, target = head("cpu")
    plain = results(input, weight, target)
    with tf32(True):
        assert_same(results(input, weight, target), plain)


class TestOnDevice:
    pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
    SIZES = (1024, 8192, 512)

    @pytest.mark.parametrize("gradient", ["exact", "always-sparsified"])
    def test_tf32_follows_the_switch(self, gradient):
        input, weight, target = head("cuda", *self.SIZES)
        options = {"gradient": gradient} | ({} if gradient == "exact" else {"seed": 3})

        def run():
            return results(input, weight, target, **options)

        plain = run()
        with tf32(True):
            rounded = run()
        again = run()
        assert all(torch.equal(a, b) for a, b in zip(plain, again)), "the switch is part of the key"
        assert not torch.equal(plain[0], rounded[0])
        if gradient == "exact":
            with tf32(True):
                naive = torch.autograd.grad(F.cross_entropy(F.linear(input, weight), target), (input, weight))
            check(rounded[1:], naive, exact(input, weight, target, torch.float32)[1:])

    def test_tf32_does_not_change_16_bit_products(self):
        input, weight, target = head("cuda", *self.SIZES, dtypes=(torch.bfloat16,) * 2)
        plain = results(input, weight, target)
        with tf32(True):
            assert_same(results(input, weight, target), plain)

    @pytest.mark.parametrize("budget", [24 << 20, 64 << 20, 256 << 20])
    def test_memory_is_the_budget_and_gradients(self, budget):
        input, weight, target = head("cuda", 1024, 32768, 1024)

        def step():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = lce(input, weight, target, max_workspace_bytes=budget)
            return torch.autograd.grad(loss, (input, weight))

        assert peak_of(step) <= budget + 4 * (input.numel() + weight.numel()) + (1 << 20)
