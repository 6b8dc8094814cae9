"""Temperatures, of all rows, of each row and learned, against the plain float64 computation."""

import logitless
import logitless.numpy
import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from test_options import DTYPES, make
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

lce = logitless.linear_cross_entropy
pytestmark = pytest.mark.filterwarnings("ignore")

CASES = {
    "plain": {},
    "sum": {"reduction": "sum", "z_loss": 0.1, "scale": 0.5},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.2, "weight": torch.rand(23, generator=torch.Generator().manual_seed(5)) + 0.1},
    "shift": {"reduction": "none", "shift": 1},
    "token_weight": {"token_weight": torch.rand(3, 5, generator=torch.Generator().manual_seed(6)) + 0.1},
}
WITH_SOFTCAP = CASES | {
    "softcap": {"softcap": 2.0},
    "softcap none": {"softcap": 2.0, "reduction": "none", "scale": -1.5},
}


def of_rows(shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(9)
    return (10 ** (2 * torch.rand(shape, generator=g, dtype=torch.float64) - 1)).to(dtype)


def stats_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def solve(problem, names=("loss",), **more):
    """Outputs and gradients by name."""
    leaves = problem.leaves()
    out = lce(*leaves[:2], problem.target, linear_bias=leaves[2], return_stats=True, **problem.options, **more)
    g = torch.Generator().manual_seed(1)
    problem.upstream = {n: torch.randn(getattr(out, n).shape, generator=g).double() for n in names}
    outputs = [getattr(out, name) for name in names]
    torch.autograd.backward(outputs, [problem.upstream[n].to(t.dtype) for n, t in zip(names, outputs)])
    found = {name: getattr(out, name).detach() for name in ("loss", "nll", "lse", "entropy", "argmax", "valid_count")}
    gradients = [None if t is None else t.grad for t in leaves]
    return found | {f"d_{name}": t for name, t in zip(("input", "linear_weight", "linear_bias"), gradients)}


@pytest.mark.parametrize("later", [False, True], ids=["3F", "4F"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["rows", 0.1, 7])
@pytest.mark.parametrize("name", WITH_SOFTCAP)
def test_constant(name, kind, dtype, later):
    temperature = of_rows((3, 5), stats_dtype(dtype)) if kind == "rows" else kind
    problem = make((3, 5), 23, 9, (dtype,) * 3, bias=True, temperature=temperature, **WITH_SOFTCAP[name])
    oracle.compare(problem, solve(problem, differentiable_stats=later), keeps_16_bits=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_upstream_gradients_of_statistics(softcap, dtype):
    temperature = of_rows((11,))
    problem = make((11,), 23, 9, (dtype,) * 3, bias=True, softcap=softcap, temperature=temperature)
    oracle.compare(problem, solve(problem, ("loss", "nll", "lse", "entropy")), keeps_16_bits=True)


def test_is_that_of_torch():
    g = torch.Generator().manual_seed(0)
    x, w, t = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((40, 16), (50, 16), (40, 1)))
    y, t = torch.randint(50, (40,), generator=g), t.exp()

    def gradients(loss, leaves):
        return loss, *torch.autograd.grad(loss, leaves)

    for temperature in (t, torch.tensor([[0.3]], dtype=torch.float64)):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        logits = 5 * torch.tanh(F.linear(*leaves) / 5) / temperature
        expected = gradients(F.cross_entropy(logits, y), leaves)
        given = temperature[:, 0] if temperature.numel() > 1 else temperature.item()
        found = gradients(lce(*leaves, y, softcap=5.0, temperature=given), leaves)
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_of_one_changes_nothing():
    problem = make((3, 5), 23, 9, bias=True, softcap=2.0)
    expected = solve(problem)
    for temperature in (1, 1.0, torch.ones(()), torch.ones(3, 5)):
        problem.options["temperature"] = temperature
        found = solve(problem)
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_ignored_rows_may_hold_anything():
    problem = make((8,), 23, 9, temperature=torch.ones(8))
    problem.target[::2] = -100
    expected = solve(problem)
    problem.options["temperature"] = torch.tensor([0.0, 1, float("nan"), 1, -1, 1, float("inf"), 1])
    found = solve(problem)
    assert (found["d_input"][::2] == 0).all()
    assert all(found[name] is None or torch.equal(found[name], expected[name]) for name in found)
    problem.options["temperature"][1] = 0
    wrong = solve(problem)
    assert wrong["nll"][1].isnan() and wrong["d_input"][1].isnan().all() and wrong["nll"][3] == expected["nll"][3]


# ---- learned


def learned(problem, value, dtype, names, **options):
    """The gradient of a temperature, and those of the tensors."""
    temperature = torch.tensor(value, dtype=dtype, requires_grad=True)
    problem.options["temperature"] = temperature
    gradients = solve(problem, names, **options)
    problem.options["temperature"] = value if dtype == torch.float64 else temperature.item()
    return temperature.grad, gradients


def plain_gradient(problem, names, dtype):
    leaves = [None if t is None else t.detach() for t in (problem.input, problem.linear_weight, problem.linear_bias)]
    leaf = torch.tensor(problem.options["temperature"], dtype=dtype, requires_grad=True)
    changed = oracle.Problem(*leaves[:2], problem.target, leaves[2], problem.options | {"temperature": leaf})
    out = oracle.forward(changed, leaves, dtype)
    sum((problem.upstream[name].to(out[name].dtype) * out[name]).sum() for name in names).backward()
    return leaf.grad.double()


def check_gradient(problem, found, names):
    truth = plain_gradient(problem, names, torch.float64)
    naive = plain_gradient(problem, names, oracle.naive_dtype(problem))
    # sum_ij of what of a row's upstream gradient an element of dz may hold, times what of a logit it is multiplied by
    values = oracle.evaluate(problem, torch.float64)
    temperature = problem.options["temperature"]
    input, weight = problem.input.double().reshape(-1, problem.input.shape[-1]), problem.linear_weight.double()
    terms = abs(problem.options.get("scale", 1.0)) * (input.abs() @ weight.abs().T)
    if problem.linear_bias is not None:
        terms = terms + problem.linear_bias.double().abs()
    reach = (values["row_upstream"][:, None] * values["reach"] * terms).sum() / temperature**2 * (4 + values["size"])
    computed = torch.float64 if problem.input.dtype == torch.float64 else torch.float32
    unit = torch.finfo(computed).eps * (reach + truth.abs())
    if problem.input.dtype.itemsize == 2:  # exps may be kept in 16 bits
        unit = unit + torch.finfo(problem.input.dtype).eps / 2 * reach
    assert (found.double() - truth).abs() <= 2 * (naive - truth).abs() + unit


@pytest.mark.parametrize("later", [False, True], ids=["3F", "4F"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.3, 4.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_learned(name, bias, value, dtype, later):
    problem = make((3, 5), 23, 9, (dtype,) * 3, bias=bias, **CASES[name])
    found, gradients = learned(problem, value, stats_dtype(dtype), ("loss",), differentiable_stats=later)
    check_gradient(problem, found, ("loss",))
    constant = solve(problem, differentiable_stats=later)
    for key in ("d_input", "d_linear_weight", "d_linear_bias"):
        if constant[key] is not None:  # rounded once in both cases
            torch.testing.assert_close(gradients[key], constant[key], rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("name", ["nll", "lse", "entropy"])
def test_learned_from_statistics(name):
    problem = make((11,), 23, 9, bias=True)
    found, _ = learned(problem, 0.5, torch.float32, (name,))
    check_gradient(problem, found, (name,))


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_gradcheck(options):
    problem = make((3, 5), 23, 9, (torch.float64,) * 3, bias=True, **options)
    options = {name: value for name, value in options.items() if name != "scale"}
    numbers = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.7, 1.3)]

    def loss(input, weight, bias, scale, temperature):
        return lce(input, weight, problem.target, linear_bias=bias, scale=scale, temperature=temperature, **options)

    assert torch.autograd.gradcheck(loss, (*problem.leaves(), *numbers), fast_mode=True)
    assert torch.autograd.gradcheck(lambda t: loss(problem.input, problem.linear_weight, None, 1.0, t), numbers[1:])


@pytest.mark.parametrize("gradients", [(True, True), (False, True), (True, False)], ids=str)
def test_thinned_gradient_is_unbiased(gradients):
    problem = make((15,), 64, 9, bias=True, ignored=0.0)
    temperature = torch.tensor(0.5, requires_grad=True)
    input, weight, bias = (t.detach() for t in problem.leaves())
    (exact,) = torch.autograd.grad(
        lce(input, weight, problem.target, linear_bias=bias, temperature=temperature), temperature
    )
    for reduction in ("mean", "none"):
        draws = []
        for seed in range(300):
            options = {"gradient": "thinned", "threshold": 0.1, "seed": seed, "reduction": reduction}
            loss = lce(input, weight, problem.target, linear_bias=bias, temperature=temperature, **options).mean()
            draws.append(torch.autograd.grad(loss, temperature)[0])
        found = torch.stack(draws).double()
        assert (found.mean() - exact).abs() <= 5 * found.std() / 300**0.5 + 1e-6


# ---- the other ways to a loss


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(reduction):
    problem = make((15,), 23, 9, bias=True)

    def loss(input, weight, bias, temperature):
        return lce(
            input, weight, problem.target, linear_bias=bias, temperature=temperature.exp(), reduction=reduction
        ).sum()

    for shape in ((), (15,)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(loss, fullgraph=True, backend=counter)
        for value in (0.1, -0.3, 0.7):
            leaves = (*problem.leaves(), torch.full(shape, value, requires_grad=shape == ()))
            wanted = leaves[: 3 + (shape == ())]
            found, expected = (torch.autograd.grad(f(*leaves), wanted) for f in (compiled, loss))
            for a, b in zip(found, expected):
                assert torch.equal(a, b)
        assert counter.frame_count == 1


def test_exported():
    class Loss(torch.nn.Module):
        def forward(self, input, weight, target, temperature):
            return lce(input, weight, target, temperature=temperature)

    problem = make((15,), 23, 9)
    arguments = (problem.input, problem.linear_weight, problem.target, of_rows((15,)))
    exported = torch.export.export(Loss(), arguments)
    assert torch.equal(exported.module()(*arguments), Loss()(*arguments))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    problem = make((15,), 23, 9)
    for temperature in (of_rows((15,)), torch.tensor(0.4, requires_grad=True)):
        leaves = problem.leaves()[:2]
        wanted = (*leaves, *([temperature] if temperature.requires_grad else []))

        def loss(input, weight, temperature=temperature):
            return lce(input, weight, problem.target, temperature=temperature, reduction="none").sum()

        found = checkpoint(loss, *leaves, use_reentrant=reentrant)
        found.backward()
        for leaf, expected in zip(wanted, torch.autograd.grad(loss(*leaves), wanted)):
            assert torch.equal(leaf.grad, expected)


def test_module_and_numpy():
    torch.manual_seed(3)
    problem = make((15,), 23, 9)
    rows = of_rows((15,))
    module = logitless.LinearCrossEntropyLoss(9, 23, temperature=torch.nn.Parameter(torch.tensor(0.5)))
    assert "temperature" in dict(module.named_parameters()) and "temperature=" in repr(module)
    weight = module.linear.weight
    loss = module(problem.input, problem.target)
    assert torch.equal(loss, lce(problem.input, weight, problem.target, temperature=0.5))
    loss.backward()
    assert module.temperature.grad.isfinite()
    by_row = module(problem.input, problem.target, temperature=rows)
    assert torch.equal(by_row, lce(problem.input, weight, problem.target, temperature=rows))
    arrays = [t.detach().numpy() for t in (problem.input, weight, problem.target)]
    for temperature in (rows.numpy(), 0.5, np.float32(0.5)):
        found = logitless.numpy.linear_cross_entropy(*arrays, temperature=temperature, gradients=True)
        tensor = torch.as_tensor(temperature)
        expected = lce(problem.input, weight, problem.target, temperature=tensor if tensor.dim() else tensor.item())
        assert found.loss == expected.item()
    with pytest.raises(ValueError, match=r"temperature: expected shape \[15\] .* got \[3\]"):
        logitless.numpy.linear_cross_entropy(*arrays, temperature=np.ones(3))


BAD = [
    (0.0, {}, ValueError, "temperature: expected a finite number > 0, got 0"),
    (-1.0, {}, ValueError, "temperature: expected a finite number > 0, got -1"),
    (float("nan"), {}, ValueError, "temperature: expected a finite number > 0, got nan"),
    (1e-39, {}, ValueError, "temperature: expected .* got 1e-39"),
    ("hot", {}, TypeError, "temperature: expected a number, got str"),
    (torch.tensor(0.0), {}, ValueError, "temperature: expected a finite number > 0, got 0"),
    (torch.tensor(True), {}, TypeError, "temperature: expected a number, got torch.bool"),
    (
        torch.ones(14),
        {},
        ValueError,
        r"temperature: expected shape \[15\] \(that of target, or one element\), got \[14\]",
    ),
    (torch.ones(15, dtype=torch.complex64), {}, TypeError, "temperature: expected real numbers"),
    (torch.ones(15, requires_grad=True), {}, ValueError, "temperature: expected a tensor that does not require grad"),
    (torch.ones(15, device="meta"), {}, ValueError, "temperature: .* got device meta"),
    (torch.tensor(1.0, requires_grad=True), {"softcap": 2.0}, ValueError, "temperature: expected .* softcap 2.0"),
]


@pytest.mark.parametrize("temperature, options, error, message", BAD, ids=[b[3] for b in BAD])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_errors(temperature, options, error, message, reduction):
    problem = make((15,), 23, 9)
    with pytest.raises(error, match=message):
        lce(
            problem.input,
            problem.linear_weight,
            problem.target,
            temperature=temperature,
            reduction=reduction,
            **options,
        )
