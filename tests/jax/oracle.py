"""The plain computation: linear_cross_entropy's formulas over whole logits, by JAX's own differentiation.

In float64 it is the reference. In the precision of the inputs it is the naive computation, whose error sets the
tolerance: twice that error plus the rounding of a float32 computation (``units``).
"""

import contextlib
import dataclasses
import math

import jax
import jax.numpy as jnp
import logitless.jax
import numpy as np

MATRICES = ("hidden", "weight", "bias")
DIFFERENTIABLE = ("loss", "nll", "lse", "entropy", "target_logit")
ALL_STATS = (*DIFFERENTIABLE[1:], "argmax", "correct_count", "valid_count", "mean_logit", "log_sum_sq_probs")
ALL_STATS += ("is_top1", "max_logit")
ONE_TARGET = ("correct_count", "is_top1")


@dataclasses.dataclass
class Problem:
    """Arguments of linear_cross_entropy as numpy arrays and numbers."""

    hidden: np.ndarray
    weight: np.ndarray
    targets: np.ndarray
    options: dict

    def matrices(self):
        given = {"hidden": self.hidden, "weight": self.weight, "bias": self.options.get("bias")}
        return {name: array for name, array in given.items() if array is not None}

    def others(self):
        return {name: value for name, value in self.options.items() if name != "bias"}


def make(shape, vocab, size, dtype="float32", bias=False, ignored=0.2, spread=1.0, seed=0, several=0, **options):
    """Makes random values; `spread` is the size of logits; `dtype` is that of all matrices, or of each by name."""
    rng = np.random.default_rng(seed)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,) * 3
    tokens = (*shape, several) if several else shape
    targets = rng.integers(0, vocab, tokens)
    targets[rng.random(tokens) < ignored] = options.get("ignore_index", -100)
    if several:
        options["target_weight"] = rng.random(tokens).astype(np.float32)
    if bias:
        options["bias"] = rng.standard_normal(vocab).astype(jnp.dtype(dtypes[2]))
    hidden = rng.standard_normal((*shape, size)).astype(jnp.dtype(dtypes[0]))
    weight = (rng.standard_normal((vocab, size)) * spread / size**0.5).astype(jnp.dtype(dtypes[1]))
    return Problem(hidden, weight, targets.astype(np.int32), options)


def shifted(targets, shift, ignore, axis):
    """Moves values of sequences along an axis, and fills up with `ignore`."""
    targets = np.moveaxis(np.asarray(targets), axis, -1) if targets.ndim else targets
    out = np.full_like(targets, ignore)
    if targets.ndim and shift < targets.shape[-1]:
        out[..., : targets.shape[-1] - shift] = targets[..., shift:]
    return np.moveaxis(out, -1, axis) if targets.ndim else out


