"""jit, grad, vmap, checkpoint, scan, donation and the transforms that are refused, for JAX."""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import logitless.jax
import numpy as np
import oracle
import pytest

PROBLEM = oracle.make((3, 5), 29, 8, ignored=0.0)
ARGUMENTS = tuple(map(jnp.asarray, (PROBLEM.hidden, PROBLEM.weight, PROBLEM.targets)))
loss = logitless.jax.linear_cross_entropy
LATER = {"reduction": "none", "z_loss": 0.1}


def plain(hidden, weight, targets, reduction="mean", z_loss=0.0):
    logits = hidden @ weight.T
    lse = jax.nn.logsumexp(logits, -1)
    rows = lse - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0] + z_loss * lse**2
    return rows.mean() if reduction == "mean" else rows


def both(transform, **options):
    """Compares a transform of our loss with that of the plain one, within float32's rounding of sums."""
    ours = transform(lambda *arguments: loss(*arguments, **options))(*ARGUMENTS)
    expected = transform(lambda *arguments: plain(*arguments, **options))(*ARGUMENTS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), ours, expected)


def total(f):
    return lambda *arguments: f(*arguments).sum()


def grads(f):
    return jax.grad(total(f), (0, 1))


def over_rows(f):
    return jax.vmap(f, (0, None, 0))


def scanned(f):
    def run(hidden, weight, targets):
        return jax.lax.scan(lambda s, x: (s + f(x[0], weight, x[1]).sum(), None), 0.0, (hidden, targets))[0]

    return run


TRANSFORMS = {
    "value": lambda f: f,
    "jit": jax.jit,
    "grad": grads,
    "jit of grad": lambda f: jax.jit(grads(f)),
    "grad of jit": lambda f: grads(jax.jit(f)),
    "vmap": over_rows,
    "grad of vmap": lambda f: grads(over_rows(f)),
    "vmap of grad": lambda f: over_rows(grads(f)),
    "jit of vmap of grad": lambda f: jax.jit(over_rows(grads(f))),
    "checkpoint": lambda f: jax.jit(grads(jax.checkpoint(f))),
    "scan": lambda f: grads(scanned(f)),
    "value and vjp": lambda f: lambda *a: jax.vjp(lambda h, w: f(h, w, a[2]), *a[:2])[1](f(*a)),
    "batch of upstream gradients": lambda f: (
        lambda *a: jax.vmap(jax.vjp(lambda h, w: f(h, w, a[2]), *a[:2])[1])(jnp.stack([f(*a), 2 * f(*a)]))
    ),
}


@pytest.mark.parametrize("options", ({}, LATER), ids=("together", "later"))
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(transform, options):
    both(transform, **options)


def test_vmap_over_weights():
    """An ensemble of heads: each has its own weight."""
    hidden, _, targets = ARGUMENTS
    weights = jnp.stack([ARGUMENTS[1], -ARGUMENTS[1]])
    ours = jax.vmap(jax.grad(loss, 1), (None, 0, None))(hidden, weights, targets)
    expected = jax.vmap(jax.grad(plain, 1), (None, 0, None))(hidden, weights, targets)
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6)


def test_donated_buffers():
    def step(weight, hidden, targets):
        value, gradient = jax.value_and_grad(loss, 1)(hidden, weight, targets)
        return weight - gradient, value

    hidden, weight, targets = ARGUMENTS
    expected = step(weight, hidden, targets)
    got = jax.jit(step, donate_argnums=(0, 1))(weight + 0, hidden + 0, targets)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), got, expected)


@pytest.mark.parametrize("factor", (0.0, np.inf, np.nan))
def test_rows_without_a_target_have_no_gradient_whatever_the_upstream_gradient_is(factor):
    hidden, weight, targets = ARGUMENTS
    targets = targets.at[0].set(-100)
    gradient = jax.jit(jax.grad(lambda h: loss(h, weight, targets) * factor))(hidden)
    assert not np.any(gradient[0])
    assert np.isfinite(gradient[1]).all() == (factor == 0)


def test_threads_share_a_function():
    # Threads have default devices of their own.
    arguments = jax.device_put(ARGUMENTS, jax.devices("cpu")[0])
    run = jax.jit(jax.value_and_grad(functools.partial(loss, platform="cpu"), (0, 1)))
    first = run(*arguments)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: run(*arguments), range(32)):
            jax.tree.map(np.testing.assert_array_equal, got, first)


def test_more_plans_than_the_library_keeps():
    """It forgets the oldest ones and makes them again."""
    weight = ARGUMENTS[1]
    for n in range(1, 40):
        assert np.isfinite(loss(jnp.ones((n, 8)), weight, jnp.zeros(n, np.int32)))


def test_double_backward_is_refused():
    for options in ({}, LATER):
        inner = jax.grad(lambda w: loss(ARGUMENTS[0], w, ARGUMENTS[2], **options).sum())
        with pytest.raises(NotImplementedError, match="logitless.jax.linear_cross_entropy: double backward"):
            jax.grad(lambda w: inner(w).sum())(ARGUMENTS[1])
        with pytest.raises(NotImplementedError, match="logitless.jax.linear_cross_entropy: double backward"):
            jax.hessian(lambda w: loss(ARGUMENTS[0], w, ARGUMENTS[2], **options).sum())(ARGUMENTS[1])


def test_forward_mode_is_refused():
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda w: loss(ARGUMENTS[0], w, ARGUMENTS[2]), ARGUMENTS[1:2], ARGUMENTS[1:2])
