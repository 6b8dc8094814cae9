"""logitless.distributed.info_nce: pairs of all ranks, against one process in float64."""

import logitless
import pytest
import torch
import torch.distributed as dist
from logitless.nn import InfoNCELoss
from torch.distributed.tensor.debug import CommDebugMode

from groups.common import assert_close
from groups.ranks import sizes

# Rows of a and of b on each rank.
EVEN, UNEVEN, EMPTY = ((4, 4), (4, 4), (4, 4)), ((2, 3), (5, 5), (1, 4)), ((3, 5), (0, 0), (2, 2))
CUTS = {"even": EVEN, "uneven": UNEVEN, "a rank without rows": EMPTY, "none on the first": ((0, 1), (6, 6), (1, 1))}
WIDTH = 64


class Pairs:
    """The pairs of all ranks; mine_a and mine_b are the places of this rank's rows."""

    def __init__(self, ranks, cut=EVEN, dtype=torch.float64):
        generator = torch.Generator().manual_seed(3)
        sizes = list(zip(*cut[: ranks.size]))
        self.mine_a, self.mine_b = (slice(sum(s[: ranks.rank]), sum(s[: ranks.rank + 1])) for s in sizes)
        rows, others = map(sum, sizes)
        self.a, self.b = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) / 3 for n in (rows, others))
        self.a, self.b = self.a.to(dtype), self.b.to(dtype)
        starts = [sum(sizes[1][:rank]) for rank in range(ranks.size)]
        self.identity = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, sizes[0])])
        self.targets = torch.randint(0, others, (rows,), generator=generator)
        self.targets[::4] = -100
        stats = torch.promote_types(dtype, torch.float32)
        self.weights = torch.rand(rows, generator=generator, dtype=torch.float64).to(stats) + 0.5
        self.bias = torch.randn(others, generator=generator, dtype=torch.float64).to(stats)


def leaf(value):
    return value.detach().clone().requires_grad_()


def of_group(ranks, data, symmetric, temperature, with_targets=False, weighted=False, with_bias=False, **options):
    """Returns this rank's loss and gradients; those of the temperature are added up."""
    a, b, t = leaf(data.a[data.mine_a]), leaf(data.b[data.mine_b]), leaf(temperature)
    bias = leaf(data.bias[data.mine_b]) if with_bias else None
    loss = logitless.distributed.info_nce(
        a,
        b,
        t,
        symmetric=symmetric,
        targets=data.targets[data.mine_a] if with_targets else None,
        token_weight=data.weights[data.mine_a] if weighted else None,
        bias=bias,
        group=ranks.group,
        **options,
    )
    d_a, d_b, d_t, *more = torch.autograd.grad(loss, [a, b, t] + [bias] * with_bias)
    dist.all_reduce(d_t, group=ranks.group)
    return [loss.detach(), d_a, d_b, d_t, *more]


def of_whole(data, symmetric, temperature, with_targets=False, weighted=False, with_bias=False, **options):
    """Returns the same parts of one process's results."""
    a, b, t, bias = leaf(data.a), leaf(data.b), leaf(temperature), leaf(data.bias)
    given = {"targets": data.targets if with_targets else data.identity, "symmetric": symmetric}
    given |= {"token_weight": data.weights if weighted else None, "bias": bias if with_bias else None}
    loss = logitless.info_nce(a, b, t, **given, **options)
    d_a, d_b, d_t, *more = torch.autograd.grad(loss, [a, b, t] + [bias] * with_bias)
    return [loss.detach(), d_a[data.mine_a], d_b[data.mine_b], d_t, *(d[data.mine_b] for d in more)]


def check(ranks, data, symmetric, **options):
    temperature = torch.tensor(0.5, dtype=torch.float64)
    got = of_group(ranks, data, symmetric, temperature, **options)
    for one, other in zip(got, of_whole(data, symmetric, temperature, **options)):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert all(torch.equal(loss, got[0]) for loss in ranks.gather(got[0])), "between ranks"


def case_pairs(ranks):
    for cut in CUTS.values():
        data = Pairs(ranks, cut)
        for symmetric in (False, True):
            check(ranks, data, symmetric)
        check(ranks, data, True, weighted=True, label_smoothing=0.1)
        check(ranks, data, False, with_targets=True, with_bias=True, weighted=True)
    check(ranks, data, True, reduction="sum", max_workspace_bytes=100_000)


