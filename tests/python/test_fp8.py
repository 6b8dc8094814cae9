"""compute_dtype="fp8": the loss of rounded rows, and gradients that pass straight through the rounding."""

import logitless
import logitless.numpy
import numpy
import pytest
import torch
from support import DEVICES
from test_screen import e4m3


def truth(input, weight, bias, target, **options):
    """Returns the loss and the gradients of input, weight and bias in float64."""
    leaves = [t.detach().cpu().bfloat16().double().requires_grad_() for t in (input, weight)]
    leaves.append(bias.detach().cpu().double().requires_grad_())
    x, w, b = leaves
    exact = x @ w.T
    z = exact + (e4m3(x.detach()) @ e4m3(w.detach()).T - exact).detach() + b
    loss = torch.nn.functional.cross_entropy(z, target.cpu(), **options)
    loss.sum().backward()
    return loss.detach(), [t.grad for t in leaves]


def problem(dtype, device="cpu"):
    g = torch.Generator().manual_seed(3)
    tensors = torch.randn(40, 48, generator=g), torch.randn(130, 48, generator=g) / 4, torch.randn(130, generator=g)
    target = torch.randint(130, (40,), generator=g)
    target[::7] = -100
    return [t.to(device, dtype).requires_grad_() for t in tensors], target.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_agrees_with_the_rounded_head(device, dtype, reduction):
    leaves, target = problem(dtype, device)
    input, weight, bias = leaves
    loss = logitless.linear_cross_entropy(
        input, weight, target, bias=bias, reduction=reduction, compute_dtype="fp8", return_stats=["lse"]
    ).loss
    loss.sum().backward()
    expected, gradients = truth(*leaves, target, reduction=reduction)
    # Hopper's sums keep about 14 bits. In bf16, dz and the gradients have a rounding each.
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=0, atol=2e-5 if device == "cpu" else 0.02)
    for got, want in zip((t.grad.cpu().double() for t in leaves), gradients):
        torch.testing.assert_close(got, want, rtol=0.01, atol=0.02 * want.abs().max().item())
    unrounded = logitless.linear_cross_entropy(input, weight, target, bias=bias, reduction="sum")
    assert unrounded.item() != pytest.approx(expected.sum().item(), rel=1e-5)


def test_autocast_changes_nothing():
    (input, weight, bias), target = problem(torch.float32)
    losses = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses.append(logitless.linear_cross_entropy(input, weight, target, bias=bias, compute_dtype="fp8"))
    assert losses[0].item() == losses[1].item()


def test_every_interface_has_it():
    (input, weight, bias), target = problem(torch.float32)
    options = {"bias": bias, "compute_dtype": "fp8"}
    loss = logitless.linear_cross_entropy(input, weight, target, **options).item()
    arrays = [t.detach().numpy() for t in (input, weight, target)]
    result = logitless.numpy.linear_cross_entropy(*arrays, bias=bias.detach().numpy(), compute_dtype="fp8")
    assert result.loss == pytest.approx(loss)
    compiled = torch.compile(lambda x: logitless.linear_cross_entropy(x, weight, target, **options), backend="eager")
    assert compiled(input).item() == loss
    head = logitless.nn.FusedHead(48, 130, bias=True, compute_dtype="fp8")
    head.weight.data, head.bias.data = weight.detach(), bias.detach()
    assert head(input, target).item() == loss
    sizes = 40, 130, 48
    rounded, plain = (logitless.plan(*sizes, compute_dtype=name).workspace_bytes for name in ("fp8", None))
    assert rounded > plain


def test_refused_where_it_would_be_left_out():
    (input, weight, _), target = problem(torch.float32)
    for name in ("scale", "temperature"):
        learned = {name: torch.tensor(2.0, requires_grad=True)}
        with pytest.raises(ValueError, match=f"compute_dtype: expected None where {name} has a gradient"):
            logitless.linear_cross_entropy(input, weight, target, compute_dtype="fp8", **learned)
    for value in (numpy.dtype("float64"), numpy.dtype("float32"), torch.float32, numpy.zeros(3)):
        with pytest.raises(ValueError, match='compute_dtype: expected one of None, "fp8"'):
            logitless.linear_cross_entropy(input, weight, target, compute_dtype=value)


def test_trainers_of_trl_refuse_it():
    from logitless.transformers import _beside_trl

    with pytest.raises(logitless.UnsupportedError, match="compute_dtype: expected None where TRL"):
        _beside_trl.run(torch.nn.Linear(2, 2), {"compute_dtype": "fp8"}, print, (), {})


def test_errors():
    (input, weight, _), target = problem(torch.float32)
    for given, match in (
        ({"compute_dtype": "bf16"}, 'compute_dtype: expected one of None, "fp8"'),
        ({"compute_dtype": "fp8", "gradient": "sparsified"}, "compute_dtype: expected another with sparsified"),
    ):
        with pytest.raises(ValueError, match=match):
            logitless.linear_cross_entropy(input, weight, target, **given)
    with pytest.raises(ValueError, match="compute_dtype: expected float32"):
        logitless.linear_cross_entropy(input.double(), weight.double(), target, compute_dtype="fp8")
    with pytest.raises(ValueError, match="targets_per_row: expected 0"):
        several = torch.zeros(40, 2, dtype=torch.int64)
        logitless.linear_cross_entropy(input, weight, several, target_weight=torch.ones(40, 2), compute_dtype="fp8")
