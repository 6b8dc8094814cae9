"""linear_cross_entropy for JAX on a CUDA device."""

import functools

import jax
import jax.numpy as jnp
import logitless.jax
import numpy as np
import oracle
import pytest
from test_values import OPTIONS, UPSTREAM

pytestmark = pytest.mark.gpu
# Products of float32 would round their operands to TF32 otherwise, here and in XLA.
exact_products = functools.partial(jax.default_matmul_precision, "highest")


@pytest.mark.parametrize("upstream", UPSTREAM.values(), ids=UPSTREAM)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, upstream):
    with exact_products():
        oracle.check(oracle.make((3, 7), 83, 24, **options), upstream)


@pytest.mark.parametrize("upstream", UPSTREAM.values(), ids=UPSTREAM)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", ("bfloat16", "float32", "float32"), "float32"), ids=str)
def test_larger_heads(dtype, upstream):
    """Fused kernels, and exp logits that are saved for gradients that come later."""
    with exact_products():
        oracle.check(oracle.make((700,), 5003, 256, dtype, ignored=0.1), upstream)


@pytest.mark.parametrize("options", ({}, {"recompute_logits": True}, {"max_workspace_bytes": "8MiB"}), ids=str)
def test_gradients_that_come_later(options):
    problem = oracle.make((700,), 5003, 256, "bfloat16", reduction="none")
    got, upstream = oracle.solve(problem, **options)
    oracle.compare(problem, got, upstream)


def test_saved_exp_logits_are_residuals():
    """A call keeps about two bytes for each logit where its gradients come later, unless it computes logits again."""
    problem = oracle.make((700,), 5003, 256, "bfloat16", reduction="none")

    def largest_uint8(**options):
        def loss(hidden):
            return logitless.jax.linear_cross_entropy(
                hidden, problem.weight, problem.targets, reduction="none", max_workspace_bytes="fastest", **options
            )

        residuals = jax.eval_shape(lambda h: jax.vjp(loss, h)[1], problem.hidden)
        return max((leaf.size for leaf in jax.tree.leaves(residuals) if leaf.dtype == np.uint8), default=0)

    assert 2 * 700 * 5003 <= largest_uint8() < 3 * 700 * 5003
    assert largest_uint8(recompute_logits=True) == 0


def test_float64():
    with jax.enable_x64(True):
        oracle.check(oracle.make((9,), 31, 8, "float64", bias=True), oracle.DIFFERENTIABLE)


@pytest.mark.parametrize("shape", (((1,), 1, 1), ((0,), 9, 4), ((5,), 1, 8), ((3, 1, 5), 257, 33)), ids=str)
def test_shapes(shape):
    with exact_products():
        oracle.check(oracle.make(*shape, ignored=0.0, reduction="sum"), oracle.DIFFERENTIABLE)


def test_sparsified_gradients():
    problem = oracle.make((256,), 20_000, 128, "bfloat16", ignored=0.0, spread=3.0, reduction="sum")

    def gradients(key, reduction="sum"):
        def loss(hidden, weight):
            return logitless.jax.linear_cross_entropy(
                hidden, weight, problem.targets, reduction=reduction, gradient="always-sparsified", seed=key
            ).sum()

        return jax.jit(jax.grad(loss, (0, 1)))(jnp.asarray(problem.hidden), jnp.asarray(problem.weight))

    exact = oracle.evaluate(problem, "float64", {"loss": np.ones(())})
    for reduction in ("sum", "none"):
        first, again = (gradients(jax.random.key(1), reduction) for _ in range(2))
        jax.tree.map(np.testing.assert_array_equal, first, again)
        error = np.linalg.norm(np.asarray(first[0], np.float64) - exact["d_hidden"]) / np.linalg.norm(exact["d_hidden"])
        assert 0 < error < 0.1
    assert np.any(first[0] != gradients(jax.random.key(2))[0])


def test_a_target_out_of_range_is_nan():
    problem = oracle.make((6,), 31, 8, reduction="none")
    problem.targets[2] = 31
    got = logitless.jax.linear_cross_entropy(problem.hidden, problem.weight, problem.targets, reduction="none")
    assert np.isnan(got[2]) and np.isfinite(np.delete(got, 2)).all()


def test_work_before_and_behind_is_in_order():
    """The call runs on XLA's stream: it reads what kernels before it write, and later kernels read its results."""
    weight = jnp.asarray(oracle.make((1,), 5003, 256, "bfloat16").weight)
    targets = jnp.arange(512) % 5003

    @jax.jit
    def steps(hidden):
        def step(hidden, _):
            hidden = jnp.tanh(hidden @ jnp.eye(256, dtype=hidden.dtype))
            value, gradient = jax.value_and_grad(logitless.jax.linear_cross_entropy)(hidden, weight, targets)
            return hidden - 100 * gradient, value

        return jax.lax.scan(step, hidden, None, length=20)[1]

    hidden = jax.random.normal(jax.random.key(0), (512, 256), jnp.bfloat16)
    first = steps(hidden)
    assert np.isfinite(first).all() and first[-1] < first[0]
    for _ in range(5):
        np.testing.assert_array_equal(first, steps(hidden))


def test_memory_stays_within_the_budget():
    budget, shapes = 64 << 20, ((4096, 1024), (50_000, 1024))
    run = jax.jit(
        jax.grad(
            lambda h, w, y: logitless.jax.linear_cross_entropy(h, w, y, max_workspace_bytes=budget), argnums=(0, 1)
        )
    )
    of_arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    compiled = run.lower(*of_arrays, jax.ShapeDtypeStruct((4096,), np.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= budget + (1 << 20)


def test_platforms_of_one_machine():
    """A traced call on the other platform names the argument that says where it will run."""
    problem = oracle.make((6,), 31, 8)
    arguments = (problem.hidden, problem.weight, problem.targets)
    on_cpu = [jax.device_put(array, jax.devices("cpu")[0]) for array in arguments]
    with jax.default_device(jax.devices("cpu")[0]):
        expected = logitless.jax.linear_cross_entropy(*on_cpu)
    got = jax.jit(functools.partial(logitless.jax.linear_cross_entropy, platform="cpu"))(*on_cpu)
    assert got == expected == logitless.jax.linear_cross_entropy(*on_cpu)
    with pytest.raises(jax.errors.JaxRuntimeError, match="platform: expected cuda"):
        jax.block_until_ready(jax.jit(logitless.jax.linear_cross_entropy)(*on_cpu))