def outputs(problem, matrices, dtype):
    """Returns outputs by name. Logits have `dtype`; later values have at least float32."""
    o, stats = problem.options, jnp.promote_types(dtype, jnp.float32)
    ignore, several = o.get("ignore_index", -100), "target_weight" in o
    y, weights = problem.targets, o.get("target_weight", np.ones(problem.targets.shape))
    if o.get("shift"):
        axis = -2 if several else -1
        y, weights = shifted(y, o["shift"], ignore, axis), shifted(weights, o["shift"], 0, axis)
    rows = problem.hidden.shape[:-1]
    y = y.reshape(-1, y.shape[-1]) if several else y.reshape(-1, 1)
    known = y != ignore
    valid, index = known.any(-1), np.where(known, y, 0)
    weights = np.where(known, np.asarray(weights).reshape(y.shape), 0.0).astype(stats)
    x, c = (matrices[name].astype(dtype) for name in ("hidden", "weight"))
    z = o.get("scale", 1.0) * (x.reshape(-1, x.shape[-1]) @ c.T)
    if "bias" in matrices:
        z = z + matrices["bias"].astype(dtype)
    z = o["softcap"] * jnp.tanh(z / o["softcap"]) if o.get("softcap") else z
    z = (z / np.asarray(o.get("temperature", 1.0)).reshape(-1, 1).astype(dtype)).astype(stats)
    w = np.asarray(o.get("class_weight", np.ones(c.shape[0]))).astype(stats)
    t = np.asarray(o.get("token_weight", np.ones(len(y)))).reshape(-1).astype(stats)
    lse = jax.nn.logsumexp(z, -1)
    p = jnp.exp(z - lse[:, None])
    target_logit = (weights * jnp.take_along_axis(z, index, 1)).sum(-1)
    nll = weights.sum(-1) * lse - target_logit
    smoothing, own = o.get("label_smoothing", 0.0), w[index[:, 0]] if not several else 1.0
    spread = (w * (lse[:, None] - z)).sum(-1) / z.shape[1]
    loss = t * ((1 - smoothing) * own * nll + smoothing * spread + o.get("z_loss", 0.0) * lse**2)
    by_row = {"loss": loss, "nll": nll, "lse": lse, "entropy": lse - (p * z).sum(-1), "target_logit": target_logit}
    by_row |= {"mean_logit": z.mean(-1), "log_sum_sq_probs": jnp.log((p * p).sum(-1)), "max_logit": z.max(-1)}
    by_row = {name: jnp.where(valid, value, 0.0) for name, value in by_row.items()}
    divisor = np.where(valid, t * own, 0.0).sum() if o.get("num_items") is None else o["num_items"]
    argmax = jnp.where(valid, z.argmax(-1), -1)
    top1 = argmax == y[:, 0]
    result = {name: value.reshape(rows) for name, value in by_row.items()}
    reduction = o.get("reduction", "mean")
    if reduction != "none":
        result["loss"] = by_row["loss"].sum() / (divisor if reduction == "mean" else 1)
    result |= {"argmax": argmax.reshape(rows), "is_top1": top1.reshape(rows), "valid_count": valid.sum()}
    result["correct_count"] = (top1 & valid).sum()
    # The tolerance needs these: sizes of logits, and the gradient that reaches a row's logits at most.
    reach = np.abs(t) * (np.abs(weights).sum(-1) * np.abs(own) + smoothing + 2 * o.get("z_loss", 0.0) * jnp.abs(lse))
    result["_"] = {"p": p, "valid": valid, "reach": reach, "divisor": divisor if reduction == "mean" else 1.0}
    result["_"] |= {"onehot": (weights[..., None] * (index[..., None] == np.arange(z.shape[1]))).sum(1), "w": w}
    result["_"]["size"] = jnp.abs(jnp.where(valid[:, None], z, 0)).max(initial=0.0)
    return result


def evaluate(problem, dtype, upstream):
    """Returns outputs, and gradients as "d_hidden" and others, for upstream gradients by name of output."""
    wide = jax.enable_x64(True) if jnp.dtype(dtype) == np.float64 else contextlib.nullcontext()
    with wide, jax.default_device(jax.devices("cpu")[0]):
        given = {name: jnp.asarray(array.astype(jnp.dtype(dtype))) for name, array in problem.matrices().items()}

        def total(matrices):
            out = outputs(problem, matrices, jnp.dtype(dtype))
            return sum((jnp.asarray(g).astype(out[n].dtype) * out[n]).sum() for n, g in upstream.items()), out

        gradients, out = jax.grad(total, has_aux=True)(given)
        return jax.tree.map(np.asarray, out | {f"d_{name}": value for name, value in gradients.items()})


def units(problem, truth, upstream, eps, kept):
    """Returns what rounding to float32 (or float64) may cost each output and gradient.

    A logit of size Z has an error of eps Z, and so has lse; exp makes it a relative error of the probabilities. A sum
    over V, N or D adds such errors, weighted by its other factor. A sum of n terms in one order also rounds n times,
    which adds up as a random walk: eps sqrt(n) / 2 of the terms. The naive sums are in blocks. Gradients are rounded
    once more. `kept`: half a unit in the last place of exp logits or dz that are kept, in 16 bits or float32.
    """
    info, o = truth["_"], problem.options
    size, rows = info["size"], info["valid"].shape
    spread = eps * (4 + size)
    by_row = np.zeros(rows)
    for name, g in upstream.items():
        factor = {"loss": info["reach"] / info["divisor"], "entropy": 1 + 2 * size}.get(name, 1.0)
        by_row = by_row + np.abs(g).reshape(-1) * factor if np.ndim(g) else by_row + abs(g) * factor
    logits = info["p"] + np.abs(info["onehot"]) + np.abs(info["w"]) / len(info["w"])
    by_row = by_row[:, None] * info["valid"][:, None] / np.asarray(o.get("temperature", 1.0), np.float64).reshape(-1, 1)
    terms = by_row * logits
    logits = by_row * (spread * logits + kept * (logits + 2 * info["p"]))
    hidden = np.abs(problem.hidden.astype(np.float64)).reshape(-1, problem.hidden.shape[-1])
    scale = abs(o.get("scale", 1.0))
    over_vocab, over_rows = (logits + eps * math.sqrt(n) / 2 * terms for n in reversed(logits.shape))
    sums = {"d_hidden": scale * over_vocab @ np.abs(problem.weight.astype(np.float64))}
    sums |= {"d_weight": scale * over_rows.T @ hidden, "d_bias": over_rows.sum(0)}
    result = {}
    for name, array in problem.matrices().items():
        value, last = np.abs(truth[f"d_{name}"]), jnp.finfo(array.dtype)
        result[f"d_{name}"] = sums[f"d_{name}"].reshape(value.shape) + float(last.eps) * value + float(last.tiny)
    weight = 1 + np.abs(info["onehot"]).sum(-1).reshape(problem.hidden.shape[:-1])
    for name in (*DIFFERENTIABLE, "mean_logit", "log_sum_sq_probs", "max_logit"):
        reach = weight if name != "loss" else info["reach"] / info["divisor"]
        reach = np.sum(reach) if np.ndim(truth[name]) == 0 else np.reshape(reach, truth[name].shape)
        result[name] = spread * (1 + size) * reach + eps * np.abs(truth[name])
    return result


