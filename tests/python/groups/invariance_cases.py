"""batch_invariant: for one cut of the vocabulary a row has the same bits in any batch, with or without gradients."""

import torch

from groups.common import Data, Targets, call

STATS = ("nll", "lse", "entropy")


def statistics(ranks, data, rows, needs_grad, **options):
    leaf = data.input[rows].clone().requires_grad_(needs_grad)
    options = {"reduction": "none", "softcap": 20.0, "batch_invariant": True} | options
    return call(ranks, data, hidden=leaf, targets=data.target[rows], **options)


def case_batch_invariant(ranks):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        data = Data(ranks, dtype, shape=(300,))
        expected = statistics(ranks, data, slice(None), False, return_stats=STATS)
        order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
        for count in (1, 7, 128, 300):
            rows = order[:count]
            for needs_grad in (False, True):
                for budget in (None, 1 << 20):
                    result = statistics(ranks, data, rows, needs_grad, return_stats=STATS, max_workspace_bytes=budget)
                    for name in ("loss", *STATS):
                        assert torch.equal(getattr(result, name), getattr(expected, name)[rows]), (name, count)
            alone = statistics(ranks, data, rows, False)
            assert torch.equal(alone, expected.loss[rows]), count
        together = statistics(  # gradients in the same run
            ranks, data, slice(None), True, return_stats=STATS, reduction="mean", differentiable_stats=False
        )
        assert torch.equal(together.nll, expected.nll)


def case_batch_invariant_log_probs(ranks):
    data = Targets(ranks, torch.float32, shape=(60,))

    def log_probs(rows):
        given = {"hidden": data.input[rows], "ids": data.target[rows], "batch_invariant": True}
        return call(ranks, data, "linear_log_probs", **given)

    expected = log_probs(slice(None))
    for rows in (slice(3, 4), slice(20, 60)):
        assert torch.equal(log_probs(rows), expected[rows])
