"""The plain computation of candidate sets over whole logits, by autograd in any dtype, and its tolerances.

In float64 it is the reference. In the precision of the inputs it is the naive computation, whose error sets the
tolerance: twice that error plus rounding units.
"""

import dataclasses
import math

import logitless
import torch

LEAVES = ("hidden", "weight", "bias", "log_weights")


@dataclasses.dataclass
class Case:
    """Tensors and options of logitless.linear_candidates, with the lists of rows as Python lists."""

    tensors: dict
    lists: list
    options: dict = dataclasses.field(default_factory=dict)

    def leaves(self, device="cpu"):
        moved = {name: t.detach().to(device, copy=True) for name, t in self.tensors.items()}
        return {name: t.requires_grad_() if name in LEAVES else t for name, t in moved.items()}


def make(lists, vocab=30, width=12, dtype=torch.float32, rows=None, bias=True, offsets=False, seed=0, **options):
    """lists: ids of each row, or one list of ids for all of the given number of rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    shared = rows is not None
    rows = rows or len(lists)
    tensors = {"hidden": normal(rows, width), "weight": normal(vocab, width) * width**-0.5}
    if bias:
        tensors["bias"] = normal(vocab)
    if offsets:
        lengths = torch.tensor([len(ids) for ids in lists], dtype=torch.int64)
        tensors["offsets"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        tensors["ids"] = torch.tensor([j for ids in lists for j in ids], dtype=torch.int64)
    else:
        tensors["ids"] = torch.tensor(lists, dtype=torch.int64)
    return Case(tensors, [list(lists)] * rows if shared else lists, options)


def random_lists(rows, most, vocab, seed=0, least=0):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(least, most + 1, (rows,), generator=generator).tolist()
    return [torch.randint(0, vocab, (count,), generator=generator).tolist() for count in counts]


def all_logits(case, leaves, dtype):
    o = case.options
    z = o.get("scale", 1.0) * (leaves["hidden"].to(dtype) @ leaves["weight"].to(dtype).T)
    if "bias" in leaves:
        z = z + leaves["bias"].to(dtype)
    if o.get("softcap"):
        z = o["softcap"] * torch.tanh(z / o["softcap"])
    temperature = o.get("temperature", 1.0)
    return z / (temperature.to(dtype)[:, None] if isinstance(temperature, torch.Tensor) else temperature)


def evaluate(case, dtype, upstream):
    """Returns results by name. upstream: for each output's name a function of it, whose sum is differentiated."""
    leaves, o = case.leaves(), case.options
    z, none = all_logits(case, leaves, dtype), o.get("ignore_id", -1)
    whole = torch.logsumexp(z, -1)
    rows, place = [], 0
    for i, ids in enumerate(case.lists):
        kept = torch.tensor([k for k, j in enumerate(ids) if j != none], dtype=torch.int64)
        own = z[i][torch.tensor(ids, dtype=torch.int64)[kept]]
        if "log_weights" in leaves:
            given = leaves["log_weights"].to(dtype)
            own = own + (given[place + kept] if "offsets" in leaves else given[i][kept])
        place += len(ids)
        lse = torch.logsumexp(own, -1) if len(kept) else own.sum() - math.inf
        lse = whole[i] if o.get("normalize") == "vocabulary" else lse
        logits = torch.full((len(ids),), -math.inf, dtype=dtype).index_put((kept,), own)
        log_probs = torch.full((len(ids),), -math.inf, dtype=dtype).index_put((kept,), own - lse)
        rows.append((logits, log_probs, lse))
    ids, outputs = case.tensors["ids"], {}
    shape = ids.shape if "offsets" in leaves else (len(case.lists), ids.shape[-1])
    for at, name in enumerate(("logits", "log_probs", "lse")):
        values = torch.cat([row[at].reshape(-1) for row in rows]) if rows else z.sum(-1)
        outputs[name] = values if name == "lse" else values.reshape(shape)
    total = sum(upstream[name](outputs[name]) for name in upstream)
    total.backward()
    return gradients(outputs, leaves)


def gradients(outputs, leaves):
    results = {name: value.detach().cpu() for name, value in outputs.items()}
    return results | {f"d_{name}": leaves[name].grad.cpu() for name in LEAVES if name in leaves}


def run(case, upstream, device="cpu", **more):
    leaves = case.leaves(device)
    options = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in case.options.items()}
    got = logitless.linear_candidates(**leaves, **options, **more)
    outputs = {name: getattr(got, name) for name in ("logits", "log_probs", "lse")}
    sum(upstream[name](outputs[name]) for name in upstream).backward()
    return gradients(outputs, leaves)


def weighted(*names, seed=1):
    """Returns upstream functions: weighted sums of the finite numbers of these outputs."""

    def function(values):
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(values.shape, generator=generator, dtype=torch.float64).to(values)
        finite = values.isfinite()
        return (torch.where(finite, values, 0) * torch.where(finite, weights, 0)).sum()

    return dict.fromkeys(names, function)


def compare(case, got, upstream):
    """Asserts errors from float64 of at most twice the naive computation's, plus rounding units.

    A logit of size Z has an error of a few units of Z, and a probability this relative error. A gradient's terms have
    it times their other factor. Their errors are independent, so a sum's is within four roots of their number.
    """
    is_wide = case.tensors["hidden"].dtype == torch.float64
    truth = evaluate(case, torch.float64, upstream)
    naive = evaluate(case, torch.float64 if is_wide else torch.float32, upstream)
    eps = torch.finfo(torch.float64 if is_wide else torch.float32).eps
    finite = truth["logits"][truth["logits"].isfinite()].abs()
    size = 4 + (finite.max().item() if finite.numel() else 0)
    for name, exact in truth.items():
        value, exact = got[name].double(), exact.double()
        assert value.shape == exact.shape, name
        if exact.numel() == 0:
            continue
        info = torch.finfo(got[name].dtype)
        naive_error = (naive[name].double() - exact).abs().nan_to_num().max()
        factors = 1.0
        if name.startswith("d_"):
            other = {"d_hidden": "weight", "d_weight": "hidden"}.get(name)
            terms = len(case.lists) + max((len(ids) for ids in case.lists), default=0)
            largest = max(case.tensors[other].double().abs().flatten().tolist(), default=0.0) if other else 1.0
            factors = 4 * terms**0.5 * largest
        bound = 2 * naive_error + eps * size * factors + info.eps * exact.abs()
        bad = ~(((value - exact).abs() <= bound) | (value == exact) | (value.isnan() & exact.isnan()))
        assert not bad.any(), f"{name}: got {value[bad][:3]}, expected {exact[bad][:3]}, bound {bound[bad].min():.3e}"


def compare_norms(case, got, upstream):
    """Compares gradients where a product rounds those of the logits to a 16-bit format, by their norms.

    The gradients that come through the candidates' logits and through lse are each rounded, and so is their sum.
    """
    truth = evaluate(case, torch.float64, upstream)
    of_logits = evaluate(case, torch.float64, {"logits": upstream["log_probs"]})
    torch.testing.assert_close(got["log_probs"].double(), truth["log_probs"], rtol=1e-5, atol=1e-5)
    for name in ("d_hidden", "d_weight", "d_bias"):
        if name in truth:
            parts = of_logits[name].double().norm() + 2 * (truth[name].double() - of_logits[name]).norm()
            error = (got[name].double() - truth[name].double()).norm()
            assert error <= torch.finfo(got[name].dtype).eps * parts, name


def check(case, *names, **more):
    upstream = weighted(*(names or ("log_probs",)))
    got = run(case, upstream, **more)
    compare(case, got, upstream)
    return got
