"""Every option, alone and in random combinations, against the plain float64 computation."""

import functools

import logitless
import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import DIFFERENTIABLE, make, solve
from support import DTYPES, SHORT, lce

LATER = pytest.mark.parametrize("later", [False, True], ids=["3F", "4F"])
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def places(*engines):
    """Returns the CPU, and a CUDA device for each of these engines."""
    return ["cpu", *(pytest.param(f"cuda:{name}", marks=pytest.mark.gpu) for name in engines)]


@pytest.fixture
def check(request, monkeypatch):
    """Returns check(problem, names, **options), which computes there and compares. CUDA keeps 16-bit exp logits."""
    device, _, engine = request.param.partition(":")
    if engine == "mma" and request.node.callspec.params["dtype"] not in SHORT:
        pytest.skip("mma takes 16-bit operands")
    if engine == "automatic":
        monkeypatch.delenv("LOGITLESS_CUDA_ENGINE", raising=False)
    elif engine:
        monkeypatch.setenv("LOGITLESS_CUDA_ENGINE", engine)

    def check(problem, names=("loss",), **options):
        oracle.compare(problem, solve(problem, names, device, **options), keeps_16_bits=device == "cuda")

    return check


everywhere = functools.partial(pytest.mark.parametrize, "check", indirect=True)


def positive(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


ROW_TEMPERATURES = 10 ** (2 * positive(9, 3, 5) - 1.2)
OTHERS = {
    "plain": {},
    "sum": {"reduction": "sum", "z_loss": 0.1},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.2, "class_weight": positive(5, 23)},
    "token_weight": {"token_weight": positive(6, 3, 5)},
    "shift": {"shift": 1, "reduction": "none"},
}
WITH_SOFTCAP = OTHERS | {
    "softcap": {"softcap": 2.0, "num_items": 7},
    "softcap none": {"softcap": 2.0, "shift": 1, "reduction": "none"},
}
SINGLE = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore_index": {"ignore_index": 3},
    "label_smoothing": {"label_smoothing": 0.1},
    "all_smoothing": {"label_smoothing": 1.0},
    "scale": {"scale": 0.3},
    "negative_scale": {"scale": -2.0},
    "softcap": {"softcap": 2.0},
    "z_loss": {"z_loss": 1e-2},
    "num_items": {"num_items": 7.5},
    "num_items_tensor": {"num_items": torch.tensor(11)},
    "shift": {"shift": 1},
    "long_shift": {"shift": 99},
    "class_weight": {"class_weight": positive(5, 23)},
    "token_weight": {"token_weight": positive(6, 3, 5)},
    "low_temperature": {"temperature": 0.1, "softcap": 2.0},
    "high_temperature": {"temperature": 7, "scale": -1.5},
}
SINGLE |= {
    f"temperatures, {name}": options | {"temperature": ROW_TEMPERATURES} for name, options in WITH_SOFTCAP.items()
}
LEARNED = {
    f"{number} of {value}, {name}": {"learned": (number,), number: value} | options
    for number, values, others in (("scale", (0.3125, -2.0), WITH_SOFTCAP), ("temperature", (0.3125, 4.0), OTHERS))
    for value in values
    for name, options in others.items()
}


@LATER
@EACH_DTYPE
@pytest.mark.parametrize("name", SINGLE)
@everywhere(places("automatic", "portable"))
def test_one_option(name, dtype, later, check):
    check(make((3, 5), 23, 9, dtype, bias=True, **SINGLE[name]), differentiable_stats=later)


ON_ALL_OF_CUDA = places("automatic", "mma", "portable")[1:]
ON_CUDA = [name for name in LEARNED if "of 0.3125" in name and name.endswith((", plain", ", none"))]


@LATER
@EACH_DTYPE
@pytest.mark.parametrize(
    "name, check",
    [(name, "cpu") for name in LEARNED]
    + [pytest.param(name, *place.values, marks=place.marks) for name in ON_CUDA for place in ON_ALL_OF_CUDA],
    indirect=["check"],
)
def test_learned_number(name, dtype, later, check):
    """It tests the number's gradient and those of the tensors. On CUDA the number may be on the CPU, where reading
    needs no wait."""
    for bias in (True, False):
        problem = make((3, 5), 23, 9, dtype, bias=bias, **LEARNED[name])
        check(problem, numbers_on="cpu" if later else None, differentiable_stats=later)


@EACH_DTYPE
@pytest.mark.parametrize("learned", [(), ("scale",), ("temperature",)], ids=str)
@pytest.mark.parametrize("name", ["nll", "lse", "entropy"])
@everywhere(places("automatic", "portable"))
def test_gradient_of_one_statistic(name, learned, dtype, check):
    softcap = None if "temperature" in learned else 3.0  # only plain numbers allow both
    check(make((11,), 23, 9, dtype, True, learned=learned, scale=0.5, temperature=0.75, softcap=softcap), (name,))


