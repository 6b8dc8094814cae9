"""Upstream gradients: infinite ones, several gradients scaled at once, and backward passes that want only some."""

import logitless
import logitless.numpy
import numpy as np
import pytest
import support
import torch
import torch.nn.functional as F
from logitless import run
from support import CUDA, DEVICES, Recorder, lce

pytestmark = pytest.mark.filterwarnings("ignore")
IGNORED = [0, 3, 4]


def head(device="cpu", dtype=torch.float32):
    """Returns input, weight, bias and target with some rows without target, at odd sizes."""
    *tensors, target = support.head(7, 13, 9, dtype, device)
    target[IGNORED] = -100
    return *tensors, target


def canonical(input, weight, bias, target, reduction="mean", **_):
    return F.cross_entropy(F.linear(input, weight, bias), target, reduction=reduction)


def ours(input, weight, bias, target, main_grad=False, **options):
    if main_grad:
        options["main_grad"] = torch.zeros(weight.shape, device=weight.device)
    return lce(input, weight, target, bias=bias, **options)


OPTIONS = [{}, {"reduction": "sum"}, {"reduction": "none"}, {"main_grad": True}, {"gradient": "sparsified", "seed": 1}]


@pytest.mark.parametrize("factor", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_ignored_rows_have_no_gradient_of_an_infinite_one(device, options, dtype, factor):
    if options.get("main_grad") and dtype == torch.float64:
        pytest.skip("main_grad is float64 then")
    if "gradient" in options and dtype == torch.float64 and device == "cuda":
        pytest.skip("only the CPU has sparsified gradients of float64")
    input, weight, bias, target = head(device, dtype)
    valid = [row for row in range(7) if row not in IGNORED]
    for function in (canonical, ours):
        for way in ("once", "retained", "batched"):
            if way == "batched" and (function is canonical or options.get("main_grad")):
                continue
            loss = function(input, weight, bias, target, **options)
            upstream = torch.full_like(loss, factor)
            if way == "batched":
                gradient = torch.autograd.grad(loss, input, torch.stack([upstream] * 2), is_grads_batched=True)[0][1]
            else:
                gradient = torch.autograd.grad(loss, input, upstream, retain_graph=way == "retained")[0]
            assert (gradient[IGNORED] == 0).all(), (function, way)
            assert not gradient[valid].isfinite().all(-1).any(), (function, way)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_ignored_rows_of_operators_and_of_compiled_code(device):
    input, weight, bias, target = head(device)
    with Recorder() as recorder:
        loss = ours(input, weight, bias, target)
    assert recorder.names
    compiled = torch.compile(ours, backend="aot_eager")(input, weight, bias, target)
    for loss in (loss, compiled):
        gradient = torch.autograd.grad(loss, input, torch.full_like(loss, float("inf")))[0]
        assert (gradient[IGNORED] == 0).all() and not gradient[1].isfinite().any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ignored_rows_of_arrays(reduction):
    input, weight, _, target = (t.detach().numpy() for t in head())
    out = logitless.numpy.linear_cross_entropy(
        input, weight, target, reduction=reduction, gradients=True, grad_loss=np.inf
    )
    assert (out.d_hidden[IGNORED] == 0).all() and not np.isfinite(out.d_hidden[1]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_all_gradients_are_scaled(device, dtype):
    """They are scaled exactly by a power of two, for each subset of the gradients."""
    tensors, target = head(device, dtype)[:3], head(device)[3]
    single = torch.autograd.grad(ours(*tensors, target), tensors)
    for wanted in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)):
        for keep in (False, True):
            leaves = [t.detach().requires_grad_(place in wanted) for place, t in enumerate(tensors)]
            loss = ours(*leaves, target) * -4
            gradients = torch.autograd.grad(loss, [leaves[place] for place in wanted], retain_graph=keep)
            for place, gradient in zip(wanted, gradients):
                assert torch.equal(gradient, -4 * single[place]), (wanted, place)


def test_a_gradient_whose_memory_is_a_negated_view_of_it():
    input, weight, bias, target = head()
    factor = torch.complex(torch.zeros(()), torch.tensor(-3.0)).conj().imag
    assert factor.is_neg() and factor == 3
    gradients = torch.autograd.grad(ours(input, weight, bias, target), (input, weight), factor)
    expected = torch.autograd.grad(ours(input, weight, bias, target), (input, weight), torch.tensor(3.0))
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize(
    "dtypes", [[torch.float32, torch.bfloat16, torch.float16, torch.bfloat16, torch.float32], [torch.float64] * 2]
)
@pytest.mark.parametrize("device", [CUDA])
def test_arrays_of_any_size_and_alignment(device, dtypes):
    """There are more arrays than a launch takes, more elements than its threads, and starts not aligned to 16 bytes."""
    sizes = (5_000_003, 1, 4099, 8, 0)
    for start in (0, 1):
        arrays = [torch.randn(size + 1, device=device).to(dtype)[start:] for size, dtype in zip(sizes, dtypes)]
        for array in arrays:
            array[::7] = 0
        for factor in (1.0, -0.3, float("inf"), float("nan")):
            by = torch.tensor(factor, device=device, dtype=torch.promote_types(dtypes[0], torch.float32))
            copies = [array.clone() if start == 0 else torch.cat([array[:1], array])[1:] for array in arrays]
            run.scale_in_place(copies, by)
            for array, scaled in zip(arrays, copies):
                expected = torch.where(array == 0, array, (array.to(by.dtype) * by).to(array.dtype))
                assert torch.equal(scaled.nan_to_num(), expected.nan_to_num()) and (scaled[::7] == 0).all()
