"""What every rank does and finds; single-process heads of the same data are the measure."""

import gc
import weakref

import logitless
import logitless.distributed
import torch
import torch.distributed as dist

from groups.ranks import sizes

D = 12
ROWS = 24  # a multiple of 2, 3 and 4


def shard_sizes(ranks):
    """Of uneven shards, one of them empty where there are three."""
    return {1: [57], 2: [40, 17], 3: [40, 0, 17], 4: [5, 30, 0, 22]}[ranks.size]


class Data:
    """The same on every rank: a head, tokens and what options need. The shard is this rank's."""

    width, times = D, 1  # the vocabulary is so many times that of shard_sizes()

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

    def to(self, dtype):
        other = object.__new__(type(self))
        other.__dict__ |= {
            name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in vars(self).items()
        }
        return other


def objective(out, data, reduction):
    """A scalar of a loss, and of differentiable statistics."""
    if isinstance(out, torch.Tensor):
        return (out * data.upstream).sum() if reduction == "none" else out
    loss = (out.loss * data.upstream).sum() if reduction == "none" else out.loss
    more = [value for value in (out.entropy, out.lse, out.nll) if value is not None and value.requires_grad]
    return sum([(value * data.upstream).sum() for value in more], loss)


def tensors_of(data, options):
    """Options by name, those that are tensors by the name of the data."""
    return {name: getattr(data, value[1:]) if isinstance(value, str) and value[0] == "@" else value
            for name, value in options.items()}  # fmt: skip


def of_whole(data, options, has_bias):
    leaves = [t.clone().requires_grad_() for t in (data.input, data.weight, data.bias)]
    options = tensors_of(data, options)
    out = logitless.linear_cross_entropy(
        leaves[0], leaves[1], data.target, linear_bias=leaves[2] if has_bias else None, **options
    )
    objective(out, data, options.get("reduction", "mean")).backward()
    return out, [leaf.grad for leaf in leaves]


def of_group(ranks, data, options, has_bias, **more):
    leaves = [data.input.clone().requires_grad_()]
    leaves += [t[data.shard].clone().requires_grad_() for t in (data.weight, data.bias)]
    options = tensors_of(data, options)
    out = logitless.distributed.linear_cross_entropy(
        leaves[0],
        leaves[1],
        data.target,
        group=ranks.group,
        linear_bias=leaves[2] if has_bias else None,
        **options,
        **more,
    )
    objective(out, data, options.get("reduction", "mean")).backward()
    return out, [leaf.grad for leaf in leaves]


def assert_close(name, got, naive, truth, term, ranks):
    """For each rank, whose part is rounded, and once more: twice the error of the single-process head of the same
    dtype, and a rounding of the largest term behind the result."""
    unit = torch.finfo(got.dtype).eps
    got, naive, truth = (t.detach().to(torch.float64) for t in (got, naive, truth))
    assert got.shape == truth.shape, (name, got.shape, truth.shape)
    if truth.numel() == 0:
        return
    fair = 2 * (naive - truth).abs().max() + unit * term
    error = (got - truth).abs().max()
    assert error <= (ranks.size + 1) * fair, (name, error.item(), fair.item())


def outputs(out):
    found = {"loss": out} if isinstance(out, torch.Tensor) else out._asdict()
    return {name: value for name, value in found.items() if value is not None}


def check(ranks, options, has_bias=False, dtype=torch.float64, seed=0, kind=Data, **more):
    """more: options of the group's head alone, which change nothing but its rounding."""
    data = kind(ranks, dtype, seed)
    out, gradients = of_group(ranks, data, options, has_bias, **more)
    truth, exact = of_whole(data.to(torch.float64), options, has_bias)
    naive, rounded = of_whole(data, options, has_bias)
    told, told_naive = outputs(out), outputs(naive)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    logit = (data.input.double() @ data.weight.double().T + data.bias.double()).abs().max()
    for name, value in outputs(truth).items():
        if value.is_floating_point():
            assert told[name].dtype == stats
            assert_close(name, told[name], told_naive[name], value, max(logit, value.abs().max()), ranks)
        elif dtype == torch.float64:
            assert torch.equal(told[name], value), name
    for name, got, near, whole in zip(("input", "weight", "bias"), gradients, rounded, exact):
        if whole is None:
            assert got is None
            continue
        part = slice(None) if name == "input" else data.shard
        assert got.dtype == dtype
        # A rounding of the largest logit is a relative error of probabilities.
        assert_close(name, got, near[part], whole[part], max(1, logit) * whole.abs().max(), ranks)
    again, gradients_again = of_group(ranks, data, options, has_bias, **more)
    for name, value in outputs(again).items():
        assert torch.equal(value, told[name]), (name, "between runs")
        every = [None] * ranks.size
        dist.all_gather_object(every, value)
        assert all(torch.equal(other.to(value.device), value) for other in every), (name, "between ranks")
    for one, other in zip(gradients, gradients_again):
        assert one is None or torch.equal(one, other)


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "class_weights": {"weight": "@class_weight", "label_smoothing": 0.2, "softcap": 3.0},
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


