"""batch_invariant: for one cut of the vocabulary a row has the same bits in any batch, with gradients and without."""

import logitless.distributed
import torch

from groups.group_cases import Data
from groups.target_cases import Targets

STATS = ("nll", "lse", "entropy")


def statistics(ranks, data, rows, needs_grad, **options):
    leaf = data.input[rows].clone().requires_grad_(needs_grad)
    out = logitless.distributed.linear_cross_entropy(
        leaf, data.weight[data.shard], data.target[rows], group=ranks.group, batch_invariant=True, softcap=20.0,
        **{"reduction": "none"} | options,
    )  # fmt: skip
    return out


def case_batch_invariant(ranks):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        data = Data(ranks, dtype, shape=(300,))
        expected = statistics(ranks, data, slice(None), False, return_stats=STATS)
        order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
        for count in (1, 7, 128, 300):
            rows = order[:count]
            for needs_grad in (False, True):
                for budget in (None, 1 << 20):
                    found = statistics(ranks, data, rows, needs_grad, return_stats=STATS, max_workspace_bytes=budget)
                    for name in ("loss", *STATS):
                        assert torch.equal(getattr(found, name), getattr(expected, name)[rows]), (name, count)
            alone = statistics(ranks, data, rows, False)
            assert torch.equal(alone, expected.loss[rows]), count
        together = statistics(  # gradients in the same run
            ranks, data, slice(None), True, return_stats=STATS, reduction="mean", differentiable_stats=False
        )
        assert torch.equal(together.nll, expected.nll)


def case_batch_invariant_log_probs(ranks):
    data = Targets(ranks, torch.float32, shape=(60,))

    def log_probs(rows):
        return logitless.distributed.linear_log_probs(
            data.input[rows], data.weight[data.shard], data.target[rows], group=ranks.group, batch_invariant=True
        )

    expected = log_probs(slice(None))
    for rows in (slice(3, 4), slice(20, 60)):
        assert torch.equal(log_probs(rows), expected[rows])
