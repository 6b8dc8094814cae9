"""Sparsified gradients for JAX: their seeds, statistics and mean."""

import jax
import jax.numpy as jnp
import logitless.jax
import logitless.numpy
import numpy as np
import oracle
import pytest

PROBLEM = oracle.make((24,), 300, 16, ignored=0.0, spread=2.0, reduction="sum")
THRESHOLD = 2.0**-4


def gradients(seed, **options):
    def loss(hidden, weight):
        return logitless.jax.linear_cross_entropy(
            hidden, weight, PROBLEM.targets, gradient="always-sparsified", threshold=THRESHOLD, seed=seed, **options
        ).sum()

    return jax.grad(loss, (0, 1))(PROBLEM.hidden, PROBLEM.weight)


SEEDS = {
    "key": jax.random.key(3),
    "raw key": jax.random.PRNGKey(3),
    "integer": -5,
    "array": jnp.int32(7),
}


@pytest.mark.parametrize("reduction", ("sum", "none"))
@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_a_seed_gives_the_same_bits(seed, reduction):
    first, again = gradients(seed, reduction=reduction), gradients(seed, reduction=reduction)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert np.any(first[1] != gradients(jax.random.key(4), reduction=reduction)[1])


def test_an_integer_is_the_seed_of_other_interfaces():
    for seed in (-5, 7, (1 << 40) + 3):
        words = np.asarray(logitless.jax._seed(seed))
        assert words.view(np.int64) == seed
    for seed in (-5, 7):
        assert (logitless.jax._seed(jnp.int32(seed)) == logitless.jax._seed(seed)).all()


def test_the_mean_of_draws_is_the_gradient():
    """The squared error of a mean of n draws is the draws' variance over n, here summed over all elements."""
    run, count = jax.jit(lambda key: gradients(key, reduction="sum")), 256
    draws = [run(key) for key in jax.random.split(jax.random.key(0), count)]
    exact = oracle.evaluate(PROBLEM, "float64", {"loss": np.ones(())})
    for index, name in enumerate(("d_hidden", "d_weight")):
        values = np.stack([np.asarray(draw[index], np.float64) for draw in draws])
        error, expected = ((values.mean(0) - exact[name]) ** 2).sum(), values.var(0).sum() / count
        assert expected / 2 < error < 2 * expected, name


def test_the_loss_is_exact_and_statistics_describe_the_draw():
    names = ("kept_count", "draw_variance", "nll")

    def loss(hidden, differentiable):
        out = logitless.jax.linear_cross_entropy(
            hidden,
            PROBLEM.weight,
            PROBLEM.targets,
            gradient="always-sparsified",
            threshold=THRESHOLD,
            seed=jax.random.key(0),
            return_stats=names,
            differentiable_stats=differentiable,
        )
        return out.loss, out

    exact = logitless.jax.linear_cross_entropy(PROBLEM.hidden, PROBLEM.weight, PROBLEM.targets)
    outputs = [loss(PROBLEM.hidden, True)[1]]
    outputs += [jax.grad(loss, has_aux=True)(PROBLEM.hidden, later)[1] for later in (True, False)]
    for out in outputs:
        assert out.loss == exact
        assert out.kept_count.dtype == jnp.int32 and (out.kept_count >= 1).all()
        np.testing.assert_array_equal(out.kept_count, outputs[0].kept_count)
        np.testing.assert_allclose(out.draw_variance, outputs[0].draw_variance, rtol=1e-5)


def test_keys_of_a_batch_draw_apart():
    keys = jax.random.split(jax.random.key(0), 2)
    first, second = jax.vmap(lambda key: gradients(key, reduction="sum")[1])(keys)
    assert np.any(first != second)
    np.testing.assert_array_equal(first, gradients(keys[0], reduction="sum")[1])


def test_backward_passes_side_by_side():
    """Two of them read one draw, which each changes while it runs."""

    def loss(hidden):
        return logitless.jax.linear_cross_entropy(
            hidden, PROBLEM.weight, PROBLEM.targets, reduction="none", gradient="always-sparsified", seed=1
        )

    @jax.jit
    def both(hidden):
        _, pull = jax.vjp(loss, hidden)
        return pull(jnp.ones(24)), pull(jnp.full(24, 2.0))

    (one,), (two,) = both(PROBLEM.hidden)
    np.testing.assert_allclose(2 * one, two, rtol=1e-5)
    assert "copy" in both.lower(PROBLEM.hidden).compile().as_text()


@pytest.mark.parametrize("trains", (False, True))
def test_a_screen(trains):
    """Its results have the bits of the numpy interface."""
    screen = {"gradient": "always-sparsified", "threshold": THRESHOLD, "screen": "fp8", "seed": 5, "reduction": "sum"}
    names = ("nll", "loss_error", "valid_count", "kept_count")
    arrays = [np.asarray(array) for array in (PROBLEM.hidden, PROBLEM.weight, PROBLEM.targets)]

    @jax.jit
    def loss(hidden, weight):
        options = screen | {"return_stats": names, "differentiable_stats": False}
        out = logitless.jax.linear_cross_entropy(hidden, weight, PROBLEM.targets, **options)
        return out.loss, out

    expected = logitless.numpy.linear_cross_entropy(*arrays, gradients=True, return_stats=names, **screen)
    if trains:
        gradients, out = jax.grad(loss, (0, 1), has_aux=True)(PROBLEM.hidden, PROBLEM.weight)
        np.testing.assert_array_equal(gradients[0], expected.d_hidden)
        np.testing.assert_array_equal(gradients[1], expected.d_weight)
    else:
        out = loss(PROBLEM.hidden, PROBLEM.weight)[1]
    for name in ("loss", *names):
        np.testing.assert_array_equal(getattr(out, name), getattr(expected, name), name)


def test_what_a_screen_refuses():
    with pytest.raises(ValueError, match='reduction: expected "mean" or "sum" with a screen'):
        gradients(0, screen="fp8", reduction="none")
    with pytest.raises(ValueError, match="return_stats: expected no entropy with a screen"):
        gradients(0, screen="fp8", return_stats=("entropy",))
