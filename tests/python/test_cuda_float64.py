"""float64 on CUDA: gradcheck, PyTorch's own samples, and the reference backend on the CPU."""

import sys
import types
import unittest

import logitless
import pytest
import torch
import torch.nn.functional as F
from test_autograd import OPTIONS

lce = logitless.linear_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


def head(tokens=9, vocab=13, hidden=6):
    """As test_autograd.head, on the device."""
    g = torch.Generator().manual_seed(0)
    shapes = (tokens, hidden), (vocab, hidden), (vocab,)
    tensors = [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]
    target = torch.randint(0, vocab, (tokens,), generator=g)
    target[0] = -100
    return *(t.cuda().requires_grad_() for t in tensors), target.cuda()


def on_cuda(options):
    return {name: value.cuda() if torch.is_tensor(value) else value for name, value in options.items()}


@pytest.mark.parametrize("options", OPTIONS, ids=[" ".join(o) or "plain" for o in OPTIONS])
def test_gradcheck(options):
    input, weight, bias, target = head()
    options = on_cuda(options)

    def loss(input, weight, bias):
        return lce(input, weight, target, linear_bias=bias, **options)

    assert torch.autograd.gradcheck(loss, (input, weight, bias))


@pytest.mark.parametrize("name", ["nll", "lse", "entropy"])
def test_gradcheck_of_statistics(name):
    input, weight, bias, target = head()

    def stat(input, weight, bias):
        return getattr(lce(input, weight, target, linear_bias=bias, return_stats=[name]), name)

    assert torch.autograd.gradcheck(stat, (input, weight, bias))


REFERENCE_OPTIONS = [*OPTIONS, {"reduction": "none", "softcap": 2.0, "label_smoothing": 0.3}]


@pytest.mark.parametrize("options", REFERENCE_OPTIONS, ids=[" ".join(o) or "plain" for o in REFERENCE_OPTIONS])
@pytest.mark.parametrize("upstream", ["loss", "nll", "lse", "entropy"])
def test_equals_the_reference_on_the_cpu(options, upstream):
    *leaves, target = head()
    results = []
    for device in ("cuda", "cpu"):
        tensors = [t.detach().to(device).requires_grad_() for t in leaves]
        given = {name: value.to(device) if torch.is_tensor(value) else value for name, value in options.items()}
        out = lce(*tensors[:2], target.to(device), linear_bias=tensors[2], return_stats=True, **given)
        gradients = torch.autograd.grad(getattr(out, upstream).sum(), tensors)
        results.append([value.detach().cpu() for value in (*out, *gradients) if value is not None])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens, vocab, hidden", [(1, 1, 1), (70, 2100, 65), (1100, 300, 33)])
def test_equals_cross_entropy(tokens, vocab, hidden):
    *leaves, target = head(tokens, vocab, hidden)
    target[:] = target.clamp(min=0)
    loss = lce(*leaves[:2], target, linear_bias=leaves[2])
    expected = F.cross_entropy(F.linear(*leaves), target)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for got, truth in zip(torch.autograd.grad(3 * loss, leaves), torch.autograd.grad(3 * expected, leaves)):
        torch.testing.assert_close(got, truth, rtol=1e-11, atol=1e-12)


def samples_of_pytorch():
    """What PyTorch tests its own linear_cross_entropy with, as far as it is ours: class indices, a weight [V, D]."""
    from torch.testing._internal.common_methods_invocations import op_db

    operators = [op for op in op_db if op.name == "nn.functional.linear_cross_entropy" and not op.variant_test_name]
    if not operators:
        pytest.skip("this PyTorch has no linear_cross_entropy")
    for sample in operators[0].sample_inputs("cuda", torch.float64, requires_grad=True):
        weight, target = sample.args
        if weight.dim() == 2 and not target.is_floating_point() and "options" not in sample.kwargs:
            yield sample


def test_samples_of_pytorch(monkeypatch):
    try:
        import expecttest  # noqa: F401
    except ImportError:  # PyTorch's samples lie beside test cases that are made of it; none of these is run
        monkeypatch.setitem(sys.modules, "expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    count = 0
    for sample in samples_of_pytorch():
        count += 1
        bias = sample.kwargs.get("linear_bias")
        leaves = [t for t in (sample.input, sample.args[0], bias) if t is not None]
        got, expected = (f(sample.input, *sample.args, **sample.kwargs) for f in (lce, F.linear_cross_entropy))
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        upstream = torch.randn_like(got)
        pairs = zip(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(expected, leaves, upstream))
        for gradient, truth in pairs:
            torch.testing.assert_close(gradient, truth, rtol=1e-11, atol=1e-12)
        others = {name: value for name, value in sample.kwargs.items() if name != "linear_bias"}

        def loss(input, weight, bias=None, target=sample.args[1], others=others):
            return lce(input, weight, target, linear_bias=bias, **others)

        assert torch.autograd.gradcheck(loss, leaves)
    assert count > 0


def test_bits_repeat_and_budgets_agree():
    input, weight, bias, target = head(300, 1000, 40)
    results = []
    for budget in (None, 2 << 20, 1 << 20, 1 << 20):
        loss = lce(input, weight, target, linear_bias=bias, max_workspace_bytes=budget)
        results.append([loss.detach(), *torch.autograd.grad(loss, (input, weight, bias))])
    assert all(torch.equal(x, y) for x, y in zip(*results[-2:], strict=True))
    for other in results[1:]:
        for got, truth in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, truth, rtol=1e-11, atol=1e-12)


def test_main_grad():
    input, weight, _, target = head()
    main_grad = torch.ones_like(weight)
    expected = torch.autograd.grad(lce(input, weight, target), weight)[0]
    lce(input, weight, target, main_grad=main_grad).backward()
    assert weight.grad is None
    torch.testing.assert_close(main_grad - 1, expected, rtol=0, atol=1e-15)


def test_thinned_gradients_are_refused_by_name():
    input, weight, _, target = head()
    with pytest.raises(Exception, match="gradient must be exact with float64"):
        lce(input, weight, target, gradient="thinned")