def _make(name, options, dtype):
    def case(ranks):
        check(ranks, options, has_bias=name in ("plain", "statistics", "temperature"), dtype=dtype)

    case.sizes = (2, 3, 4) if name == "plain" else ((3,) if dtype == torch.float64 else (2,))
    globals()[f"case_{name}_{str(dtype).removeprefix('torch.')}"] = case


for _name, _options in OPTIONS.items():
    for _dtype in (torch.float64, torch.float32):
        _make(_name, _options, _dtype)
for _dtype in (torch.bfloat16, torch.float16):
    _make("plain", {}, _dtype)


def case_starts_that_are_given(ranks):
    """Shards in the reverse order of ranks."""
    data = Data(ranks)
    _, exact = of_whole(data, {}, True)
    data.start = sum(data.rows[ranks.rank + 1 :])
    out, gradients = of_group(ranks, data, {}, True, vocab_start=data.start, vocab_total=data.vocab)
    for got, whole, part in zip(gradients, exact, (slice(None), data.shard, data.shard)):
        torch.testing.assert_close(got, whole[part], rtol=1e-12, atol=1e-14)


def case_losses_without_gradients(ranks):
    data = Data(ranks)
    with torch.no_grad():
        got = logitless.distributed.linear_cross_entropy(
            data.input, data.weight[data.shard], data.target, group=ranks.group
        )
    whole = logitless.linear_cross_entropy(data.input, data.weight, data.target)
    torch.testing.assert_close(got, whole, rtol=1e-13, atol=0)


def case_learned_scale_and_temperature(ranks):
    data = Data(ranks)
    found = []
    for is_group in (True, False):
        scale, temperature = torch.tensor(0.8, requires_grad=True), torch.tensor(1.3, requires_grad=True)
        leaf = data.input.clone().requires_grad_()
        options = {"scale": scale, "temperature": temperature}
        if is_group:
            loss = logitless.distributed.linear_cross_entropy(
                leaf, data.weight[data.shard], data.target, group=ranks.group, linear_bias=data.bias[data.shard],
                **options,
            )  # fmt: skip
        else:
            loss = logitless.linear_cross_entropy(leaf, data.weight, data.target, linear_bias=data.bias, **options)
        loss.backward()
        found.append((loss.detach(), leaf.grad, scale.grad, temperature.grad))
    for got, whole in zip(*found):
        torch.testing.assert_close(got, whole, rtol=1e-6 if got.dtype == torch.float32 else 1e-12, atol=1e-14)


def case_main_grad(ranks):
    data = Data(ranks, torch.float32)
    main_grad = torch.ones(data.rows_here, D)
    leaf, shard = data.input.clone().requires_grad_(), data.weight[data.shard].clone().requires_grad_()
    loss = logitless.distributed.linear_cross_entropy(leaf, shard, data.target, group=ranks.group, main_grad=main_grad)
    loss.backward()
    _, exact = of_whole(data.to(torch.float64), {}, False)
    assert shard.grad is None
    torch.testing.assert_close(main_grad - 1, exact[1][data.shard].float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaf.grad, exact[0].float(), rtol=1e-5, atol=1e-6)


