"""Tokens or the vocabulary cut over the devices of a mesh, against the same problem on one device in float64."""

import jax
import jax.numpy as jnp
import logitless.jax
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

RNG = np.random.default_rng(3)
VOCAB = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "all": {
        "bias": True,
        "softcap": 4.0,
        "scale": 1.5,
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "class_weight": RNG.uniform(0.1, 2, 44),
        "token_weight": RNG.uniform(0.1, 2, (4, 6)),
        "temperature": RNG.uniform(0.5, 2, (4, 6)),
        "shift": 1,
        "ignore_index": 13,
    },
    "several": {"several": 3, "shift": 1, "label_smoothing": 0.2},
    "num_items": {"num_items": 7.0},
}


def on_mesh(mesh, problem, specs, upstream_of=("loss",), **axes):
    """Returns outputs and gradients, with gradients taken outside the map."""
    several = "target_weight" in problem.options
    names = [name for name in oracle.ALL_STATS if not (several and name in oracle.ONE_TARGET)]
    rng = np.random.default_rng(1)
    rows = problem.hidden.shape[:-1]
    reduced = problem.options.get("reduction", "mean") != "none"
    upstream = {n: rng.standard_normal(() if n == "loss" and reduced else rows) for n in upstream_of}
    of_rows = P(*specs["hidden"][:1])
    out_specs = {name: P() if name in ("correct_count", "valid_count") else of_rows for name in names}
    out_specs["loss"] = P() if reduced else of_rows
    arrays = {name: value for name, value in problem.options.items() if name in specs}
    others = {name: value for name, value in problem.others().items() if name not in specs}

    def local(matrices, arrays, targets):
        options = others | arrays | axes | {"return_stats": names, "bias": matrices.get("bias")}
        out = logitless.jax.linear_cross_entropy(matrices["hidden"], matrices["weight"], targets, **options)
        out = {name: getattr(out, name) for name in out_specs}
        if "token_axis" in axes:  # statistics are those of the device's own tokens
            counts = [name for name in ("correct_count", "valid_count") if name in out]
            out |= {name: jax.lax.psum(out[name], axes["token_axis"]) for name in counts}
        return out

    of_matrices = {name: specs[name] for name in problem.matrices()}
    of_arrays = {name: specs[name] for name in arrays}
    run = jax.shard_map(local, mesh=mesh, in_specs=(of_matrices, of_arrays, of_rows), out_specs=out_specs)

    def total(matrices):
        out = run(matrices, arrays, problem.targets)
        return sum((g.astype(out[n].dtype) * out[n]).sum() for n, g in upstream.items()), out

    gradients, out = jax.jit(jax.grad(total, has_aux=True))(problem.matrices())
    return out | {f"d_{name}": value for name, value in gradients.items()}, upstream


@pytest.mark.parametrize("upstream", (("loss",), oracle.DIFFERENTIABLE), ids=("loss", "stats"))
@pytest.mark.parametrize("options", VOCAB.values(), ids=VOCAB)
def test_vocabulary(mesh, options, upstream):
    problem = oracle.make((4, 6), 44, 16, **options)
    specs = {"hidden": P(), "weight": P("x"), "bias": P("x")}
    oracle.compare(problem, *on_mesh(mesh, problem, specs, upstream, vocab_axis="x"))


def test_the_largest_of_not_finite_logits(mesh):
    """It is the first NaN, else the first +inf."""
    problem = oracle.make((3, 2), 12, 4, ignored=0.0, bias=True)
    problem.hidden[0, 0] = np.nan
    stats = ("argmax", "max_logit", "is_top1", "correct_count")
    for values in ({}, {10: np.inf, 5: np.inf}, {10: np.nan, 4: np.nan, 2: np.inf}):
        problem.options["bias"][list(values)] = list(values.values())

        def run(hidden, weight, bias, **axis):
            return logitless.jax.linear_cross_entropy(
                hidden, weight, problem.targets, bias=bias, return_stats=stats, **axis
            )[1:]

        cut = jax.shard_map(
            lambda *a: run(*a, vocab_axis="x"), mesh=mesh, in_specs=(P(), P("x"), P("x")), out_specs=P()
        )
        given = [jnp.asarray(array) for array in problem.matrices().values()]
        jax.tree.map(np.testing.assert_array_equal, cut(*given), run(*given))


