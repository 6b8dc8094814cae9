"""Compares every rank on CUDA with the single-process head there and its float64."""

import logitless
import logitless.distributed
import pytest
import torch
import torch.distributed as dist

from groups import divergence_cases
from groups.common import (
    OPTIONS,
    Data,
    Targets,
    add_cases,
    assert_close,
    call,
    check,
    largest_logit,
    of_whole,
)
from groups.ranks import sizes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class OnDevice:
    """Data larger than those of the CPU's cases, on the rank's device, scaled for logits of size 1."""

    width, times = 64, 41

    def __init__(self, ranks, dtype=torch.float32, seed=0, shape=(600,)):
        super().__init__(ranks, dtype, seed, shape)
        self.weight /= 8
        self.__dict__ |= vars(self.map(lambda tensor: tensor.to(ranks.device)))


class CudaData(OnDevice, Data):
    pass


class CudaTargets(OnDevice, Targets):
    pass


add_cases(globals(), OPTIONS | {"small_budget": {"max_workspace_bytes": 4 << 20}}, DTYPES, kind=CudaData)
add_cases(globals(), {"plain": {"target_weight": "@target_weight"}}, DTYPES, "targets_", (), kind=CudaTargets)


@sizes(2, 3)
def case_sequence_parallel(ranks):
    for dtype in DTYPES[:2]:
        for reduction in ("mean", "none"):
            check(ranks, {"reduction": reduction}, dtype=dtype, kind=CudaData, own=True)


@sizes(2)
def case_log_probabilities(ranks):
    for dtype in DTYPES[:2]:
        check(ranks, {}, dtype=dtype, kind=CudaTargets, function="linear_log_probs")


@sizes(2, 3)
def case_largest_logits(ranks):
    for dtype in DTYPES[:2]:
        data = CudaData(ranks, dtype)
        wide = data.to(torch.float64)
        naive, exact = (logitless.linear_top_k(of.input, of.weight, 9).log_probs for of in (data, wide))
        got = call(ranks, data, "linear_top_k")
        logit = 2 * largest_logit(data)
        assert_close("log_probs", got.log_probs, naive, exact, logit, ranks)
        # Rounded logits may change the order. So the ids' logits in float64 are compared with the largest ones.
        worth = logitless.linear_log_probs(wide.input, wide.weight, got.ids).to(got.log_probs.dtype)
        assert_close("ids", worth, naive, exact, logit, ranks)


@sizes(2, 3)
def case_divergences(ranks):
    for dtype in DTYPES:
        for beta, reduction in ((0.0, "mean"), (0.4, "none"), (1.0, "sum")):
            case = divergence_cases.make(ranks, dtype=dtype, beta=beta, reduction=reduction)
            divergence_cases.check(ranks, case)
            case.options["mask"] = torch.arange(divergence_cases.ROWS) % 3 != 0
            divergence_cases.check(ranks, case, max_workspace_bytes=60_000)


@sizes(2)
def case_compiled(ranks):
    data = CudaData(ranks)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(hidden, shard, target):
        return logitless.distributed.linear_cross_entropy(hidden, shard, target, group=ranks.group)

    leaf, shard, _ = data.leaves(columns=data.shard)
    step(leaf, shard, data.target).backward()
    _, exact = of_whole(data.to(torch.float64), {})
    _, rounded = of_whole(data, {})
    logit = max(1, largest_logit(data))
    for got, near, whole, part in zip((leaf.grad, shard.grad), rounded, exact, (slice(None), data.shard)):
        assert_close("gradient", got, near[part], whole[part], logit * whole.abs().max(), ranks)


@sizes(2)
def case_configurations_that_differ(ranks):
    """Every rank raises, and a right call works afterwards."""
    data, of_rank_1 = CudaData(ranks), ranks.rank == 1
    refusal = "targets: expected" if of_rank_1 else "rank 1 of the group refused its arguments"
    for wrong, match in (
        ({"label_smoothing": 0.1}, "label_smoothing: expected the same on all ranks"),
        ({"hidden": data.input.bfloat16()}, "hidden: expected the same"),
        ({"targets": data.target.double()}, refusal),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            call(ranks, data, **wrong if of_rank_1 else {})
        assert torch.isfinite(call(ranks, data))


@sizes(2)
def case_a_target_out_of_range(ranks):
    data = CudaData(ranks)
    data.target[5] = data.vocab
    if ranks.device.type == "cuda":
        assert torch.isnan(call(ranks, data))


@sizes(2)
def case_hosts_do_not_wait_for_devices(ranks):
    """If hosts compare beside NCCL, a known call returns before its device has begun."""
    if dist.get_backend(ranks.group) != "nccl":
        return
    data = CudaData(ranks)
    for _ in range(3):
        call(ranks, data)
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # cycles: about two seconds
    event.record()
    call(ranks, data)
    is_ahead = not event.query()
    torch.cuda.synchronize()
    assert is_ahead
