"""float64 on CUDA: PyTorch's own samples, budgets and bits. test_options.py compares its values with the oracle."""

import sys
import types
import unittest

import pytest
import torch
import torch.nn.functional as F
from support import head, lce

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def samples_of_pytorch():
    """Yields PyTorch's samples of its own linear_cross_entropy that apply here: class indices, a weight [V, D]."""
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
    except ImportError:  # PyTorch's samples lie beside generated test cases, which do not run here
        monkeypatch.setitem(sys.modules, "expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    count = 0
    for sample in samples_of_pytorch():
        count += 1
        bias = sample.kwargs.get("bias")
        leaves = [t for t in (sample.input, sample.args[0], bias) if t is not None]
        got, expected = (f(sample.input, *sample.args, **sample.kwargs) for f in (lce, F.linear_cross_entropy))
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        upstream = torch.randn_like(got)
        pairs = zip(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(expected, leaves, upstream))
        for gradient, truth in pairs:
            torch.testing.assert_close(gradient, truth, rtol=1e-11, atol=1e-12)
        others = {name: value for name, value in sample.kwargs.items() if name != "bias"}

        def loss(input, weight, bias=None, target=sample.args[1], others=others):
            return lce(input, weight, target, bias=bias, **others)

        assert torch.autograd.gradcheck(loss, leaves)
    assert count > 0


def test_bits_repeat_and_budgets_agree():
    input, weight, bias, target = head(300, 1000, 40, torch.float64, "cuda")
    results = []
    for budget in (None, 2 << 20, 1 << 20, 1 << 20):
        loss = lce(input, weight, target, bias=bias, max_workspace_bytes=budget)
        results.append([loss.detach(), *torch.autograd.grad(loss, (input, weight, bias))])
    assert all(torch.equal(x, y) for x, y in zip(*results[-2:], strict=True))
    for other in results[1:]:
        for got, truth in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, truth, rtol=1e-11, atol=1e-12)


def test_sparsified_gradients_are_refused_by_name():
    input, weight, _, target = head(dtype=torch.float64, device="cuda")
    with pytest.raises(Exception, match="gradient must be exact with float64"):
        lce(input, weight, target, gradient="sparsified")


def test_main_grad():
    input, weight, _, target = head(dtype=torch.float64, device="cuda")
    main_grad = torch.ones_like(weight)
    expected = torch.autograd.grad(lce(input, weight, target), weight)[0]
    lce(input, weight, target, main_grad=main_grad).backward()
    assert weight.grad is None
    torch.testing.assert_close(main_grad - 1, expected, rtol=0, atol=1e-15)