@pytest.mark.parametrize("upstream", (("loss",), oracle.DIFFERENTIABLE), ids=("loss", "stats"))
def test_a_shard_without_probabilities(mesh, upstream):
    """A mask may exclude all classes of a shard. The others' gradients are those of a head without these classes."""
    problem = oracle.make((4, 6), 44, 16, bias=True)
    problem.targets %= 33
    less = {"hidden": problem.hidden, "weight": problem.weight[:33], "targets": problem.targets}
    less = oracle.Problem(**less, options={"bias": problem.options["bias"][:33].copy()})
    problem.options["bias"][33:] = -np.inf
    got, upstream = on_mesh(mesh, problem, {"hidden": P(), "weight": P("x"), "bias": P("x")}, upstream, vocab_axis="x")
    assert not np.any(got["d_weight"][33:]) and not np.any(got["d_bias"][33:])
    got |= {name: got[name][:33] for name in ("d_weight", "d_bias")}
    oracle.compare(less, {name: value for name, value in got.items() if name != "mean_logit"}, upstream)


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_tokens(mesh, reduction):
    options = {"token_weight": RNG.uniform(0.1, 2, (4, 6)), "class_weight": RNG.uniform(0.1, 2, 33), "shift": 1}
    problem = oracle.make((4, 6), 33, 16, reduction=reduction, bias=True, **options)
    specs = {"hidden": P("x"), "token_weight": P("x"), "weight": P(), "bias": P(), "class_weight": P()}
    oracle.compare(problem, *on_mesh(mesh, problem, specs, token_axis="x"))


def test_a_device_without_targets(mesh):
    problem = oracle.make((4, 6), 33, 16, ignored=0.0)
    problem.targets[2] = -100
    specs = {"hidden": P("x"), "weight": P()}
    oracle.compare(problem, *on_mesh(mesh, problem, specs, token_axis="x"))


def test_both_cut():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices("cpu"))
    problem = oracle.make((4, 6), 44, 16, bias=True, label_smoothing=0.1)
    specs = {"hidden": P("a"), "weight": P("b"), "bias": P("b")}
    oracle.compare(problem, *on_mesh(mesh, problem, specs, ("loss",), token_axis="a", vocab_axis="b"))


def test_gradients_inside_the_map(mesh):
    problem = oracle.make((4, 6), 44, 16)
    loss = logitless.jax.linear_cross_entropy
    truth = oracle.evaluate(problem, "float64", {"loss": np.ones(())})
    for axis, specs in (("vocab_axis", (P(), P("x"), P())), ("token_axis", (P("x"), P(), P("x")))):
        gradients = jax.shard_map(
            lambda h, w, y: jax.grad(loss, (0, 1))(h, w, y, **{axis: "x"}),
            mesh=mesh,
            in_specs=specs,
            out_specs=specs[:2],
        )(problem.hidden, problem.weight, problem.targets)
        got = dict(zip(("d_hidden", "d_weight"), gradients))
        oracle.compare(problem, got, {"loss": np.ones(())})
        assert truth["d_weight"].shape == got["d_weight"].shape


@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_gathered_arrays_do_not_multiply_gradients_inside_the_map(mesh, reduction):
    """Tokens are cut over the axis of the vocabulary, and gathered in front of the head."""
    weights = {"token_weight": RNG.uniform(0.1, 2, (4, 6)), "class_weight": RNG.uniform(0.1, 2, 44)}
    problem = oracle.make((4, 6), 44, 16, reduction=reduction, **weights)

    def local(hidden, weight, targets, weights):
        targets, options = jax.tree.map(lambda array: jax.lax.all_gather(array, "x", tiled=True), (targets, weights))

        def loss(hidden, weight):
            hidden = jax.lax.all_gather(hidden, "x", tiled=True)
            return logitless.jax.linear_cross_entropy(
                hidden, weight, targets, vocab_axis="x", reduction=reduction, **options
            )

        return jax.value_and_grad(loss, (0, 1))(hidden, weight)

    run = jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=(P(), P("x")))
    loss, gradients = run(problem.hidden, problem.weight, problem.targets, weights)
    got = {"loss": loss} | dict(zip(("d_hidden", "d_weight"), gradients))
    oracle.compare(problem, got, {"loss": np.ones(())})