def case_rounding_of_pairs(ranks):
    """Each rank's part is rounded, and their sum once more, as in common.assert_close()."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        data, temperature = Pairs(ranks, UNEVEN, dtype), torch.tensor(0.5)
        got, naive = of_group(ranks, data, True, temperature), of_whole(data, True, temperature)
        for name in ("a", "b", "weights", "bias"):
            setattr(data, name, getattr(data, name).double())
        for one, near, exact in zip(got, naive, of_whole(data, True, temperature.double())):
            assert_close("pairs", one, near, exact, exact.abs().max().clamp(min=1), ranks)


def case_pairs_under_ddp(ranks):
    """DDP averages gradients, so the loss counts once for each rank; encoders and the scale are then right."""
    data, log_scale = Pairs(ranks, UNEVEN), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    encoders = [torch.nn.Linear(WIDTH, 8, dtype=torch.float64) for _ in range(2)]
    parameters = [log_scale, *(parameter for encoder in encoders for parameter in encoder.parameters())]

    def gradients(a, b, targets, criterion, times):
        sides = [torch.nn.functional.normalize(encoder(x), dim=-1) for encoder, x in zip(encoders, (a, b))]
        loss = criterion(*sides, targets, scale=log_scale.exp())
        return torch.autograd.grad(loss * times, parameters)

    mine = data.a[data.mine_a], data.b[data.mine_b], None
    got = gradients(*mine, InfoNCELoss(symmetric=True, group=ranks.group), ranks.size)
    expected = gradients(data.a, data.b, data.identity, InfoNCELoss(symmetric=True), 1)
    for one, other in zip(got, expected):
        dist.all_reduce(one, group=ranks.group)
        torch.testing.assert_close(one / ranks.size, other, rtol=1e-12, atol=1e-14)


def case_batches_of_gradients_of_pairs(ranks):
    data = Pairs(ranks, UNEVEN)
    leaves = [leaf(data.a[data.mine_a]), leaf(data.b[data.mine_b])]
    loss = logitless.distributed.info_nce(*leaves, symmetric=True, group=ranks.group)
    upstream = torch.tensor([0.5, -2.0], dtype=torch.float64)
    batch = torch.autograd.grad(loss, leaves, upstream, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(loss, leaves, one, retain_graph=True) for one in upstream]
    for got, expected in zip(batch, zip(*each)):
        torch.testing.assert_close(got, torch.stack(expected))


def case_collectives_of_pairs(ranks):
    """Both directions gather the rows of a once, and the sums of one direction. Gradients travel once."""
    data = Pairs(ranks)
    leaves = [leaf(data.a[data.mine_a]), leaf(data.b[data.mine_b])]
    for symmetric, gathers in ((False, 1), (True, 2)):
        with CommDebugMode() as mode:
            loss = logitless.distributed.info_nce(*leaves, symmetric=symmetric, group=ranks.group)
            torch.autograd.grad(loss, leaves)
        counts = {str(operation): count for operation, count in mode.get_comm_counts().items()}
        # Hosts exchange two headers by the operator that gathers lists.
        of_device = {name: count for name, count in counts.items() if not name.endswith("allgather_")}
        assert sorted(of_device.values()) == sorted([gathers, 1]), counts
        assert any("reduce_scatter" in name for name in of_device), counts


@sizes(2)
def case_pairs_that_ranks_give_otherwise(ranks):
    data = Pairs(ranks)

    def call(**options):
        given = {"a": data.a[data.mine_a], "b": data.b[data.mine_b]} | options
        return logitless.distributed.info_nce(**given, group=ranks.group)

    def refused(message, theirs, error=ValueError, on=1):
        with pytest.raises(error, match=message):
            call(**(theirs if on in (ranks.rank, "all") else {}))
        assert call(symmetric=True).isfinite()

    mine = data.targets[data.mine_a]
    refused("symmetric: expected the same .* got False on rank 0 and True on rank 1", {"symmetric": True})
    refused("targets: expected the same .* got False on rank 0 and True", {"targets": mine})
    refused("token_weight: expected the same", {"token_weight": data.weights[data.mine_a]})
    refused("temperature: expected the same", {"temperature": 0.5})
    refused("reduction: expected the same", {"reduction": "sum"})
    refused("tensors that require grad: expected the same", {"a": leaf(data.a[data.mine_a])})
    refused("a: expected the same .* got 'torch.float64 .*' on rank 0", {"a": data.a[data.mine_a].float(),
                                                                        "b": data.b[data.mine_b].float()})  # fmt: skip
    bad = "refused its arguments" if ranks.rank == 0 else "b: expected at least 4 rows, one for each of a"
    refused(bad, {"b": data.b[:1]})
    bad = "refused its arguments" if ranks.rank == 0 else "temperature: expected one element in a group of ranks"
    refused(bad, {"temperature": torch.ones(4)})
    for name in ("a", "b"):
        none = {"a": data.a[:0], name: getattr(data, name)[:0]}
        given = {**none, "targets": mine[:0]} if name == "b" else none
        refused("a: expected rows on one rank of the group at least, got none on all", given, on="all")
    given = {"b": data.b[:0], "targets": mine}
    refused("b: expected rows on one rank of the group at least, got none on all", given, on="all")
    refused('reduction: expected "mean" or "sum" in a group of ranks', {"reduction": "none"},
            logitless.UnsupportedError, on="all")  # fmt: skip
    refused("targets: expected None with symmetric in a group of ranks", {"targets": mine, "symmetric": True},
            logitless.UnsupportedError, on="all")  # fmt: skip
    wrong = {"targets": torch.full_like(mine, len(data.b))}
    refused("targets: expected 0 <= target < 8 or ignore_index -100, got 8", wrong, on="all")


@sizes(2)
def case_a_budget_of_pairs_that_one_rank_exceeds(ranks):
    """The direction of its own 600 rows fits on no budget that that of one row fits easily."""
    a, b = (torch.randn(1 + 599 * ranks.rank, WIDTH, requires_grad=True) for _ in range(2))
    match = "at least" if ranks.rank == 1 else "rank 1 of the group refused its arguments: BudgetTooSmallError"
    with pytest.raises(ValueError, match=match):
        logitless.distributed.info_nce(a, b, symmetric=True, max_workspace_bytes="1MiB", group=ranks.group)
    assert logitless.distributed.info_nce(a, b, symmetric=True, group=ranks.group).isfinite()
