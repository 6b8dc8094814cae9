"""The loss in float64 with all logits in memory, and the allowed error of a float32 computation."""

import numpy as np
import pytest

N, V, D, K = 60, 300, 24, 5


def random_head(random):
    return {
        "hidden": random.standard_normal((N, D), np.float32),
        "weight": (random.standard_normal((V, D)) / 3).astype(np.float32),
    }


def several_targets(random, weighted):
    """Makes K targets per token: some repeat, some are ignored, and one token has none."""
    targets = random.integers(0, V, (N, K))
    targets[:, 1] = np.where(random.random(N) < 0.3, targets[:, 0], targets[:, 1])
    targets = np.where(random.random((N, K)) < 0.2, -100, targets)
    targets[7] = -100
    weight = {"target_weight": random.normal(0.2, 0.5, (N, K)).astype(np.float32)}
    return {"targets": targets} | (weight if weighted else {})


def write_npy(folder, arrays):
    """Writes a file for each array, and returns the arguments of `loss` that name them."""
    arguments = []
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
        arguments += ["--" + name.replace("_", "-"), f"{name}.npy"]
    return arguments


def forward(
    hidden,
    weight,
    targets,
    target_weight=None,
    *,
    several=False,
    bias=None,
    scale=1.0,
    softcap=0.0,
    temperature=1.0,
    label_smoothing=0.0,
    z_loss=0.0,
    class_weight=None,
    token_weight=None,
    ignore_index=-100,
    dtype=np.float64,
):
    """Computes everything that the command reports, in `dtype`, for targets that are already shifted.

    Targets are flat, or `several`: [N, K], each with a weight. Such weights are columns of a sparse matrix q.
    """

    def as_dtype(x):
        return np.asarray(x, dtype)

    weight = as_dtype(weight)
    hidden = as_dtype(hidden).reshape(-1, weight.shape[1])
    rows, vocab = len(hidden), len(weight)
    targets = np.asarray(targets, np.int64).reshape(rows, -1 if several else 1)
    there = targets != ignore_index
    safe, valid = np.where(there, targets, 0), there.any(axis=1)
    share = there if target_weight is None else np.where(there, target_weight, 0)
    q = np.zeros((rows, vocab), dtype)
    np.add.at(q, (np.arange(rows)[:, None], safe), as_dtype(share))
    z = dtype(scale) * (hidden @ weight.T)
    if bias is not None:
        z = z + as_dtype(bias)
    if softcap:
        z = dtype(softcap) * np.tanh(z / dtype(softcap))
    temperature = as_dtype(temperature).reshape(-1, 1)
    z = z / temperature
    w = np.ones(vocab, dtype) if class_weight is None else as_dtype(class_weight)
    t = np.ones(rows, dtype) if token_weight is None else as_dtype(token_weight).reshape(-1)
    top = z.max(axis=1)
    lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    log_p = z - lse[:, None]
    p = np.exp(log_p)
    nll = -(q * log_p).sum(axis=1)
    sure, smooth = (1 - dtype(label_smoothing)) * w[safe[:, 0]], dtype(label_smoothing / vocab)
    loss = sure * nll - smooth * (w * log_p).sum(axis=1) + dtype(z_loss) * lse * lse
    loss = np.where(valid, t * loss, 0)
    divisor = (t * w[safe[:, 0]])[valid].sum()
    # The gradient of the mean.
    of_p = sure * q.sum(axis=1) + smooth * w.sum() + 2 * dtype(z_loss) * lse
    dz = (t / divisor)[:, None] * (p * of_p[:, None] - smooth * w - sure[:, None] * q)
    if softcap:
        dz = dz * (1 - (z * temperature / dtype(softcap)) ** 2)
    dz = dz / temperature
    dz[~valid] = 0
    best = z.argmax(axis=1)
    is_top1 = valid & (best == targets[:, 0])
    return {
        "loss": loss.sum() / divisor,
        "row_loss": loss,
        "divisor": divisor,
        "nll": np.where(valid, nll, 0),
        "lse": np.where(valid, lse, 0),
        "entropy": np.where(valid, lse - (p * z).sum(axis=1), 0),
        "target_logit": np.where(valid, (q * z).sum(axis=1), 0),
        "target_log_probs": np.where(there, np.take_along_axis(log_p, safe, 1), 0),
        "mean_logit": np.where(valid, z.mean(axis=1), 0),
        "log_sum_sq_probs": np.where(valid, np.log((p * p).sum(axis=1)), 0),
        "max_logit": np.where(valid, top, 0),
        "is_top1": is_top1,
        "argmax": np.where(valid, best, -1),
        "valid": int(valid.sum()),
        "correct": int(is_top1.sum()),
        "d_hidden": dtype(scale) * (dz @ weight),
        "d_weight": dtype(scale) * (dz.T @ hidden),
        "d_bias": dz.sum(axis=0),
    }


def both(*arguments, **keywords):
    """Computes in float64 and in float32."""
    return forward(*arguments, **keywords), forward(*arguments, **keywords, dtype=np.float32)


def assert_close(got, exact, naive, scale=None, unit=2.0**-24):
    """Asserts a 2-norm error of at most twice the naive computation's plus a rounding unit of numbers like `scale`."""
    got, exact, naive = (np.asarray(x, np.float64) for x in (got, exact, naive))
    size = np.linalg.norm(exact if scale is None else scale)
    error = np.linalg.norm((got - exact).ravel())
    bound = 2 * np.linalg.norm((naive - exact).ravel()) + unit * size
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}"


def check_report(report, exact, naive):
    """Asserts a loss error of at most twice the naive one plus the roundings of each row's loss and lse."""
    rows = np.abs(exact["lse"]) + np.abs(exact["nll"])
    row_error = np.abs(naive["row_loss"] - exact["row_loss"]).sum() / exact["divisor"]
    bound = 2 * row_error + 2.0**-24 * (np.abs(exact["row_loss"]).sum() / exact["divisor"] + rows.max())
    assert abs(report["loss"] - exact["loss"]) <= bound
    mean_nll = exact["nll"].sum() / exact["valid"]
    assert report["nll"] == pytest.approx(mean_nll, abs=2.0**-23 * rows.max() * 4)
    assert report["valid_tokens"] == exact["valid"]
    if "targets_per_token" in report:
        assert not {"perplexity", "token_accuracy", "correct_tokens", "top_k_accuracy"} & set(report)
        return
    assert report["perplexity"] == pytest.approx(np.exp(report["nll"]), rel=1e-12)
    assert report["correct_tokens"] == exact["correct"]
    assert report["token_accuracy"] == pytest.approx(exact["correct"] / exact["valid"])
