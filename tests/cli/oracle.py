"""The loss in float64 with all logits in memory, and what a computation in float32 may differ from it."""

import numpy as np


def forward(
    hidden,
    classifier,
    targets,
    *,
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
    """Everything the command reports, for flat targets that are already shifted, in `dtype`."""

    def as_dtype(x):
        return np.asarray(x, dtype)

    classifier = as_dtype(classifier)
    hidden = as_dtype(hidden).reshape(-1, classifier.shape[1])
    targets = np.asarray(targets, np.int64).reshape(-1)
    vocab = classifier.shape[0]
    z = dtype(scale) * (hidden @ classifier.T)
    if bias is not None:
        z = z + as_dtype(bias)
    if softcap:
        z = dtype(softcap) * np.tanh(z / dtype(softcap))
    temperature = as_dtype(temperature).reshape(-1, 1)
    z = z / temperature
    valid = targets != ignore_index
    safe = np.where(valid, targets, 0)
    w = np.ones(vocab, dtype) if class_weight is None else as_dtype(class_weight)
    t = np.ones(len(targets), dtype) if token_weight is None else as_dtype(token_weight).reshape(-1)
    top = z.max(axis=1)
    lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    p = np.exp(z - lse[:, None])
    nll = lse - z[np.arange(len(targets)), safe]
    entropy = lse - (p * z).sum(axis=1)
    smooth = dtype(label_smoothing / vocab)
    loss = (1 - dtype(label_smoothing)) * w[safe] * nll
    loss = loss + smooth * (w * (lse[:, None] - z)).sum(axis=1) + dtype(z_loss) * lse * lse
    loss = np.where(valid, t * loss, 0)
    divisor = (t * w[safe])[valid].sum()
    # Gradient of the mean.
    k = t / divisor
    a = k * ((1 - dtype(label_smoothing)) * w[safe] + smooth * w.sum() + 2 * dtype(z_loss) * lse)
    dz = p * a[:, None] - (k * smooth)[:, None] * w
    dz[np.arange(len(targets)), safe] -= k * (1 - dtype(label_smoothing)) * w[safe]
    if softcap:
        dz = dz * (1 - (z * temperature / dtype(softcap)) ** 2)
    dz = dz / temperature
    dz[~valid] = 0
    return {
        "loss": loss.sum() / divisor,
        "row_loss": loss,
        "divisor": divisor,
        "nll": np.where(valid, nll, 0),
        "lse": np.where(valid, lse, 0),
        "entropy": np.where(valid, entropy, 0),
        "target_logit": np.where(valid, z[np.arange(len(targets)), safe], 0),
        "mean_logit": np.where(valid, z.mean(axis=1), 0),
        "log_sum_sq_probs": np.where(valid, np.log((p * p).sum(axis=1)), 0),
        "max_logit": np.where(valid, top, 0),
        "is_top1": valid & (z.argmax(axis=1) == targets),
        "argmax": np.where(valid, z.argmax(axis=1), -1),
        "valid": int(valid.sum()),
        "correct": int((z.argmax(axis=1) == targets)[valid].sum()),
        "d_hidden": dtype(scale) * (dz @ classifier),
        "d_classifier": dtype(scale) * (dz.T @ hidden),
        "d_bias": dz.sum(axis=0),
    }


def both(*arguments, **keywords):
    """float64, and the same computation in float32."""
    return forward(*arguments, **keywords), forward(*arguments, **keywords, dtype=np.float32)


def assert_close(got, exact, naive, scale=None, unit=2.0**-24):
    """2-norm error at most twice that of the naive computation plus a rounding unit of numbers like `scale`."""
    got, exact, naive = (np.asarray(x, np.float64) for x in (got, exact, naive))
    size = np.linalg.norm(exact if scale is None else scale)
    error = np.linalg.norm((got - exact).ravel())
    bound = 2 * np.linalg.norm((naive - exact).ravel()) + unit * size
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}"


def forward_several(
    hidden,
    classifier,
    targets,
    target_weight=None,
    *,
    softcap=0.0,
    label_smoothing=0.0,
    z_loss=0.0,
    token_weight=None,
    ignore_index=-100,
    dtype=np.float64,
):
    """The same of targets [N, K], each with a weight, which are columns of a sparse matrix q."""
    classifier, hidden = np.asarray(classifier, dtype), np.asarray(hidden, dtype)
    (rows, count), vocab = targets.shape, classifier.shape[0]
    there = targets != ignore_index
    safe = np.where(there, targets, 0)
    weight = np.ones((rows, count), dtype) if target_weight is None else np.asarray(target_weight, dtype)
    q = np.zeros((rows, vocab), dtype)
    for k in range(count):
        q[np.arange(rows), safe[:, k]] += np.where(there[:, k], weight[:, k], 0)
    z = hidden @ classifier.T
    if softcap:
        z = dtype(softcap) * np.tanh(z / dtype(softcap))
    top = z.max(axis=1)
    lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    log_p = z - lse[:, None]
    p, valid = np.exp(log_p), there.any(axis=1)
    nll = -(q * log_p).sum(axis=1)
    t = np.ones(rows, dtype) if token_weight is None else np.asarray(token_weight, dtype)
    sure, smooth = 1 - dtype(label_smoothing), dtype(label_smoothing / vocab)
    loss = sure * nll - smooth * log_p.sum(axis=1) + dtype(z_loss) * lse * lse
    loss = np.where(valid, t * loss, 0)
    divisor = t[valid].sum()
    of_p = sure * q.sum(axis=1) + smooth * vocab + 2 * dtype(z_loss) * lse
    dz = (t / divisor)[:, None] * (p * of_p[:, None] - sure * q - smooth)
    if softcap:
        dz = dz * (1 - (z / dtype(softcap)) ** 2)
    dz[~valid] = 0
    return {
        "loss": loss.sum() / divisor,
        "row_loss": loss,
        "divisor": divisor,
        "nll": np.where(valid, nll, 0),
        "lse": np.where(valid, lse, 0),
        "target_logit": np.where(valid, (q * z).sum(axis=1), 0),
        "target_log_probs": np.where(there, np.take_along_axis(log_p, safe, 1), 0),
        "argmax": np.where(valid, z.argmax(axis=1), -1),
        "valid": int(valid.sum()),
        "d_hidden": dz @ classifier,
        "d_classifier": dz.T @ hidden,
    }
