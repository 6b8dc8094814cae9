"""``headroom.distributed.linear_cross_entropy``: the real one, or where it is not built a slow one of that contract.

The slow one gathers the shards (and, sequence parallel, the tokens) and computes the whole problem on every rank.
"""

import headroom
import torch
import torch.distributed as dist

try:
    from headroom.distributed import linear_cross_entropy  # noqa: F401

    IS_REAL = True
except ImportError:
    IS_REAL = False


class _Gathered(torch.autograd.Function):
    """Rows of all ranks; of the gradient, which is the same on all ranks, this rank's rows."""

    @staticmethod
    def forward(ctx, rows, group):
        counts = [None] * dist.get_world_size(group)
        dist.all_gather_object(counts, rows.shape[0], group=group)
        parts = [rows.new_zeros((max(counts), *rows.shape[1:])) for _ in counts]
        padded = torch.cat([rows, rows.new_zeros((max(counts) - rows.shape[0], *rows.shape[1:]))])
        dist.all_gather(parts, padded.contiguous(), group=group)
        ctx.start, ctx.count = sum(counts[: dist.get_rank(group)]), rows.shape[0]
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.start : ctx.start + ctx.count].contiguous(), None


def slow(input, weight_shard, target, *, group, vocab_start=None, vocab_total=None, sequence_parallel=False, **options):
    weight = _Gathered.apply(weight_shard, group)
    assert vocab_total in (None, weight.shape[0])
    if options.get("linear_bias") is not None:
        options["linear_bias"] = _Gathered.apply(options["linear_bias"], group)
    if sequence_parallel:
        input = _Gathered.apply(input, group)
    return headroom.linear_cross_entropy(input, weight, target, **options)


def install():
    """Makes the slow one take the place of one that is not built."""
    import headroom.distributed

    if not IS_REAL:
        headroom.distributed.linear_cross_entropy = slow
