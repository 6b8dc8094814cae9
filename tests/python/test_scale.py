"""A learned scale: its gradient against the plain float64 computation, in every pass."""

import logitless
import oracle
import pytest
import torch
from test_options import DTYPES, make
from torch._dynamo.testing import CompileCounterWithBackend

lce = logitless.linear_cross_entropy
pytestmark = pytest.mark.filterwarnings("ignore")

CASES = {
    "plain": {},
    "sum": {"reduction": "sum", "z_loss": 0.1},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.2, "weight": torch.rand(23, generator=torch.Generator().manual_seed(5)) + 0.1},
    "softcap": {"softcap": 2.0, "num_items": 7},
    "softcap none": {"softcap": 2.0, "reduction": "none", "shift": 1},
    "token_weight": {"token_weight": torch.rand(3, 5, generator=torch.Generator().manual_seed(6)) + 0.1},
}
SCALES = (0.3, -2.0)


def plain(problem, scale, dtype, names):
    """The gradient of scale by autograd through whole logits in dtype."""
    leaves = [None if t is None else t.detach() for t in (problem.input, problem.linear_weight, problem.linear_bias)]
    leaf = torch.tensor(scale, dtype=dtype, requires_grad=True)
    options = problem.options | {"scale": leaf}
    changed = oracle.Problem(problem.input, problem.linear_weight, problem.target, problem.linear_bias, options)
    out = oracle.forward(changed, leaves, dtype)
    sum((problem.upstream[name].to(out[name].dtype) * out[name]).sum() for name in names).backward()
    return leaf.grad.double()


def bound(problem, scale):
    """sum_ij of what of a row's upstream gradient an element of dz may hold, times |E_i . C_j|."""
    options = problem.options | {"scale": scale}
    changed = oracle.Problem(
        problem.input, problem.linear_weight, problem.target, problem.linear_bias, options, problem.upstream
    )
    truth = oracle.evaluate(changed, torch.float64)
    input = problem.input.double().reshape(-1, problem.input.shape[-1])
    dots = (input @ problem.linear_weight.double().T).abs()
    return (truth["row_upstream"][:, None] * truth["reach"] * dots).sum() * (4 + truth["size"])


def check(problem, scale, found, names):
    truth = plain(problem, scale, torch.float64, names)
    naive = plain(problem, scale, oracle.naive_dtype(problem), names)
    computed = torch.float64 if problem.input.dtype == torch.float64 else torch.float32
    unit = torch.finfo(computed).eps * (bound(problem, scale) + truth.abs())
    if problem.input.dtype.itemsize == 2:  # exps may be kept in 16 bits
        unit = unit + torch.finfo(problem.input.dtype).eps / 2 * bound(problem, scale)
    assert (found.double() - truth).abs() <= 2 * (naive - truth).abs() + unit


def run(problem, scale, names=("loss",), trained=(True, True, True), **options):
    """The gradient of scale, and those of the trained tensors by name."""
    tensors = [t if on or t is None else t.detach() for t, on in zip(problem.leaves(), trained)]
    out = lce(
        tensors[0],
        tensors[1],
        problem.target,
        linear_bias=tensors[2],
        scale=scale,
        return_stats=True,
        **problem.options,
        **options,
    )
    g = torch.Generator().manual_seed(1)
    problem.upstream = {n: torch.randn(getattr(out, n).shape, generator=g).double() for n in names}
    outputs = [getattr(out, name) for name in names]
    torch.autograd.backward(outputs, [problem.upstream[n].to(t.dtype) for n, t in zip(names, outputs)])
    return scale.grad, [None if t is None else t.grad for t in tensors]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_rows_are_not_multiplied(reduction):
    problem = make((7,), 23, 9, (torch.float32,) * 3, reduction=reduction)
    problem.target[2] = -100
    found = []
    for fill in (0.0, float("nan"), float("inf")):
        input = problem.input.detach().clone()
        input[2] = fill
        scale = torch.tensor(0.3, requires_grad=True)
        lce(input, problem.linear_weight.detach(), problem.target, scale=scale, reduction=reduction).sum().backward()
        found.append(scale.grad)
    assert found[0].isfinite() and found[0] == found[1] == found[2]


