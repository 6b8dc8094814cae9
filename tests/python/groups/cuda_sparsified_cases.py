"""Sparsified gradients of groups on CUDA.

A seed keeps different elements for each cut there. So the tests cover gradients that keep everything, repeatable bits,
and means over seeds.
"""

import logitless
import logitless.distributed
import torch

from groups.common import OPTIONS, add_cases, of_group, of_whole
from groups.cuda_cases import CudaData
from groups.ranks import sizes

KEEPS_ALL = {"gradient": "always-sparsified", "threshold": 1e-30}
SPARSIFIED = {"gradient": "always-sparsified", "threshold": 1 / 16}
KEPT = {name: OPTIONS[name] for name in ("plain", "smoothing", "token_weights", "temperature", "none")}

add_cases(globals(), KEPT, (torch.float32, torch.bfloat16), "sparsified_", ("plain",), kind=CudaData, **KEEPS_ALL)


@sizes(2)
def case_sparsified_seeds(ranks):
    data = CudaData(ranks)
    for options in (SPARSIFIED, SPARSIFIED | {"reduction": "none"}):  # gradients with the loss, and in a later pass
        by_seed = [of_group(ranks, data, options | {"seed": seed})[1] for seed in (3, 3, 4)]
        for one, same, other in zip(*by_seed):
            assert one is None or (torch.equal(one, same) and not torch.equal(one, other))
        torch.manual_seed(5)  # without a seed each rank draws its own
        drawn = [of_group(ranks, data, options)[1][0] for _ in range(2)]
        assert not torch.equal(*drawn)


@sizes(2)
def case_sparsified_is_unbiased(ranks):
    data = CudaData(ranks, shape=(64,))
    exact = of_whole(data.to(torch.float64), {})[1]
    every = [of_group(ranks, data, SPARSIFIED | {"seed": seed})[1] for seed in range(100)]
    # The weight's gradient is summed over the shard's rows, because few runs draw any single row.
    for truth, draws in (
        (exact[0], torch.stack([gradients[0] for gradients in every])),
        (exact[1][data.shard].sum(0), torch.stack([gradients[1].sum(0) for gradients in every])),
    ):
        allowed = 5 * draws.double().std(0) / len(every) ** 0.5 + 1e-6
        assert ((draws.double().mean(0) - truth).abs() <= allowed).all()


@sizes(2)
def case_sparsified_sequence_parallel_and_compiled(ranks):
    data = CudaData(ranks, torch.bfloat16)
    whole, shard_gradient = of_group(ranks, data, SPARSIFIED | {"seed": 6})[1][:2]
    mine = ranks.part(data)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(hidden, shard, target):
        return logitless.distributed.linear_cross_entropy(
            hidden, shard, target, group=ranks.group, sequence_parallel=True, seed=6, **SPARSIFIED
        )

    leaf, shard, _ = data.leaves(mine, data.shard)
    step(leaf, shard, data.target).backward()
    assert torch.equal(shard.grad, shard_gradient)
    torch.testing.assert_close(leaf.grad, whole[mine])