@EACH_DTYPE
@pytest.mark.parametrize("shape", [(1, 1, 1), (257, 259, 67), (300, 601, 136), (5, 2053, 33), (130, 129, 8)], ids=str)
@everywhere(places("automatic", "portable"))
def test_shapes_across_tiles(shape, dtype, check):
    tokens, vocab, hidden = shape
    problem = make((tokens,), vocab, hidden, dtype, bias=True, spread=3.0, label_smoothing=0.05)
    check(problem, differentiable_stats=False)


def test_a_learned_scale_of_more_rows_than_are_multiplied_at_a_time():
    problem = make((700,), 40, 2048, spread=3.0, reduction="sum", scale=0.5, learned=("scale",))
    oracle.compare(problem, solve(problem))


LAYOUTS = {
    "rows": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every_second_row": lambda t: t.repeat_interleave(2, 0)[::2],
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "columns": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda t: torch.cat([t[:1], t])[1:],
    "misaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "misaligned_rows": lambda t: torch.cat([t, t[..., :1]], -1)[..., : t.shape[-1]] if t.dim() > 1 else t,
}


@EACH_DTYPE
@pytest.mark.parametrize("layout", LAYOUTS)
@everywhere(places("automatic", "portable"))
def test_layouts(layout, dtype, check):
    problem = make((37,), 131, 16, dtype, bias=True)
    check(problem, layout=LAYOUTS[layout], differentiable_stats=False)
    check(problem, ("nll",), layout=LAYOUTS[layout])


@st.composite
def problems(draw):
    mixed = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
    dtypes = draw(st.one_of(st.tuples(mixed, mixed, mixed), st.just((torch.float64,) * 3)))
    shape = draw(st.sampled_from([(), (1,), (7,), (2, 3), (2, 1, 4), (40,)]))
    vocab, hidden = draw(st.integers(1, 70)), draw(st.integers(1, 40))
    reduction = draw(st.sampled_from(["mean", "sum", "none"]))
    options = {"reduction": reduction}
    if draw(st.booleans()):
        options["ignore_index"] = draw(st.sampled_from([-1, 0, vocab, vocab - 1]))
    choices = {
        "label_smoothing": st.floats(0, 1),
        "scale": st.one_of(st.floats(-3, -1e-3), st.floats(1e-3, 3), st.sampled_from([0.0, 1e-300])),
        "softcap": st.floats(0.5, 50),
        "temperature": st.floats(0.1, 10),
        "z_loss": st.floats(0, 0.5),
        "shift": st.integers(0, 3),
    }
    for name, values in choices.items():
        if draw(st.booleans()):
            options[name] = draw(values)
    seed = draw(st.integers(0, 2**31))
    g = torch.Generator().manual_seed(seed)
    if draw(st.booleans()):
        options["class_weight"] = torch.rand(vocab, generator=g) + 0.05
    if draw(st.booleans()):
        options["token_weight"] = torch.rand(shape, generator=g) + 0.05
    if draw(st.booleans()):
        options["temperature"] = torch.rand(shape, generator=g) * 4 + 0.1
    if reduction == "mean" and draw(st.booleans()):
        options["num_items"] = draw(st.floats(0.5, 100))
    spread = draw(st.sampled_from([0.1, 1.0, 8.0]))
    return make(shape, vocab, hidden, dtypes, bias=draw(st.booleans()), spread=spread, seed=seed, **options)


