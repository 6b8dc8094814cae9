"""What every rank finds on CUDA, against the single-process head there and its float64."""

import logitless
import logitless.distributed
import pytest
import torch
import torch.distributed as dist

from groups.group_cases import OPTIONS, Data, assert_close, check, objective, of_whole
from groups.ranks import sizes
from groups.target_cases import Targets
from groups.top_k_cases import top_k

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = 600


class OnDevice:
    """Larger than what the CPU's cases have, and on the rank's device. Scaled, so that logits are of size 1."""

    width, times = 64, 41

    def __init__(self, ranks, dtype=torch.float32, seed=0, shape=(ROWS,)):
        super().__init__(ranks, dtype, seed, shape)
        self.weight /= 8
        for name, value in vars(self).items():
            if torch.is_tensor(value):
                setattr(self, name, value.to(ranks.device))


class CudaData(OnDevice, Data):
    pass


class CudaTargets(OnDevice, Targets):
    pass


def largest_logit(data):
    return (data.input.double() @ data.weight.double().T).abs().max()


def _make(name, options, dtype, kind=CudaData):
    def case(ranks):
        check(ranks, options, has_bias=name in ("plain", "statistics", "temperature"), dtype=dtype, kind=kind)

    case.sizes = (2, 3) if name in ("plain", "targets") else (2,)
    globals()[f"case_{name}_{str(dtype).removeprefix('torch.')}"] = case


for _dtype in DTYPES:
    for _name, _options in (OPTIONS | {"small_budget": {"max_workspace_bytes": 4 << 20}}).items():
        _make(_name, _options, _dtype)
    _make("targets", {"target_weight": "@target_weight"}, _dtype, CudaTargets)


@sizes(2, 3)
def case_sequence_parallel(ranks):
    for dtype in DTYPES[:2]:
        for reduction in ("mean", "none"):
            data = CudaData(ranks, dtype)
            options = {"reduction": reduction}
            truth, exact = of_whole(data.to(torch.float64), options, False)
            naive, rounded = of_whole(data, options, False)
            count = ROWS // ranks.size
            mine = slice(ranks.rank * count, (ranks.rank + 1) * count)
            leaf, shard = (t.clone().requires_grad_() for t in (data.input[mine], data.weight[data.shard]))
            loss = logitless.distributed.linear_cross_entropy(
                leaf, shard, data.target[mine], group=ranks.group, sequence_parallel=True, **options
            )
            objective(loss, data, reduction).backward()
            logit = max(1, largest_logit(data))
            assert_close("loss", loss, naive, truth, max(logit, truth.abs().max()), ranks)
            for name, got, part, i in (("input", leaf, mine, 0), ("weight", shard, data.shard, 1)):
                assert_close(name, got.grad, rounded[i][part], exact[i][part], logit * exact[i].abs().max(), ranks)


@sizes(2)
def case_log_probabilities(ranks):
    for dtype in DTYPES[:2]:
        data = CudaTargets(ranks, dtype)
        wide = data.to(torch.float64)
        found = []
        for of in (data, wide):
            leaves = [t.clone().requires_grad_() for t in (of.input, of.weight)]
            told = logitless.linear_log_probs(*leaves, data.target)
            (told * data.upstream_of_ids).sum().backward()
            found.append([told.detach(), *(leaf.grad for leaf in leaves)])
        leaf, shard = (t.clone().requires_grad_() for t in (data.input, data.weight[data.shard]))
        told = logitless.distributed.linear_log_probs(leaf, shard, data.target, group=ranks.group)
        (told * data.upstream_of_ids).sum().backward()
        for whole in found:
            whole[2] = whole[2][data.shard]
        for name, got, naive, truth in zip(("told", "input", "weight"), (told, leaf.grad, shard.grad), *found):
            assert_close(name, got, naive, truth, max(1, largest_logit(data)) * truth.abs().max(), ranks)


@sizes(2, 3)
def case_largest_logits(ranks):
    for dtype in DTYPES[:2]:
        data = CudaData(ranks, dtype)
        naive = logitless.linear_top_k(data.input, data.weight, 9)
        wide = data.to(torch.float64)
        exact = logitless.linear_top_k(wide.input, wide.weight, 9)
        got = top_k(ranks, data, 9)
        logit = 2 * largest_logit(data)
        assert_close("log_probs", got.log_probs, naive.log_probs, exact.log_probs, logit, ranks)
        # Rounded logits may be in another order: what the ids are worth in float64 is what the largest are.
        worth = logitless.linear_log_probs(wide.input, wide.weight, got.ids).to(got.log_probs.dtype)
        assert_close("ids", worth, naive.log_probs, exact.log_probs, logit, ranks)


@sizes(2)
def case_compiled(ranks):
    data = CudaData(ranks)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(hidden, shard, target):
        return logitless.distributed.linear_cross_entropy(hidden, shard, target, group=ranks.group)

    leaf, shard = (t.clone().requires_grad_() for t in (data.input, data.weight[data.shard]))
    step(leaf, shard, data.target).backward()
    truth, exact = of_whole(data.to(torch.float64), {}, False)
    naive, rounded = of_whole(data, {}, False)
    logit = max(1, largest_logit(data))
    assert_close("input", leaf.grad, rounded[0], exact[0], logit * exact[0].abs().max(), ranks)
    assert_close(
        "weight", shard.grad, rounded[1][data.shard], exact[1][data.shard], logit * exact[1].abs().max(), ranks
    )


@sizes(2)
def case_configurations_that_differ(ranks):
    """Every rank raises, and a call that is right works afterwards."""
    data, of_rank_1 = CudaData(ranks), ranks.rank == 1
    right = {"input": data.input, "weight_shard": data.weight[data.shard], "target": data.target}
    refusal = "target: expected" if of_rank_1 else "rank 1 of the group refused its arguments"
    for wrong, match in (
        ({"label_smoothing": 0.1}, "label_smoothing: expected the same on all ranks"),
        ({"input": data.input.bfloat16()}, "input: expected the same"),
        ({"target": data.target.double()}, refusal),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            logitless.distributed.linear_cross_entropy(**right | (wrong if of_rank_1 else {}), group=ranks.group)
        assert torch.isfinite(logitless.distributed.linear_cross_entropy(**right, group=ranks.group))


@sizes(2)
def case_a_target_out_of_range(ranks):
    data = CudaData(ranks)
    data.target[5] = data.vocab
    if ranks.device.type == "cuda":
        loss = logitless.distributed.linear_cross_entropy(
            data.input, data.weight[data.shard], data.target, group=ranks.group
        )
        assert torch.isnan(loss)


@sizes(2)
def case_hosts_do_not_wait_for_devices(ranks):
    """Where hosts compare beside NCCL, one comes back from a call that is known while its device has not begun."""
    if dist.get_backend(ranks.group) != "nccl":
        return
    data = CudaData(ranks)

    def call():
        shard = data.weight[data.shard]
        return logitless.distributed.linear_cross_entropy(data.input, shard, data.target, group=ranks.group)

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # cycles: about two seconds
    event.record()
    call()
    is_ahead = not event.query()
    torch.cuda.synchronize()
    assert is_ahead
