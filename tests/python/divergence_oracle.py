"""The plain computation of divergences over whole logits, by autograd in any dtype, and its tolerances.

In float64 it is the reference. In the precision of the inputs it is the naive computation, whose error sets the
tolerance: twice that error plus a rounding unit.
"""

import dataclasses
import math

import logitless
import torch

STUDENT = ("student_hidden", "student_weight", "student_bias")
NAMES = (*STUDENT, "teacher_hidden", "teacher_weight", "teacher_bias")


@dataclasses.dataclass
class Case:
    """Tensors by the names of logitless.linear_divergence, and its options."""

    tensors: dict
    options: dict = dataclasses.field(default_factory=dict)

    def leaves(self, dtype=None):
        return {
            name: None if t is None else t.detach().to(dtype or t.dtype).clone().requires_grad_(name in STUDENT)
            for name, t in self.tensors.items()
        }


def make(
    rows=(7,), vocab=50, student=12, teacher=20, dtype=torch.float32, bias=True, spread=1.0, seed=0, **options
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, factor=1.0):
        return (factor * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    tensors = {}
    for name, width in (("student", student), ("teacher", teacher)):
        tensors[f"{name}_hidden"] = normal(*rows, width)
        tensors[f"{name}_weight"] = normal(vocab, width, factor=spread * width**-0.5)
        tensors[f"{name}_bias"] = normal(vocab) if bias else None
    return Case(tensors, options)


def raw_logits(case, leaves, head, dtype):
    """Returns logits before softcap and temperature."""
    o = case.options
    input, weight, bias = (leaves[f"{head}_{part}"] for part in ("hidden", "weight", "bias"))
    x = o.get(f"{head}_scale", 1.0) * (input.to(dtype).reshape(-1, input.shape[-1]) @ weight.to(dtype).T)
    if bias is not None:
        x = x + bias.to(dtype)
    return x


def log_probs(case, leaves, head, dtype):
    o, x = case.options, raw_logits(case, leaves, head, dtype)
    cap = o.get(f"{head}_softcap")
    x = cap * torch.tanh(x / cap) if cap else x
    return (x / o.get("temperature", 1.0)).log_softmax(-1)


def divergences(case, leaves, dtype):
    """Returns divergences and entropies of rows."""
    log_p, log_q = (log_probs(case, leaves, head, dtype) for head in ("student", "teacher"))
    p, q, beta = log_p.exp(), log_q.exp(), case.options.get("beta", 0.5)
    if beta in (0, 1):
        rows = (q * (log_q - log_p) if beta == 0 else p * (log_p - log_q)).sum(-1)
    else:
        log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
        rows = (beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)).sum(-1)
    return rows, -(p * log_p).sum(-1).detach()


def row_weights(case, like):
    """Returns the rows' weights in the loss, 0 for rows that do not count, with the dtype of ``like``."""
    o, weight = case.options, torch.ones(like.shape[0], dtype=like.dtype)
    if o.get("token_weight") is not None:
        weight = weight * o["token_weight"].reshape(-1).to(like.dtype)
    if o.get("mask") is not None:
        weight = weight * (o["mask"].reshape(-1) != 0)
    return weight / o.get("num_items", weight.sum()) if o.get("reduction", "mean") == "mean" else weight


def evaluate(case, dtype, upstream=None):
    """Returns results by name; ``upstream`` has the rows' upstream gradients for reduction none."""
    leaves, o = case.leaves(), case.options
    rows, entropy = divergences(case, leaves, dtype)
    if o.get("mask") is not None:
        valid = o["mask"].reshape(-1) != 0
        rows, entropy = torch.where(valid, rows, 0), torch.where(valid, entropy, 0)
    loss = rows * row_weights(case, rows)
    loss = loss if o.get("reduction", "mean") == "none" else loss.sum()
    factor = torch.ones_like(loss) if upstream is None else upstream.reshape(-1).to(loss.dtype)
    (loss * factor).sum().backward()
    outputs = {"loss": loss, "divergence": rows, "entropy": entropy}
    return {n: v.detach() for n, v in outputs.items()} | {f"d_{n}": gradient_of(leaves[n]) for n in STUDENT}


def gradient_of(leaf):
    return None if leaf is None else leaf.grad


