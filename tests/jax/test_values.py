"""Values and gradients of linear_cross_entropy for JAX against float64."""

import re

import jax
import jax.numpy as jnp
import logitless.jax
import logitless.numpy
import numpy as np
import oracle
import pytest

RNG = np.random.default_rng(5)
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "bias": {"bias": True},
    "softcap": {"softcap": 3.0, "bias": True},
    "scale": {"scale": -0.5},
    "temperature": {"temperature": 0.7, "bias": True},
    "row temperature": {"temperature": RNG.uniform(0.5, 2, (3, 7))},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.01},
    "class_weight": {"class_weight": RNG.uniform(0.1, 2, 83), "label_smoothing": 0.2},
    "token_weight": {"token_weight": RNG.uniform(-1, 2, (3, 7))},
    "ignore_index": {"ignore_index": 5},
    "num_items": {"num_items": 11.0},
    "num_items array": {"num_items": np.float32(11)},
    "shift": {"shift": 2},
    "budget": {"max_workspace_bytes": "1MiB"},
    "batch_invariant": {"batch_invariant": True},
    "several": {"several": 3, "label_smoothing": 0.1},
    "several shifted": {"several": 3, "shift": 1, "reduction": "none"},
    "all": {
        "bias": True,
        "softcap": 4.0,
        "scale": 1.5,
        "temperature": 1.3,
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "class_weight": RNG.uniform(0.1, 2, 83),
        "token_weight": RNG.uniform(0, 2, (3, 7)),
        "shift": 1,
    },
}
UPSTREAM = {"loss": ("loss",), "stats": oracle.DIFFERENTIABLE}


@pytest.mark.parametrize("upstream", UPSTREAM.values(), ids=UPSTREAM)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, upstream):
    oracle.check(oracle.make((3, 7), 83, 24, **options), upstream)


DTYPES = ("bfloat16", "float16", ("bfloat16", "float32", "float32"), ("float32", "bfloat16", "float16"))


@pytest.mark.parametrize("upstream", UPSTREAM.values(), ids=UPSTREAM)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, upstream):
    got = oracle.check(oracle.make((40,), 131, 48, dtype, bias=True), upstream)
    assert got["loss"].dtype == jnp.float32
    expected = dtype if isinstance(dtype, tuple) else (dtype,) * 3
    assert [str(got[f"d_{name}"].dtype) for name in oracle.MATRICES] == list(expected)


@pytest.mark.parametrize("upstream", UPSTREAM.values(), ids=UPSTREAM)
def test_float64(upstream):
    with jax.enable_x64(True):
        got = oracle.check(oracle.make((9,), 31, 8, "float64", bias=True), upstream)
        assert got["loss"].dtype == got["d_weight"].dtype == jnp.float64
        assert got["argmax"].dtype == got["valid_count"].dtype == jnp.int64


SHAPES = {
    "one row": ((1,), 7, 3),
    "one class": ((5,), 1, 4),
    "one number": ((1,), 1, 1),
    "no dimension of rows": ((), 9, 4),
    "no row": ((0,), 9, 4),
    "odd sizes": ((3, 1, 5), 257, 33),
    "more rows than classes": ((300,), 3, 2),
}


@pytest.mark.parametrize("reduction", ("none", "sum"))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape, reduction):
    oracle.check(oracle.make(*shape, ignored=0.0, reduction=reduction), oracle.DIFFERENTIABLE)


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_all_rows_ignored(reduction):
    problem = oracle.make((4,), 9, 4, ignored=1.0, reduction=reduction, bias=True)
    got, _ = oracle.solve(problem)
    assert np.isnan(got["loss"]) if reduction == "mean" else not np.any(got["loss"])
    assert not any(np.any(got[f"d_{name}"]) for name in oracle.MATRICES)
    assert (got["argmax"] == -1).all() and got["valid_count"] == 0


def test_compute_dtype_rounds_the_operands_of_products():
    problem = oracle.make((20,), 65, 32)
    got, upstream = oracle.solve(problem, compute_dtype="bfloat16")
    rounded = {name: getattr(problem, name).astype(jnp.bfloat16) for name in ("hidden", "weight")}
    oracle.compare(oracle.Problem(**rounded, targets=problem.targets, options=problem.options), got, upstream)


def test_logits_of_fp8():
    problem = oracle.make((20,), 65, 32)
    arrays = problem.hidden, problem.weight

    def loss(hidden, weight):
        return logitless.jax.linear_cross_entropy(hidden, weight, problem.targets, compute_dtype="fp8")

    got, gradients = jax.value_and_grad(loss, argnums=(0, 1))(*arrays)
    numbers = [np.array(array) for array in (*arrays, problem.targets)]
    want = logitless.numpy.linear_cross_entropy(*numbers, gradients=True, compute_dtype="fp8")
    assert got == want.loss and got != logitless.jax.linear_cross_entropy(*arrays, problem.targets)
    for gradient, expected in zip(gradients, (want.d_hidden, want.d_weight)):
        assert np.array_equal(gradient, expected)


def test_a_traced_number_of_items():
    problem = oracle.make((12,), 31, 8)

    @jax.jit
    def loss(hidden, items):
        return logitless.jax.linear_cross_entropy(hidden, problem.weight, problem.targets, num_items=items)

    got = loss(problem.hidden, 5)
    assert got == logitless.jax.linear_cross_entropy(problem.hidden, problem.weight, problem.targets, num_items=5.0)


def test_integers_are_int32_without_x64():
    problem = oracle.make((6,), 11, 4)
    out = logitless.jax.linear_cross_entropy(problem.hidden, problem.weight, problem.targets, return_stats=True)
    assert out.argmax.dtype == out.correct_count.dtype == jnp.int32
    assert out.is_top1 is None and out._fields == ("loss", *logitless.options.STAT_NAMES)


def test_stats_without_gradients_leave_the_gradients_with_the_loss():
    """The forward pass then makes the gradients, and the backward pass runs nothing."""
    problem = oracle.make((6,), 11, 4)

    def calls(**options):
        def loss(hidden):
            out = logitless.jax.linear_cross_entropy(
                hidden, problem.weight, problem.targets, return_stats=True, **options
            )
            return out.loss

        return str(jax.make_jaxpr(jax.grad(loss))(problem.hidden)).count("ffi_call[")

    assert calls(differentiable_stats=False) == 1
    assert calls() == 2


def test_xla_makes_no_pass_over_gradients_of_the_loss_itself():
    problem = oracle.make((6,), 11, 4, "bfloat16")

    def loss(hidden, weight):
        return logitless.jax.linear_cross_entropy(hidden, weight, problem.targets)

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(problem.hidden, problem.weight).compile()
    operations = re.findall(r"= bf16\[11,4\]\S* (\S+)\(", compiled.as_text())
    assert set(operations) <= {"parameter", "get-tuple-element"}


def test_a_frozen_weight_gets_no_gradient_buffer():
    problem = oracle.make((6,), 11, 4)

    def loss(hidden, weight):
        return logitless.jax.linear_cross_entropy(hidden, weight, problem.targets)

    text = str(jax.make_jaxpr(jax.grad(loss))(problem.hidden, problem.weight))
    assert "f32[6,4]" in text and "f32[11,4]" not in text.split("ffi_call[")[0].rsplit("let", 1)[-1]
