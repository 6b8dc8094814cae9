"""The plain computation: linear_cross_entropy's formulas over whole logits, by autograd in any dtype.

In float64 it is the reference. In the precision of the inputs it is the naive computation, whose error sets the
tolerance: twice that error plus the rounding of a float32 computation (`units`).
"""

import dataclasses

import logitless
import torch

DIFFERENTIABLE = ("loss", "nll", "lse", "entropy")
GRADIENTS = ("d_hidden", "d_weight", "d_bias")


@dataclasses.dataclass
class Problem:
    """Arguments of linear_cross_entropy, names of learned numbers, and upstream gradients by name of output."""

    input: torch.Tensor  # [..., D]
    weight: torch.Tensor  # [V, D]
    target: torch.Tensor  # [...]
    bias: torch.Tensor | None = None
    options: dict = dataclasses.field(default_factory=dict)
    learned: tuple = ()
    upstream: dict = dataclasses.field(default_factory=dict)

    @property
    def arguments(self):
        return self.input, self.weight, self.target

    def leaves(self):
        tensors = (self.input, self.weight, self.bias)
        return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]

    def numbers(self, dtype, device="cpu"):
        """Returns the learned numbers as leaves, by name."""
        return {n: torch.tensor(self.options[n], dtype=dtype, device=device, requires_grad=True) for n in self.learned}


def make(shape, vocab, hidden, dtype=torch.float32, bias=False, ignored=0.2, spread=1.0, seed=0, learned=(), **options):
    """Makes a problem with random values; `spread` is the size of logits; `dtype` is for all tensors, or for each by
    name."""
    g = torch.Generator().manual_seed(seed)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,) * 3

    def randn(*size):
        return torch.randn(*size, generator=g)

    tokens = torch.Size(shape).numel()
    target = torch.randint(0, vocab, (tokens,), generator=g)
    if tokens:
        target[torch.rand(tokens, generator=g) < ignored] = options.get("ignore_index", -100)
    return Problem(
        input=randn(*shape, hidden).to(dtypes[0]),
        weight=(randn(vocab, hidden) * spread / hidden**0.5).to(dtypes[1]),
        target=target.reshape(shape),
        bias=randn(vocab).to(dtypes[2]) if bias else None,
        options=options,
        learned=learned,
    )


def solve(problem, names=("loss",), device="cpu", numbers_on=None, layout=lambda t: t, **options):
    """Returns logitless's results by name on the CPU, and sets the upstream gradients of the named outputs."""
    leaves = [None if t is None else layout(t.detach().to(device)).requires_grad_() for t in problem.leaves()]
    numbers = problem.numbers(torch.promote_types(problem.input.dtype, torch.float32), numbers_on or device)
    given = {n: v.to(device) if torch.is_tensor(v) else v for n, v in problem.options.items()} | numbers | options
    target = problem.target.to(device)
    out = logitless.linear_cross_entropy(*leaves[:2], target, bias=leaves[2], return_stats=True, **given)
    g = torch.Generator().manual_seed(1)
    problem.upstream = {n: torch.randn(getattr(out, n).shape, generator=g).double() for n in names}
    outputs = [getattr(out, name) for name in names]
    torch.autograd.backward(outputs, [problem.upstream[n].to(t) for n, t in zip(names, outputs)])
    got = {name: value.detach().cpu() for name, value in out._asdict().items() if value is not None}
    got |= {n: None if leaf is None else leaf.grad.cpu() for n, leaf in zip(GRADIENTS, leaves)}
    assert all(number.grad.device == number.device for number in numbers.values())
    return got | {f"d_{name}": number.grad.cpu() for name, number in numbers.items()}


def shifted(target, shift, ignore_index):
    """Returns target[..., s + shift] at s, and ignore_index past the end."""
    if shift == 0 or target.dim() == 0:
        return target if shift == 0 else torch.full_like(target, ignore_index)
    out = torch.full_like(target, ignore_index)
    if shift < target.shape[-1]:
        out[..., : target.shape[-1] - shift] = target[..., shift:]
    return out


def _to(tensor, dtype):
    return None if tensor is None else tensor.to(dtype)


def _ones_or(tensor, count, dtype):
    return torch.ones(count, dtype=dtype) if tensor is None else tensor.to(dtype).reshape(-1)


def temperature_of(problem):
    """Returns the temperature of all rows [1, 1], or of each [N, 1]."""
    return torch.as_tensor(problem.options.get("temperature", 1.0), dtype=torch.float64).reshape(-1, 1)