def dtype_of(problem):
    return np.dtype(jnp.promote_types(problem.hidden.dtype, problem.weight.dtype))


def compare(problem, got, upstream):
    """Asserts outputs and gradients, by name, against the truth."""
    dtype = dtype_of(problem)
    truth, naive = evaluate(problem, "float64", upstream), evaluate(problem, dtype, upstream)
    eps = np.finfo(np.float64 if dtype == np.float64 else np.float32).eps
    kept = float(jnp.finfo(dtype).eps) / 2 if dtype != np.float64 else 0.0
    bounds = units(problem, truth, upstream, eps, kept)
    for name, value in got.items():
        value, right = np.asarray(value), truth[name]
        assert value.shape == right.shape, name
        if name in ("correct_count", "valid_count", "is_top1", "argmax"):
            check_class(name, value, truth, eps)
            continue
        error = np.abs(value.astype(np.float64) - right)
        naive_error = np.nan_to_num(np.abs(naive[name].astype(np.float64) - right))
        bound = 2 * naive_error.max(initial=0.0) + bounds[name]
        good = (error <= bound) | (np.isnan(value) & np.isnan(right))
        assert good.all(), (
            f"{name}: error {error[~good].max()}, bound {np.broadcast_to(bound, error.shape)[~good].min()}"
        )


def check_class(name, value, truth, eps):
    """Compares classes in rows whose two largest logits differ by more than rounding."""
    if name == "valid_count":
        assert value == truth[name]
        return
    ordered = np.sort(np.log(np.maximum(truth["_"]["p"], 1e-300)), -1)
    clear = ordered[:, -1] - ordered[:, -2] > 4 * eps * (4 + truth["_"]["size"]) if ordered.shape[1] > 1 else True
    clear = np.logical_and(clear, np.ones(len(ordered), bool))
    if name == "correct_count":
        assert not clear.all() or value == truth[name]
    else:
        assert (value == truth[name]).reshape(-1)[clear].all(), name


def solve(problem, upstream_of=("loss",), jit=True, place=lambda array: array, **more):
    """Returns logitless's outputs and gradients by name, and random upstream gradients of the named outputs."""
    several = "target_weight" in problem.options
    names = [name for name in ALL_STATS if not (several and name in ONE_TARGET)]
    rng = np.random.default_rng(1)
    reduced, rows = problem.options.get("reduction", "mean") != "none", problem.hidden.shape[:-1]
    upstream = {n: rng.standard_normal(() if n == "loss" and reduced else rows) for n in upstream_of}
    given = {name: place(jnp.asarray(array)) for name, array in problem.matrices().items()}
    targets = place(jnp.asarray(problem.targets))

    def total(matrices, targets):
        options = problem.others() | {"return_stats": names, "differentiable_stats": len(upstream) > 1} | more
        options |= {"bias": matrices["bias"]} if "bias" in matrices else {}
        out = logitless.jax.linear_cross_entropy(matrices["hidden"], matrices["weight"], targets, **options)
        out = {name: value for name, value in out._asdict().items() if value is not None}
        return sum((g.astype(out[n].dtype) * out[n]).sum() for n, g in upstream.items()), out

    run = jax.grad(total, has_aux=True)
    gradients, out = (jax.jit(run) if jit else run)(given, targets)
    return out | {f"d_{name}": value for name, value in gradients.items()}, upstream


def check(problem, upstream_of=("loss",), **more):
    got, upstream = solve(problem, upstream_of, **more)
    compare(problem, got, upstream)
    return got