def test_arrays_that_jit_partitions_itself(mesh):
    """XLA gathers them first, as it does for every foreign function."""
    problem = oracle.make((4, 6), 44, 16)
    got, upstream = oracle.solve(problem, place=lambda array: jax.device_put(array, NamedSharding(mesh, P("x"))))
    oracle.compare(problem, got, upstream)


@pytest.mark.parametrize("of_hidden", (P("x"), P(None, None, "x")), ids=("rows", "columns"))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_arrays_whose_types_say_how_they_are_cut(reduction, of_hidden):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices("cpu"))
    options = {"token_weight": RNG.uniform(0.1, 2, (4, 6)), "temperature": RNG.uniform(0.5, 2, (4, 6))}
    problem = oracle.make((4, 6), 44, 16, bias=True, reduction=reduction, **options)
    with jax.set_mesh(mesh):
        for name in options:
            problem.options[name] = jax.device_put(problem.options[name], P("x"))
        places = {(4, 6, 16): of_hidden}  # all other arrays have their first dimension cut
        got, upstream = oracle.solve(problem, place=lambda x: jax.device_put(x, places.get(x.shape, P("x"))))
        assert jax.typeof(got["d_hidden"]).sharding.spec == P(*of_hidden, *[None] * (3 - len(of_hidden)))
    problem.options |= options
    oracle.compare(problem, jax.tree.map(np.asarray, got), upstream)


def test_a_bad_target_is_nan_or_an_error(mesh):
    problem = oracle.make((4, 6), 44, 16)
    problem.targets[0, 0] = 44
    run = jax.shard_map(
        lambda h, w, y: logitless.jax.linear_cross_entropy(h, w, y, vocab_axis="x"),
        mesh=mesh,
        in_specs=(P(), P("x"), P()),
        out_specs=P(),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="targets: expected 0 <= target"):
        jax.block_until_ready(run(problem.hidden, problem.weight, problem.targets))


def test_refusals(mesh):
    problem = oracle.make((4, 6), 44, 16)
    arguments = tuple(map(jnp.asarray, (problem.hidden, problem.weight, problem.targets)))

    def run(check_vma=True, of_weight=P("x"), **options):
        return jax.shard_map(
            lambda *a: logitless.jax.linear_cross_entropy(*a, **options),
            mesh=mesh,
            in_specs=(P(), of_weight, P()),
            out_specs=P(),
            check_vma=check_vma,
        )(*arguments)

    with pytest.raises(logitless.UnsupportedError, match='gradient: expected "exact" with vocab_axis'):
        run(vocab_axis="x", gradient="sparsified", seed=1)
    with pytest.raises(logitless.UnsupportedError, match="vocab_axis: expected jax.shard_map with check_vma=True"):
        run(check_vma=False, vocab_axis="x")
    with pytest.raises(ValueError, match="vocab_axis: expected mesh axes of jax.shard_map"):
        logitless.jax.linear_cross_entropy(*arguments, vocab_axis="x")
    with pytest.raises(ValueError, match="token_axis: expected mesh axes of jax.shard_map"):
        run(token_axis="y")
    with pytest.raises(ValueError, match="vocab_axis: expected mesh axes other than those of token_axis, got .'x'."):
        run(vocab_axis="x", token_axis=("x",))
    with pytest.raises(ValueError, match="vocab_axis: expected mesh axes that cut weight, got .'x'."):
        run(of_weight=P(), vocab_axis="x")
    for name, value in (("label_smoothing", 1.5), ("z_loss", -1.0), ("shift", -1), ("reduction", "max")):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            run(vocab_axis="x", **{name: value})
    with pytest.raises(ValueError, match=r"class_weight: expected shape \[44\]"):
        run(vocab_axis="x", class_weight=jnp.ones(11))