def units(case, upstream, eps):
    """Returns the possible cost of rounding in a precision, for each result by name.

    A logit of size Z has an error of eps Z, and so has lse, which all columns share. A probability then has a relative
    error, and the log of a ratio an absolute one, of twice that for each of its two logits. So a logit's gradient g p
    (log(p / m) - KL) is off by g p (2 |log(p / m) - KL| + 8) of these units, and g (p - q) by g (p + q) 2. From an
    error of a logit to the divergence the bound is the same without g. Sums over columns, rows and widths add such
    errors, weighted by their other factor.
    """
    leaves, o = case.leaves(), case.options
    with torch.no_grad():
        log_p, log_q = (log_probs(case, leaves, head, torch.float64) for head in ("student", "teacher"))
    p, q, beta = log_p.exp(), log_q.exp(), o.get("beta", 0.5)
    log_m = ((1 - beta) * p + beta * q).log()
    ratios = [(a - log_m).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs() for a in (log_p, log_q)]
    size = 0.0
    for head in ("student", "teacher"):
        finite = raw_logits(case, leaves, head, torch.float64).detach()
        size = max(size, finite[finite.isfinite()].abs().max().item() if finite.isfinite().any() else 0.0)
    unit = eps * (4 + size / o.get("temperature", 1.0))
    rows = ((p + q) * (8 + 2 * ratios[0] + 2 * ratios[1])).sum(-1)
    weight = row_weights(case, p)
    grad = weight.abs() * (1 if upstream is None else upstream.double().abs().reshape(-1))
    logits = grad[:, None] * unit * (2 * (p + q) + p * (8 + 2 * ratios[0] + 2 * ratios[0].amax(-1, keepdim=True)))
    logits = logits / o.get("temperature", 1.0)
    products = abs(o.get("student_scale", 1.0)) * logits
    input, head_weight = (case.tensors[f"student_{part}"].double().abs().nan_to_num() for part in ("hidden", "weight"))
    value = unit * rows
    return {
        "divergence": value,
        "entropy": unit * (1 + size) * torch.ones_like(value),
        "loss": value * weight if o.get("reduction", "mean") == "none" else (value * weight).sum().reshape(1),
        "d_student_hidden": (products @ head_weight).reshape(-1),
        "d_student_weight": (products.T @ input.reshape(-1, input.shape[-1])).reshape(-1),
        "d_student_bias": logits.sum(0),
    }


def compare(case, got, upstream=None):
    """Asserts errors from float64 of at most twice the naive computation's plus a unit of rounding."""
    truth, wide = evaluate(case, torch.float64, upstream), case.tensors["student_hidden"].dtype == torch.float64
    naive = evaluate(case, torch.float64 if wide else torch.float32, upstream)
    unit = units(case, upstream, torch.finfo(torch.float64 if wide else torch.float32).eps)
    for name, exact in truth.items():
        if exact is None or exact.numel() == 0:
            assert (got[name] is None) == (exact is None)
            continue
        value, exact = got[name].double().reshape(-1), exact.double().reshape(-1)
        info = torch.finfo(got[name].dtype)  # results are rounded to it once
        error = (value - exact).abs()
        naive_error = (naive[name].double().reshape(-1) - exact).abs().nan_to_num().max()
        bound = 2 * naive_error + unit[name] + info.eps * exact.abs() + info.tiny * info.eps
        bad = ~((error <= bound) | (value == exact) | (value.isnan() & exact.isnan()))
        assert not bad.any(), f"{name}: error {error[bad].max():.3e}, bound {bound.expand_as(error)[bad].min():.3e}"


def check(case, upstream=None, **more):
    compare(case, run(case, upstream, **more), upstream)


def run(case, upstream=None, **more):
    """Returns logitless.linear_divergence's results by the same names."""
    leaves = case.leaves()
    result = logitless.linear_divergence(**leaves, **case.options, return_stats=True, **more)
    factor = torch.ones_like(result.loss) if upstream is None else upstream.to(result.loss.dtype)
    (result.loss * factor).sum().backward()
    values = {"loss": result.loss, "divergence": result.divergence, "entropy": result.entropy}
    return {n: v.detach() for n, v in values.items()} | {f"d_{n}": gradient_of(leaves[n]) for n in STUDENT}
