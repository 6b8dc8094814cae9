"""Every option, alone and in random combinations, against the plain float64 computation."""

import logitless
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import DIFFERENTIABLE, NAMES, Problem, compare

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def make(shape, vocab, hidden, dtypes=(torch.float32,) * 3, bias=False, ignored=0.2, spread=1.0, seed=0, **options):
    """A problem with random values; `spread` is the size of the logits."""
    g = torch.Generator().manual_seed(seed)

    def randn(*size):
        return torch.randn(*size, generator=g)

    tokens = torch.Size(shape).numel()
    target = torch.randint(0, vocab, (tokens,), generator=g)
    if tokens:
        target[torch.rand(tokens, generator=g) < ignored] = options.get("ignore_index", -100)
    return Problem(
        input=randn(*shape, hidden).to(dtypes[0]),
        linear_weight=(randn(vocab, hidden) * spread / hidden**0.5).to(dtypes[1]),
        target=target.reshape(shape),
        linear_bias=randn(vocab).to(dtypes[2]) if bias else None,
        options=options,
    )


def upstream_like(out, names, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(getattr(out, n).shape, generator=g).double() for n in names}


def run(problem, upstream_names=("loss",), **options):
    """Outputs and gradients of logitless by name; sets the problem's upstream gradients."""
    leaves = problem.leaves()
    out = logitless.linear_cross_entropy(
        leaves[0], leaves[1], problem.target, linear_bias=leaves[2], return_stats=True, **problem.options, **options
    )
    problem.upstream = upstream_like(out, upstream_names)
    tensors = [getattr(out, name) for name in upstream_names]
    torch.autograd.backward(tensors, [problem.upstream[n].to(t.dtype) for n, t in zip(upstream_names, tensors)])
    got = {name: value.detach() for name, value in out._asdict().items() if value is not None}
    return got | {n: None if leaf is None else leaf.grad for n, leaf in zip(NAMES[4:], leaves)}


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
    "temperature": {"temperature": 0.3, "softcap": 2.0},
    "temperature_of_rows": {"temperature": torch.rand(3, 5, generator=torch.Generator().manual_seed(7)) + 0.2},
    "z_loss": {"z_loss": 1e-2},
    "num_items": {"num_items": 7.5},
    "num_items_tensor": {"num_items": torch.tensor(11)},
    "shift": {"shift": 1},
    "long_shift": {"shift": 99},
    "weight": {"weight": torch.rand(23, generator=torch.Generator().manual_seed(5)) + 0.1},
    "token_weight": {"token_weight": torch.rand(3, 5, generator=torch.Generator().manual_seed(6)) + 0.1},
}


@pytest.mark.parametrize("later", [False, True], ids=["3F", "4F"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SINGLE)
def test_one_option(name, dtype, later):
    problem = make((3, 5), 23, 9, (dtype,) * 3, bias=True, **SINGLE[name])
    compare(problem, run(problem, differentiable_stats=later))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["nll", "lse", "entropy"])
def test_gradient_of_one_statistic(name, dtype):
    problem = make((11,), 23, 9, (dtype,) * 3, bias=True, softcap=3.0)
    compare(problem, run(problem, (name,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(257, 259, 67), (300, 601, 130), (5, 2053, 33)], ids=str)
def test_shapes_across_blocks(shape, dtype):
    tokens, vocab, hidden = shape
    problem = make((tokens,), vocab, hidden, (dtype,) * 3, bias=True, spread=3.0, label_smoothing=0.05)
    compare(problem, run(problem, differentiable_stats=False))


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
        options["weight"] = torch.rand(vocab, generator=g) + 0.05
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
    compare(problem, run(problem, tuple(sorted(upstream))))


@given(problems())
def test_random_combinations_with_gradients_in_the_forward_pass(problem):
    compare(problem, run(problem, differentiable_stats=False))


@given(problems())
def test_loss_only_equals_the_loss_with_gradients(problem):
    got = run(problem)
    arguments = (problem.input, problem.linear_weight, problem.target)
    loss = logitless.linear_cross_entropy(*arguments, linear_bias=problem.linear_bias, **problem.options)
    torch.testing.assert_close(loss, got["loss"], rtol=1e-5, atol=1e-5, equal_nan=True)
