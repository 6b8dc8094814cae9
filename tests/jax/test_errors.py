"""Arguments that are refused, by name, for JAX."""

import jax
import jax.numpy as jnp
import logitless.jax
import numpy as np
import pytest

HIDDEN, WEIGHT, TARGETS = jnp.ones((4, 8)), jnp.ones((11, 8)), jnp.zeros(4, np.int32)
ERRORS = {
    "hidden: expected float32, bfloat16, float16 or float64, got int32": {"hidden": jnp.ones((4, 8), np.int32)},
    r"hidden: expected shape \[..., D\] with D = 8 of weight, got \[4, 7\]": {"hidden": jnp.ones((4, 7))},
    r"weight: expected shape \[V, D\], got \[8\]": {"weight": jnp.ones(8)},
    r"bias: expected shape \[11\] \(V\), got \[10\]": {"bias": jnp.ones(10)},
    "targets: expected int64 or int32 class indices, got uint8": {"targets": jnp.zeros(4, np.uint8)},
    "targets: expected class indices, int64 or int32, got float32; prob": {"targets": jnp.ones((4, 11))},
    r"targets: expected shape \[4\]": {"targets": jnp.zeros(5, np.int32)},
    "targets: expected at most 64 targets": {
        "targets": jnp.zeros((4, 65), np.int32),
        "target_weight": jnp.ones((4, 65)),
    },
    r"target_weight: expected shape \[4, 2\]": {
        "targets": jnp.zeros((4, 2), np.int32),
        "target_weight": jnp.ones((4, 1)),
    },
    "target_weight: expected None with one target a row": {"target_weight": jnp.ones(4)},
    r"token_weight: expected shape \[4\]": {"token_weight": jnp.ones(3)},
    "token_weight: expected real numbers, got complex64": {"token_weight": jnp.ones(4, np.complex64)},
    r"class_weight: expected shape \[11\]": {"class_weight": jnp.ones(3)},
    r"temperature: expected shape \[4\]": {"temperature": jnp.ones(3)},
    "temperature: expected a finite number > 0, got 0": {"temperature": 0.0},
    "scale: expected a finite number, got inf": {"scale": np.inf},
    "softcap: expected a number, got str": {"softcap": "3"},
    "label_smoothing: expected a number in": {"label_smoothing": 1.5},
    "z_loss: expected a finite number >= 0": {"z_loss": -1.0},
    "reduction: expected one of": {"reduction": "max"},
    'num_items: expected None unless reduction is "mean"': {"num_items": 3, "reduction": "sum"},
    r"num_items: expected shape \[\]": {"num_items": jnp.ones(2)},
    "shift: expected an integer": {"shift": 0.5},
    "ignore_index: expected an integer of int32, the dtype of targets, got -1099511627776": {
        "targets": np.full(4, -(2**40)),
        "ignore_index": -(2**40),
    },
    "max_workspace_bytes: expected a positive number": {"max_workspace_bytes": "much"},
    "gradient: expected one of": {"gradient": "random"},
    "seed: expected a key of jax.random or an integer with sparsified": {"gradient": "sparsified"},
    "seed: expected a key of jax.random or an integer, got float32": {"gradient": "sparsified", "seed": jnp.ones(())},
    'seed: expected None unless gradient is "sparsified"': {"seed": 3},
    "batch_invariant: expected False unless": {"batch_invariant": True, "gradient": "sparsified", "seed": 1},
    "differentiable_stats: expected a bool": {"differentiable_stats": 1},
    "recompute_logits: expected a bool": {"recompute_logits": None},
    "return_stats: expected names out of": {"return_stats": ("logits",)},
    'return_stats: expected kept_count only with gradient "sparsified"': {"return_stats": ("kept_count",)},
    "compute_dtype: expected float32, bfloat16": {"compute_dtype": "int8"},
    'platform: expected "cpu" or "cuda", got \'tpu\'': {"platform": "tpu"},
    r"unexpected keyword argument 'main_grad'": {"main_grad": WEIGHT},
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    given = {"hidden": HIDDEN, "weight": WEIGHT, "targets": TARGETS} | ERRORS[message]
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        logitless.jax.linear_cross_entropy(**given)


@pytest.mark.parametrize("name", ("scale", "softcap", "temperature", "label_smoothing", "z_loss", "threshold"))
def test_numbers_are_constants(name):
    with pytest.raises(TypeError, match=f"{name}: expected a number, got"):
        jax.jit(lambda x: logitless.jax.linear_cross_entropy(HIDDEN, WEIGHT, TARGETS, **{name: x}))(1.0)


@pytest.mark.parametrize("name", ("token_weight", "class_weight", "temperature", "target_weight", "num_items"))
@pytest.mark.parametrize("wrap", (lambda f: f, jax.jit), ids=("eager", "jit"))
def test_arrays_without_a_gradient_refuse_one(name, wrap):
    shape = {"class_weight": (11,), "target_weight": (4, 2), "num_items": ()}.get(name, (4,))
    targets = jnp.zeros((4, 2), np.int32) if name == "target_weight" else TARGETS

    def loss(x):
        return logitless.jax.linear_cross_entropy(HIDDEN, WEIGHT, targets, **{name: x})

    with pytest.raises(ValueError, match=f"{name}: expected an array without a gradient"):
        jax.grad(wrap(loss))(jnp.ones(shape))
    assert not np.any(jax.grad(wrap(lambda x: loss(jax.lax.stop_gradient(x))))(jnp.ones(shape)))


def test_a_platform_without_devices():
    if jax.default_backend() != "cpu":
        pytest.skip("jax sees a CUDA device")
    with pytest.raises(logitless.UnsupportedError, match="platform: expected one whose devices JAX sees, got 'cuda'"):
        logitless.jax.linear_cross_entropy(HIDDEN, WEIGHT, TARGETS, platform="cuda")


def test_a_target_out_of_range():
    for target in (11, -1):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"targets: expected 0 <= target < 11 .* at targets\[2\]"):
            jax.block_until_ready(logitless.jax.linear_cross_entropy(HIDDEN, WEIGHT, TARGETS.at[2].set(target)))


@pytest.mark.parametrize("options", ({}, {"reduction": "none"}), ids=("together", "later"))
def test_a_budget_that_is_too_small(options):
    def run(budget):
        def loss(weight):
            return logitless.jax.linear_cross_entropy(
                HIDDEN, weight, TARGETS, max_workspace_bytes=budget, **options
            ).sum()

        return jax.grad(loss)(WEIGHT)

    with pytest.raises(logitless.BudgetTooSmallError, match="max_workspace_bytes: expected at least") as caught:
        run(1)
    run(caught.value.required_bytes)
    with pytest.raises(logitless.BudgetTooSmallError):
        run(caught.value.required_bytes - 1)


def test_a_call_that_was_traced_for_another_platform():
    """The library compares, as its plan would be for other kernels and sizes."""
    call = logitless.jax._Call((("tokens", 4),), (), True, False, 0, 1)
    problem = call._problem(logitless.native.Spec((), ()))
    with pytest.raises(jax.errors.JaxRuntimeError, match="platform: expected cuda, which the call was traced for"):
        jax.block_until_ready(logitless.jax._foreign(problem, (), (("workspace", ((64,), "uint8")),)))