def forward(problem, leaves, dtype):
    """Returns outputs by name, and intermediate values. Logits have `dtype`; later values have at least float32."""
    o = problem.options
    shape = problem.target.shape
    input, weight, bias = (_to(t, dtype) for t in leaves)
    ignore = o.get("ignore_index", -100)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    target = shifted(problem.target, o.get("shift", 0), ignore).reshape(-1).long()
    valid = target != ignore
    y = torch.where(valid, target, 0)
    raw = o.get("scale", 1.0) * (input.reshape(-1, input.shape[-1]) @ weight.T)
    if bias is not None:
        raw = raw + bias
    temperature = temperature_of(problem).to(dtype)
    z = ((o["softcap"] * torch.tanh(raw / o["softcap"]) if o.get("softcap") else raw) / temperature).to(stats)
    raw = raw.detach() / temperature.detach()
    w = _ones_or(o.get("class_weight"), z.shape[1], stats)
    t = _ones_or(o.get("token_weight"), len(y), stats)
    lse = torch.logsumexp(z, -1)
    nll = lse - z.gather(1, y[:, None])[:, 0]
    p = torch.softmax(z, -1)
    entropy = lse - (p * z).sum(-1)
    smooth = (w * (lse[:, None] - z)).sum(-1) / z.shape[1]
    smoothing = o.get("label_smoothing", 0.0)
    rows = t * ((1 - smoothing) * w[y] * nll + smoothing * smooth + o.get("z_loss", 0.0) * lse**2)
    rows, *stats_out = (torch.where(valid, x, 0.0) for x in (rows, nll, lse, entropy))
    reach = t * ((1 - smoothing) * w[y] + smoothing * w.mean() + 2 * o.get("z_loss", 0.0) * lse.abs()) * valid
    reduction = o.get("reduction", "mean")
    loss = rows.reshape(shape) if reduction == "none" else rows.sum()
    if reduction == "mean":
        items = o.get("num_items")
        divisor = torch.where(valid, t * w[y], 0.0).sum() if items is None else float(items)
        loss, reach = loss / divisor, reach / divisor
    argmax = torch.where(valid, z.argmax(-1), -1)
    inner = {"nll": nll, "lse": lse, "entropy": entropy, "smooth": smooth}
    return {
        "loss": loss,
        **{name: value.reshape(shape) for name, value in zip(("nll", "lse", "entropy"), stats_out)},
        "argmax": argmax.reshape(shape),
        "correct_count": (argmax == target)[valid].sum(),
        "valid_count": valid.sum(),
        "inner": inner,
        "logits": z.detach(),
        "targets": torch.where(valid, target, -1).reshape(shape),
        # The part of lse's error that reaches the loss.
        "loss_reach": (reach.reshape(shape) if reduction == "none" else reach.sum()).detach(),
        "size": raw[valid].abs().max().item() if valid.any() else 0.0,
        # The largest part of a row's upstream gradient in each logit's gradient: p, the target, the smoothing.
        "p": p.detach() * valid[:, None],
        "reach": (p + torch.nn.functional.one_hot(y, z.shape[1]) + w / z.shape[1]).detach() * valid[:, None],
    }


def evaluate(problem, dtype):
    """Returns outputs and gradients by name. "row_upstream" [N] is the size of the gradient that reaches each row."""
    leaves, numbers = problem.leaves(), problem.numbers(dtype)
    out = forward(dataclasses.replace(problem, options=problem.options | numbers), leaves, dtype)
    inner = out.pop("inner")
    for value in inner.values():
        value.retain_grad()
    terms = [(problem.upstream[name].to(out[name].dtype) * out[name]).sum() for name in problem.upstream]
    sum(terms).backward()
    gradients = {name: torch.zeros_like(v) if v.grad is None else v.grad.abs() for name, v in inner.items()}
    gradients["entropy"] = gradients["entropy"] * (1 + 2 * out["size"])
    out["row_upstream"] = sum(gradients.values())
    for name, leaf in zip(GRADIENTS, leaves):
        out[name] = None if leaf is None else leaf.grad
    out |= {f"d_{name}": number.grad for name, number in numbers.items()}
    return {name: value.detach() if torch.is_tensor(value) else value for name, value in out.items()}


