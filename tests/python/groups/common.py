"""Shared parts of cases: data, a group's call and one process's, and the allowed difference."""

import logitless
import logitless.distributed
import pytest
import torch
import torch.distributed as dist

D = 12
ROWS = 24  # a multiple of 2, 3 and 4
WHOLE = slice(None)


def shard_sizes(ranks):
    """Returns sizes of uneven shards; one of three is empty."""
    return {1: [57], 2: [40, 17], 3: [40, 0, 17], 4: [5, 30, 0, 22]}[ranks.size]


class Data:
    """A head, tokens and the tensors of options, equal on every rank. The shard is this rank's."""

    width, times = D, 1  # the vocabulary is this many times that of shard_sizes()

    def __init__(self, ranks, dtype=torch.float64, seed=0, shape=(ROWS,), rows=None):
        generator = torch.Generator().manual_seed(seed)

        def normal(*size):
            return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

        stats = torch.float64 if dtype == torch.float64 else torch.float32
        self.rows = rows or [self.times * count for count in shard_sizes(ranks)]
        self.start, self.vocab = sum(self.rows[: ranks.rank]), sum(self.rows)
        self.input, self.weight, self.bias = (
            normal(*sizes) for sizes in ((*shape, self.width), (self.vocab, self.width), (self.vocab,))
        )
        self.target = torch.randint(0, self.vocab, shape, generator=generator)
        self.target.view(-1)[1::7] = -100
        self.class_weight = torch.rand(self.vocab, generator=generator).to(stats) + 0.5
        self.token_weight = torch.rand(shape, generator=generator).to(stats)
        self.temperature = torch.rand(shape, generator=generator).to(stats) + 0.5
        self.upstream = torch.randn(shape, generator=generator, dtype=torch.float64).to(stats)

    @property
    def shard(self):
        return slice(self.start, self.start + self.rows_here)

    @property
    def rows_here(self):
        return self.rows[dist.get_rank()]

    def leaves(self, rows=WHOLE, columns=WHOLE):
        """Returns input, weight and bias."""
        parts = self.input[rows], self.weight[columns], self.bias[columns]
        return [part.clone().requires_grad_() for part in parts]

    def map(self, change):
        """Returns a copy with other tensors."""
        other = object.__new__(type(self))
        other.__dict__ |= {name: change(v) if torch.is_tensor(v) else v for name, v in vars(self).items()}
        return other

    def to(self, dtype):
        return self.map(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


class Targets(Data):
    """Data with five targets per row, some missing and some repeated."""

    def __init__(self, ranks, dtype=torch.float64, seed=0, shape=(ROWS,), count=5):
        super().__init__(ranks, dtype, seed, shape)
        generator = torch.Generator().manual_seed(seed + 1)
        several = torch.randint(0, self.vocab, (*shape, count), generator=generator)
        several[..., 1][torch.rand(shape, generator=generator) < 0.3] = -100
        several[..., 2] = several[..., 0]
        several[self.target == -100] = -100
        self.target = several
        weight = torch.rand((*shape, count), generator=generator, dtype=torch.float64) - 0.25
        self.target_weight = weight.to(torch.float64 if dtype == torch.float64 else torch.float32)
        self.upstream_of_ids = torch.randn((*shape, count), generator=generator, dtype=torch.float64)


def objective(out, data):
    """Returns a scalar from a loss and differentiable statistics, or from log-probabilities."""
    outputs = [out]
    if not isinstance(out, torch.Tensor):
        outputs = [out.loss, *(v for v in (out.entropy, out.lse, out.nll) if v is not None and v.requires_grad)]
    upstream = [data.upstream if v.shape == data.upstream.shape else data.upstream_of_ids for v in outputs if v.dim()]
    numbers = [value for value in outputs if not value.dim()]
    rows = [value for value in outputs if value.dim()]
    return sum([(value * u.to(value.dtype)).sum() for value, u in zip(rows, upstream)], sum(numbers))


def tensors_of(data, options, rows=WHOLE):
    """Returns options by name. Tensors are options that name an entry of the data; ``rows`` selects from them."""
    return {name: getattr(data, value[1:])[rows] if isinstance(value, str) and value[0] == "@" else value
            for name, value in options.items()}  # fmt: skip


def of_whole(data, options, has_bias=False, function="linear_cross_entropy"):
    """Returns the result of one process, and the gradients of hidden, weight and bias."""
    leaves, options = data.leaves(), tensors_of(data, options)
    if has_bias:
        options["bias"] = leaves[2]
    out = getattr(logitless, function)(*leaves[:2], data.target, **options)
    objective(out, data).backward()
    return out, [leaf.grad for leaf in leaves]


def call(ranks, data, function="linear_cross_entropy", **options):
    """Calls the group's head on this rank's shard."""
    of_function = {
        "linear_top_k": {"k": 9},
        "linear_log_probs": {"ids": data.target},
        "sample": {"return_logprobs": True},
    }
    targets = of_function.get(function, {"targets": data.target})
    given = {"hidden": data.input, "weight": data.weight[data.shard]} | targets | options
    return getattr(logitless.distributed, function)(**given, group=ranks.group)


def of_group(ranks, data, options, has_bias=False, own=None, function="linear_cross_entropy", **more):
    """Returns of_whole()'s results for this rank's shard.

    With ``own`` each rank has the hidden states of its own rows only; with True also their targets.
    """
    rows = WHOLE if own is None else ranks.part(data)
    theirs = rows if own else WHOLE
    leaves, options = data.leaves(rows, data.shard), tensors_of(data, options, theirs) | more
    if own is not None:
        options["sequence_parallel"] = True
    if has_bias:
        options["bias"] = leaves[2]
    options["ids" if function == "linear_log_probs" else "targets"] = data.target[theirs]
    out = call(ranks, data, function, hidden=leaves[0], weight=leaves[1], **options)
    objective(out, data).backward()
    return out, [leaf.grad for leaf in leaves]


def outputs(out):
    values = {"loss": out} if isinstance(out, torch.Tensor) else out._asdict()
    return {name: value for name, value in values.items() if value is not None}


def agree(data, group, whole, rows=WHOLE, loss=1e-12, gradients=1e-14):
    """Compares of_group() with of_whole() in float64."""
    torch.testing.assert_close(outputs(group[0])["loss"], outputs(whole[0])["loss"], rtol=loss, atol=1e-14)
    for got, exact, part in zip(group[1], whole[1], (rows, data.shard, data.shard)):
        if exact is not None:
            torch.testing.assert_close(got, exact[part], rtol=1e-12, atol=gradients)


def agree_sequence_parallel(ranks, data, options, **more):
    """Compares with all rows' targets on each rank, and with its own rows' targets."""
    for own in (False, True):
        whole, group = of_whole(data, options, **more), of_group(ranks, data, options, own=own, **more)
        agree(data, group, whole, ranks.part(data))


def agree_compiled(ranks, data, function="linear_cross_entropy", **options):
    """Compares a compiled call among other operations."""

    def step(call, hidden, weight, target, **more):
        return call(torch.tanh(hidden), weight, target, **options, **more) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for run, kind, columns in ((compiled, logitless.distributed, data.shard), (step, logitless, WHOLE)):
        leaves = data.leaves(columns=columns)
        more = {} if run is step else {"group": ranks.group}
        loss = run(getattr(kind, function), *leaves[:2], data.target, **more)
        loss.sum().backward()
        results.append((loss.detach(), [leaf.grad for leaf in leaves[:2]]))
    agree(data, *results)


def assert_close(name, got, naive, truth, term, ranks):
    """Asserts an error of at most twice that of the single-process head of the same dtype, plus roundings.

    Each rank's part is rounded, and the sum once more. A rounding is that of the largest term behind the result.
    """
    unit = torch.finfo(got.dtype).eps
    got, naive, truth = (t.detach().to(torch.float64) for t in (got, naive, truth))
    assert got.shape == truth.shape, (name, got.shape, truth.shape)
    if truth.numel() == 0:
        return
    fair = 2 * (naive - truth).abs().max() + unit * term
    error = (got - truth).abs().max()
    assert error <= (ranks.size + 1) * fair, (name, error.item(), fair.item())


def largest_logit(data, has_bias=False):
    return (data.input.double() @ data.weight.double().T + (data.bias.double() if has_bias else 0)).abs().max()


def check(ranks, options, has_bias=False, dtype=torch.float64, seed=0, kind=Data, function="linear_cross_entropy",
          own=None, **more):  # fmt: skip
    """Checks a group's head against one process. ``more`` has options of the group's head that change only its
    rounding."""
    data, given = kind(ranks, dtype, seed), {"has_bias": has_bias, "function": function}
    out, gradients = of_group(ranks, data, options, own=own, **given, **more)
    truth, exact = of_whole(data.to(torch.float64), options, **given)
    naive, rounded = of_whole(data, options, **given)
    values, naive_values = outputs(out), outputs(naive)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    logit = largest_logit(data, has_bias)
    for name, value in outputs(truth).items():
        if value.is_floating_point():
            assert values[name].dtype == stats
            assert_close(name, values[name], naive_values[name], value, max(logit, value.abs().max()), ranks)
        elif dtype == torch.float64:
            assert torch.equal(values[name], value), name
    rows = WHOLE if own is None else ranks.part(data)
    for part, got, near, whole in zip((rows, data.shard, data.shard), gradients, rounded, exact):
        if whole is None:
            assert got is None
            continue
        assert got.dtype == dtype
        # A rounding of the largest logit is a relative error of probabilities.
        assert_close("gradient", got, near[part], whole[part], max(1, logit) * whole.abs().max(), ranks)
    again, gradients_again = of_group(ranks, data, options, own=own, **given, **more)
    for name, value in outputs(again).items():
        assert torch.equal(value, values[name]), (name, "between runs")
        assert all(torch.equal(other.to(value.device), value) for other in ranks.gather(value)), (name, "between ranks")
    for one, other in zip(gradients, gradients_again):
        assert one is None or torch.equal(one, other)


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "class_weights": {"class_weight": "@class_weight", "label_smoothing": 0.2, "softcap": 3.0},
    "token_weights": {"token_weight": "@token_weight", "z_loss": 0.01, "reduction": "sum"},
    "temperature": {"temperature": "@temperature", "scale": -0.7},
    "num_items": {"num_items": 11, "temperature": 1.7, "shift": 1},
    "none": {"reduction": "none", "z_loss": 0.1},
    "statistics": {"return_stats": True},
    "constant_statistics": {
        "return_stats": ("nll", "argmax", "is_top1", "mean_logit", "max_logit", "log_sum_sq_probs", "target_logit",
                         "valid_count", "correct_count"),
        "differentiable_stats": False,
    },
    "small_budget": {"max_workspace_bytes": 200_000},
}  # fmt: skip
WITH_BIAS = ("plain", "statistics", "temperature")


def add_cases(module, options, dtypes, prefix="", with_bias=WITH_BIAS, **more):
    """Adds a case of check() for each option and dtype to a module's variables."""
    for name, chosen in options.items():
        for dtype in dtypes:

            def case(ranks, chosen=chosen, has_bias=name in with_bias, dtype=dtype):
                check(ranks, chosen, has_bias, dtype, **more)

            case.sizes = (2, 3, 4) if name == "plain" else ((3,) if dtype == torch.float64 else (2,))
            module[f"case_{prefix}{name}_{str(dtype).removeprefix('torch.')}"] = case


def refused(ranks, match, error=ValueError, on=1, normal=None, data=None, function="linear_cross_entropy", **options):
    """Checks that every rank raises that error with a matching message, and that a right call works afterwards.

    ``options`` belong to rank `on`, or to "all".
    """
    data = data or Data(ranks)
    mine = options if on in (ranks.rank, "all") else {}
    with pytest.raises(error, match=match):
        call(ranks, data, function, **(normal or {}) | mine)
    out = call(ranks, data, function)
    assert torch.isfinite(out if isinstance(out, torch.Tensor) else out.log_probs).all()