def sequence_parallel(ranks, own_targets, options, shape):
    data = Data(ranks, shape=shape)
    out, exact = of_whole(data, options, False)
    count = shape[0] // ranks.size
    mine = slice(ranks.rank * count, (ranks.rank + 1) * count)
    leaf = data.input[mine].clone().requires_grad_()
    shard = data.weight[data.shard].clone().requires_grad_()
    given = tensors_of(data, options)
    if own_targets:
        given = {name: value[mine] if torch.is_tensor(value) else value for name, value in given.items()}
    got = logitless.distributed.linear_cross_entropy(
        leaf, shard, data.target[mine] if own_targets else data.target, group=ranks.group, sequence_parallel=True,
        **given,
    )  # fmt: skip
    objective(got, data, options.get("reduction", "mean")).backward()
    torch.testing.assert_close(outputs(got)["loss"], outputs(out)["loss"], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(leaf.grad, exact[0][mine], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(shard.grad, exact[1][data.shard], rtol=1e-12, atol=1e-14)


@sizes(2, 3, 4)
def case_sequence_parallel(ranks):
    for own_targets in (False, True):
        sequence_parallel(ranks, own_targets, {"token_weight": "@token_weight"}, (ROWS,))
        sequence_parallel(ranks, own_targets, {"temperature": "@temperature"}, (ROWS, 2))


def case_sequence_parallel_with_a_later_backward_pass(ranks):
    for own_targets in (False, True):
        sequence_parallel(ranks, own_targets, {"reduction": "none", "shift": 1}, (ROWS,))


def case_compiled(ranks):
    data = Data(ranks)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(hidden, shard, target, reduction):
        loss = logitless.distributed.linear_cross_entropy(
            torch.tanh(hidden), shard, target, group=ranks.group, reduction=reduction
        )
        return loss.sum() * 2

    for reduction in ("mean", "none"):
        leaf, shard = data.input.clone().requires_grad_(), data.weight[data.shard].clone().requires_grad_()
        other, whole = data.input.clone().requires_grad_(), data.weight.clone().requires_grad_()
        loss = step(leaf, shard, data.target, reduction)
        loss.backward()
        expected = logitless.linear_cross_entropy(torch.tanh(other), whole, data.target, reduction=reduction).sum() * 2
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(shard.grad, whole.grad[data.shard], rtol=1e-12, atol=1e-14)


def case_two_heads_at_once(ranks):
    """Backward passes that come when another vocabulary has been worked on, whose shard has as many rows here."""
    data = Data(ranks)
    options = {"reduction": "none", "label_smoothing": 0.3}
    _, exact = of_whole(data, options, False)
    leaf, shard = data.input.clone().requires_grad_(), data.weight[data.shard].clone().requires_grad_()
    loss = logitless.distributed.linear_cross_entropy(leaf, shard, data.target, group=ranks.group, **options)
    more = 0 if ranks.rank == 0 else 9
    other = torch.cat([data.weight[data.shard], data.weight[:more]]).requires_grad_()
    logitless.distributed.linear_cross_entropy(data.input, other, data.target, group=ranks.group, **options)
    objective(loss, data, "none").backward()
    torch.testing.assert_close(leaf.grad, exact[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(shard.grad, exact[1][data.shard], rtol=1e-12, atol=1e-13)


def case_nothing_outlives_its_use(ranks):
    """Neither a run's workspace, until Python looks for cycles, nor a group that is destroyed."""
    from logitless.distributed._passes import _Exchange

    data = Data(ranks)
    group = dist.new_group(list(range(ranks.size)))
    known = weakref.ref(group)
    gc.collect()
    gc.disable()
    try:
        for reduction in ("mean", "none"):
            leaf, shard = data.input.clone().requires_grad_(), data.weight[data.shard].clone().requires_grad_()
            logitless.distributed.linear_cross_entropy(
                leaf, shard, data.target, group=group, reduction=reduction
            ).sum().backward()
        assert not any(type(thing) is _Exchange for thing in gc.get_objects())
    finally:
        gc.enable()
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert known() is None


def case_group_of_one(ranks):
    alone = [dist.new_group([rank]) for rank in range(ranks.size)][ranks.rank]
    data = Data(ranks)
    got = logitless.distributed.linear_cross_entropy(data.input, data.weight, data.target, group=alone)
    assert torch.equal(got, logitless.linear_cross_entropy(data.input, data.weight, data.target))


@sizes(4)
def case_two_groups_side_by_side(ranks):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, rank = pairs[ranks.rank // 2], ranks.rank % 2
    data = Data(ranks, seed=ranks.rank // 2)
    half = slice(0, 30) if rank == 0 else slice(30, 57)
    leaf = data.input.clone().requires_grad_()
    loss = logitless.distributed.linear_cross_entropy(leaf, data.weight[half], data.target, group=group)
    loss.backward()
    expected, exact = of_whole(data, {}, False)
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(leaf.grad, exact[0], rtol=1e-12, atol=1e-14)