def units(problem, truth, dtype, kept_unit=0.0):
    """Returns the possible cost of rounding to dtype (float32 or float64) for each output by name.

    `kept_unit` is half a unit in the last place of exp logits or dz that are kept in 16 bits. An exp logit is
    rounded. So is its row's factor, which takes the rounding of the target's entry, and so are hidden rows times that
    factor. Otherwise dz is rounded.

    A logit of size Z has an error of eps Z, so has lse; exp makes it a relative error of the probabilities. A sum over
    V, N or D adds such errors, weighted by its other factor. The gradients are rounded once more at the end.
    """
    eps = torch.finfo(dtype).eps
    size = truth["size"]
    spread = eps * (4 + size)
    o = problem.options
    hidden = problem.input.double().reshape(-1, problem.input.shape[-1]).abs()
    reach = spread * truth["reach"] + kept_unit * (truth["reach"] + 2 * truth["p"])
    reach_of_bias = truth["row_upstream"][:, None] * reach / temperature_of(problem).double()
    reach = abs(o.get("scale", 1.0)) * reach_of_bias
    magnitude = {
        "d_hidden": (problem.input, reach @ problem.weight.double().abs()),
        "d_weight": (problem.weight, reach.T @ hidden),
        "d_bias": (problem.bias, reach_of_bias.sum(0)),
    }
    result = {f"d_{name}": bound for name, bound in units_of_numbers(problem, truth, eps).items()}
    for name in (*DIFFERENTIABLE, *GRADIENTS):
        if truth[name] is None:
            continue
        value = truth[name].abs()
        if name in magnitude:
            like, bound = magnitude[name]
            info = torch.finfo(like.dtype)
            result[name] = bound.reshape(value.shape) + info.eps * value + info.tiny * info.eps
        else:
            reach = truth["loss_reach"] if name == "loss" else 1.0
            result[name] = spread * (1 + size) * reach + eps * value
            if name == "loss":  # both sides add the rows in float64, each in its own order
                result[name] = result[name] + torch.finfo(torch.float64).eps * int(truth["valid_count"]) * value
    return result


def units_of_numbers(problem, truth, eps):
    """Returns the units of learned numbers: a number's gradient sums, over all logits, dz times the number's factor."""
    hidden, weight = problem.input.double().reshape(-1, problem.input.shape[-1]), problem.weight.double()
    raw = abs(problem.options.get("scale", 1.0)) * (hidden.abs() @ weight.abs().T)
    if problem.bias is not None:
        raw = raw + problem.bias.double().abs()
    of_a_logit = {"scale": (hidden @ weight.T).abs(), "temperature": raw / temperature_of(problem) ** 2}
    units = {}
    for name in problem.learned:
        reach = (truth["row_upstream"][:, None] * truth["reach"] * of_a_logit[name]).sum() * (4 + truth["size"])
        units[name] = eps * (reach + truth[f"d_{name}"].abs())
        if problem.input.dtype.itemsize == 2:  # exp logits may be kept in 16 bits
            units[name] = units[name] + torch.finfo(problem.input.dtype).eps / 2 * reach
    return units


def naive_dtype(problem):
    """Returns the precision of the plain computation on these inputs."""
    return torch.promote_types(problem.input.dtype, problem.weight.dtype)


def compare(problem, got, keeps_16_bits=False):
    """Asserts every named output in `got` against the truth. `keeps_16_bits`: exp logits or dz of 16-bit operands."""
    truth = evaluate(problem, torch.float64)
    computed = torch.float64 if problem.input.dtype == torch.float64 else torch.float32
    naive = evaluate(problem, naive_dtype(problem))
    short = keeps_16_bits and naive_dtype(problem).itemsize == 2
    unit = units(problem, truth, computed, torch.finfo(naive_dtype(problem)).eps / 2 if short else 0.0)
    for name in unit:
        if got.get(name) is None:
            continue
        assert got[name].shape == truth[name].shape, name
        error = (got[name].double() - truth[name].double()).abs()
        naive_error = (naive[name].double() - truth[name].double()).abs().nan_to_num(nan=0.0)
        bound = 2 * (naive_error.max() if naive_error.numel() else 0) + unit[name]
        bad = ~((error <= bound) | (got[name].isnan() & truth[name].isnan()))
        assert not bad.any(), (
            f"{name}: error {error[bad].max():.3e}, bound {torch.as_tensor(bound).expand_as(error)[bad].min():.3e}, "
            f"naive error {naive_error.max():.3e}"
        )
    if got.get("valid_count") is not None:
        assert torch.equal(got["valid_count"], truth["valid_count"])
    if got.get("argmax") is not None:
        check_argmax(got, truth, torch.finfo(computed).eps)


def check_argmax(got, truth, eps):
    """Asserts that the logit at argmax is the largest but for rounding, and that correct_count agrees with argmax."""
    argmax, target = got["argmax"].reshape(-1), truth["targets"].reshape(-1)
    valid = target >= 0
    assert (argmax[~valid] == -1).all()
    logits = truth["logits"][valid]
    chosen = logits.gather(1, argmax[valid][:, None])[:, 0]
    assert (chosen >= logits.max(-1).values - 2 * eps * (4 + truth["size"])).all()
    if got.get("correct_count") is not None:
        assert got["correct_count"].item() == (argmax == target)[valid].sum().item()