@pytest.mark.parametrize("later", [False, True], ids=["3F", "4F"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", SCALES)
@pytest.mark.parametrize("name", CASES)
def test_gradient(name, value, dtype, later):
    problem = make((3, 5), 23, 9, (dtype,) * 3, bias=True, **CASES[name])
    scale = torch.tensor(value, requires_grad=True, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    found, gradients = run(problem, scale, differentiable_stats=later)
    check(problem, value if dtype == torch.float64 else scale.item(), found, ("loss",))
    constant = problem.leaves()
    loss = lce(*constant[:2], problem.target, linear_bias=constant[2], scale=scale.item(), return_stats=True,
               differentiable_stats=later, **problem.options).loss  # fmt: skip
    loss.backward(problem.upstream["loss"].to(loss.dtype))
    for leaf, gradient in zip(constant, gradients):  # those of the other tensors are rounded once in both cases
        torch.testing.assert_close(gradient, leaf.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["nll", "lse", "entropy"])
def test_gradient_of_statistics(name, dtype):
    problem = make((11,), 23, 9, (dtype,) * 3, bias=True, softcap=3.0)
    scale = torch.tensor(0.5, requires_grad=True)
    found, _ = run(problem, scale, (name,))
    check(problem, 0.5, found, (name,))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trained", [(False, False, False), (False, True, False), (True, False, True)], ids=str)
def test_frozen_tensors(trained, reduction):
    problem = make((3, 5), 23, 9, (torch.bfloat16,) * 3, bias=True, reduction=reduction)
    scale = torch.tensor(0.5, requires_grad=True)
    found, gradients = run(problem, scale, trained=trained, differentiable_stats=False)
    check(problem, 0.5, found, ("loss",))
    assert [g is not None for g in gradients] == list(trained)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_gradcheck(options):
    problem = make((3, 5), 23, 9, (torch.float64,) * 3, bias=True, **options)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def loss(input, weight, bias, scale):
        return lce(input, weight, problem.target, linear_bias=bias, scale=scale, **options)

    assert torch.autograd.gradcheck(loss, (*problem.leaves(), scale), fast_mode=True)
    assert torch.autograd.gradcheck(lambda s: loss(problem.input, problem.linear_weight, None, s), (scale,))


def test_many_rows():
    """More than are multiplied at a time."""
    problem = make((700,), 40, 2048, (torch.float32,) * 3, spread=3.0, reduction="sum")
    scale = torch.tensor(0.5, requires_grad=True)
    found, _ = run(problem, scale)
    check(problem, 0.5, found, ("loss",))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_retain_graph(reduction):
    problem = make((15,), 23, 9, reduction=reduction)
    input, weight, _ = problem.leaves()
    scale = torch.tensor(0.5, requires_grad=True)
    loss = 3 * lce(input, weight, problem.target, scale=scale, reduction=reduction).sum()
    for times in (1, 2, 3):
        loss.backward(retain_graph=True)
        expected = torch.autograd.grad(
            3 * lce(input, weight, problem.target, scale=scale, reduction=reduction).sum(), scale
        )[0]
        torch.testing.assert_close(scale.grad, times * expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(reduction):
    problem = make((15,), 23, 9)

    def loss(input, weight, scale):
        return lce(input, weight, problem.target, scale=scale.exp(), reduction=reduction).sum()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for value in (0.1, -0.3, 0.7):
        leaves = (*problem.leaves()[:2], torch.tensor(value, requires_grad=True))
        found, expected = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, loss))
        for a, b in zip(found, expected):
            assert torch.equal(a, b)
    assert counter.frame_count == 1


def test_autocast_and_other_dtypes():
    problem = make((15,), 23, 9)
    input, weight, _ = problem.leaves()
    short = [t.detach().bfloat16() for t in (input, weight)]
    scale = torch.tensor(0.5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = lce(input, weight, problem.target, scale=scale)
    assert torch.equal(
        torch.autograd.grad(loss, scale)[0], torch.autograd.grad(lce(*short, problem.target, scale=scale), scale)[0]
    )
    for like in (torch.ones(1, 1), torch.ones((), dtype=torch.float64), torch.ones(1, dtype=torch.bfloat16)):
        other = (like / 2).requires_grad_()
        (found,) = torch.autograd.grad(lce(input, weight, problem.target, scale=other), other)
        (expected,) = torch.autograd.grad(lce(input, weight, problem.target, scale=scale), scale)
        assert found.dtype == like.dtype and found.shape == like.shape
        torch.testing.assert_close(found.float().squeeze(), expected, rtol=torch.finfo(like.dtype).eps, atol=1e-7)


def test_thinned_gradient_is_unbiased():
    problem = make((15,), 64, 9, ignored=0.0)
    input, weight, _ = problem.leaves()
    scale = torch.tensor(0.5, requires_grad=True)
    (exact,) = torch.autograd.grad(lce(input, weight, problem.target, scale=scale), scale)
    for reduction in ("mean", "none"):
        draws = []
        for seed in range(300):
            options = {"gradient": "thinned", "threshold": 0.1, "seed": seed, "reduction": reduction}
            loss = lce(input, weight, problem.target, scale=scale, **options).mean()
            draws.append(torch.autograd.grad(loss, scale)[0])
        found = torch.stack(draws).double()
        assert (found.mean() - exact).abs() <= 5 * found.std() / 300**0.5 + 1e-6


def test_constant_tensors_and_no_grad():
    problem = make((15,), 23, 9)
    input, weight, _ = problem.leaves()
    expected = lce(input, weight, problem.target, scale=0.5)
    assert torch.equal(lce(input, weight, problem.target, scale=torch.tensor(0.5)), expected)
    with torch.no_grad():
        learned = lce(input, weight, problem.target, scale=torch.tensor(0.5, requires_grad=True))
        assert torch.equal(learned, expected) and not learned.requires_grad
        lce(input, weight, problem.target, scale=torch.tensor(0.0, requires_grad=True))


def test_changed_between_the_passes_is_refused():
    problem = make((15,), 23, 9)
    scale = torch.tensor(0.5, requires_grad=True)
    loss = lce(problem.input, problem.linear_weight, problem.target, scale=scale, reduction="none").sum()
    with torch.no_grad():
        scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


BAD = [
    (torch.tensor(0.0, requires_grad=True), ValueError, "scale: expected a magnitude of at least 2.-64 .* got 0.0"),
    (torch.tensor(1e-30, requires_grad=True), ValueError, "scale: expected a magnitude of at least 2.-64 .* got 1.0"),
    (torch.tensor(float("nan"), requires_grad=True), ValueError, "scale: expected .* got nan"),
    (torch.ones(2, requires_grad=True), ValueError, r"scale: expected one element, got shape \[2\]"),
    (torch.tensor(True), TypeError, "scale: expected a number, got torch.bool"),
    (torch.tensor(1j), TypeError, "scale: expected a number, got torch.complex64"),
    (torch.tensor(1.0, device="meta"), ValueError, "scale: .* got device meta"),
]


@pytest.mark.parametrize("scale, error, message", BAD, ids=[m for _, _, m in BAD])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_errors(scale, error, message, reduction):
    problem = make((15,), 23, 9)
    with pytest.raises(error, match=message):
        lce(problem.input, problem.linear_weight, problem.target, scale=scale, reduction=reduction)