@given(problems(), st.sets(st.sampled_from(DIFFERENTIABLE), min_size=1))
def test_random_combinations(problem, upstream):
    """It covers gradients of any statistics, gradients in the forward pass, and the loss alone."""
    oracle.compare(problem, solve(problem, tuple(sorted(upstream))))
    got = solve(problem, differentiable_stats=False)
    oracle.compare(problem, got)
    loss = lce(*problem.arguments, bias=problem.bias, **problem.options)
    torch.testing.assert_close(loss, got["loss"], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.gpu
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(problems())
def test_random_combinations_on_cuda(problem):
    for names, options in ((DIFFERENTIABLE, {}), (("loss",), {"differentiable_stats": False})):
        oracle.compare(problem, solve(problem, names, "cuda", **options), keeps_16_bits=True)


# ---- learned numbers and temperatures of rows beside what else there is


def test_of_one_a_temperature_changes_nothing():
    problem = make((3, 5), 23, 9, bias=True, softcap=2.0)
    expected = solve(problem)
    for temperature in (1, 1.0, torch.ones(()), torch.ones(3, 5)):
        problem.options["temperature"] = temperature
        got = solve(problem)
        assert all(torch.equal(got[name], expected[name]) for name in got)


def test_temperatures_of_ignored_rows_may_hold_anything():
    problem = make((8,), 23, 9, temperature=torch.ones(8))
    problem.target[::2] = -100
    expected = solve(problem)
    problem.options["temperature"] = torch.tensor([0.0, 1, float("nan"), 1, -1, 1, float("inf"), 1])
    got = solve(problem)
    assert (got["d_hidden"][::2] == 0).all()
    assert all(got[name] is None or torch.equal(got[name], expected[name]) for name in got)
    problem.options["temperature"][1] = 0
    wrong = solve(problem)
    assert wrong["nll"][1].isnan() and wrong["d_hidden"][1].isnan().all() and wrong["nll"][3] == expected["nll"][3]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_rows_are_not_multiplied_by_a_learned_scale(reduction):
    problem = make((7,), 23, 9, reduction=reduction, scale=0.3125, learned=("scale",))
    problem.target[2] = -100
    d_scales = []
    for fill in (0.0, float("nan"), float("inf")):
        problem.input[2] = fill
        d_scales.append(solve(problem)["d_scale"])
    assert d_scales[0].isfinite() and d_scales[0] == d_scales[1] == d_scales[2]


@pytest.mark.parametrize("name", ["scale", "temperature"])
def test_numbers_that_are_tensors(name):
    """The numbers are constant, learned in any real dtype and shape of one element, or without gradients."""
    arguments = make((15,), 23, 9).arguments
    expected = lce(*arguments, **{name: 0.5})
    assert torch.equal(lce(*arguments, **{name: torch.tensor(0.5)}), expected)
    learned = torch.tensor(0.5, requires_grad=True)
    with torch.no_grad():
        got = lce(*arguments, **{name: learned})
    assert torch.equal(got, expected) and not got.requires_grad
    (gradient,) = torch.autograd.grad(lce(*arguments, **{name: learned}), learned)
    for like in (torch.ones(1, 1), torch.ones((), dtype=torch.float64), torch.ones(1, dtype=torch.bfloat16)):
        other = (like / 2).requires_grad_()
        (got,) = torch.autograd.grad(lce(*arguments, **{name: other}), other)
        assert got.dtype == like.dtype and got.shape == like.shape
        torch.testing.assert_close(got.float().squeeze(), gradient, rtol=torch.finfo(like.dtype).eps, atol=1e-7)


def test_a_learned_scale_of_0_without_gradients():
    problem = make((15,), 23, 9)
    with torch.no_grad():
        lce(*problem.arguments, scale=torch.tensor(0.0, requires_grad=True))


@pytest.mark.parametrize("name", ["scale", "temperature"])
def test_a_number_that_is_changed_between_the_passes_is_refused(name):
    problem = make((15,), 23, 9)
    number = torch.tensor(0.5, requires_grad=True)
    loss = lce(*problem.arguments, reduction="none", **{name: number}).sum()
    with torch.no_grad():
        number.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["scale", "temperature"])
@pytest.mark.parametrize("trained", [(True, True), (False, True), (True, False)], ids=str)
def test_the_sparsified_gradient_of_a_number_is_unbiased(name, trained):
    problem = make((15,), 64, 9, bias=True, ignored=0.0)
    number = torch.tensor(0.5, requires_grad=True)
    input, weight = (t.detach().requires_grad_(on) for t, on in zip(problem.leaves(), trained))
    given = {"bias": problem.bias, name: number}
    (exact,) = torch.autograd.grad(lce(input, weight, problem.target, **given), number)
    for reduction in ("mean", "none"):
        draws = []
        for seed in range(300):
            options = {"gradient": "sparsified", "threshold": 0.1, "seed": seed, "reduction": reduction}
            loss = lce(input, weight, problem.target, **given, **options).mean()
            draws.append(torch.autograd.grad(loss, number)[0])
        values = torch.stack(draws).double()
        assert (values.mean() - exact).abs() <= 5 * values.std() / 300**0.5 + 1e-6


def test_a_temperature_that_is_a_parameter_of_a_module():
    problem, rows = make((15,), 23, 9), positive(9, 15)
    module = logitless.LinearCrossEntropyLoss(9, 23, temperature=torch.nn.Parameter(torch.tensor(0.5)))
    assert "temperature" in dict(module.named_parameters()) and "temperature=" in repr(module)
    weight = module.linear.weight
    loss = module(problem.input, problem.target)
    assert torch.equal(loss, lce(problem.input, weight, problem.target, temperature=0.5))
    loss.backward()
    assert module.temperature.grad.isfinite()
    by_row = module(problem.input, problem.target, temperature=rows)
    assert torch.equal(by_row, lce(problem.input, weight, problem.target, temperature=rows))
