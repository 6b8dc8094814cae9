"""Sparsified gradients: a seed keeps the same elements for any cut, those of the float64 head of one process."""

import logitless
import pytest
import torch

from groups.common import (
    WHOLE,
    Data,
    agree_sequence_parallel,
    assert_close,
    call,
    largest_logit,
    of_group,
    of_whole,
    refused,
)
from groups.ranks import sizes

SPARSIFIED = {"gradient": "always-sparsified", "threshold": 1 / 8}


def gradients(ranks, data, **options):
    """Returns the loss and the gradients of input and shard."""
    loss, grads = of_group(ranks, data, SPARSIFIED | options)
    return loss.detach(), *grads[:2]


def gradients_of_whole(data, **options):
    loss, grads = of_whole(data, SPARSIFIED | options)
    return loss.detach(), *grads[:2]


def case_sparsified_gradients(ranks):
    for options in ({}, {"label_smoothing": 0.1, "reduction": "sum"}, {"reduction": "none", "z_loss": 0.1}):
        for dtype in (torch.float64, torch.float32):
            for seed in (5, 6):
                data = Data(ranks, dtype)
                wide = data.to(torch.float64)
                exact = gradients_of_whole(wide, seed=seed, **options)
                rounded = gradients_of_whole(data.to(torch.float32).to(torch.float64), seed=seed, **options)
                got = gradients(ranks, data, seed=seed, **options)
                logit = largest_logit(wide)
                for part, one, near, whole in zip((None, WHOLE, data.shard), got, rounded, exact):
                    pair = (near, whole) if part is None else (near[part], whole[part])
                    assert_close("of a seed", one, *pair, max(1, logit) * whole.abs().max(), ranks)
        again = gradients(ranks, data, seed=6, **options)
        assert all(torch.equal(one, other) for one, other in zip(got, again))
        others = gradients(ranks, data, seed=7, **options)
        assert not torch.equal(got[1], others[1])


def case_sparsified_gradients_of_rank_0s_seed(ranks):
    """Ranks draw their own seeds; rank 0's is used, even in a later backward pass."""
    data = Data(ranks)
    for reduction in ("mean", "none"):
        torch.manual_seed(11 + ranks.rank)
        state = torch.get_rng_state()
        got = gradients(ranks, data, reduction=reduction)
        assert not torch.equal(torch.get_rng_state(), state), "every rank's generator moves on"
        again = gradients(ranks, data, reduction=reduction)
        assert not torch.equal(got[1], again[1])
        torch.manual_seed(11 + ranks.rank)
        assert torch.equal(gradients(ranks, data, reduction=reduction)[1], got[1])


def case_sparsified_gradients_sequence_parallel_and_compiled(ranks):
    data, options = Data(ranks), SPARSIFIED | {"seed": 3}
    agree_sequence_parallel(ranks, data, options)
    _, exact, weight = gradients_of_whole(data, seed=3)
    mine = ranks.part(data)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(hidden, shard, target):
        return logitless.distributed.linear_cross_entropy(
            hidden, shard, target, group=ranks.group, sequence_parallel=True, **options
        )

    leaf, shard, _ = data.leaves(mine, data.shard)
    step(leaf, shard, data.target).backward()
    torch.testing.assert_close(leaf.grad, exact[mine], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(shard.grad, weight[data.shard], rtol=1e-12, atol=1e-14)


def case_sparsified_gradients_are_unbiased(ranks):
    data = Data(ranks, torch.float32, shape=(12,))
    exact = of_whole(data.to(torch.float64), {})[1][0]
    every = torch.stack([gradients(ranks, data, seed=seed, threshold=0.25)[1] for seed in range(200)]).double()
    allowed = 5 * every.std(0) / 200**0.5 + 1e-6
    assert ((every.mean(0) - exact).abs() <= allowed).all()


@sizes(2)
def case_sparsified_gradients_that_one_rank_asks_for_otherwise(ranks):
    data = Data(ranks)
    normal = SPARSIFIED | {"hidden": data.leaves()[0], "seed": 4}
    for _ in range(2):  # a new configuration, then a known one
        refused(ranks, "seed: expected the same .* got 4 on rank 0 and 9 on rank 1", normal=normal, seed=9)
        call(ranks, data, **normal)
    refused(ranks, "threshold: expected the same", normal=normal, threshold=0.5)
    refused(ranks, "gradient: expected the same .*'always-sparsified' on rank 0 and 'exact' on rank 1", normal=normal,
            gradient="exact", seed=None)  # fmt: skip
    refused(ranks, "seed: expected the same .*'given' on rank 0 and 'drawn' on rank 1", normal=normal, seed=None)
    refused(ranks, "return_stats: expected no kept_count in a group", logitless.UnsupportedError, on="all",
            normal=normal, return_stats=("kept_count",))  # fmt: skip
    refused(ranks, 'screen: expected "none" in a group of ranks, got .fp8', logitless.UnsupportedError, on="all",
            normal=normal, screen="fp8")  # fmt: skip
    refused(ranks, "label_smoothing: expected 0 with sparsified gradients", on="all", normal=normal,
            label_smoothing=0.1, softcap=3.0)  # fmt: skip
    with pytest.raises(ValueError, match="batch_invariant"):
        call(ranks, data, **normal, batch_invariant=True)
