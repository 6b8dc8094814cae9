"""The parallel heads of verl, SkyRL and Apple's Cut Cross Entropy by their names."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from client_oracle import check_values, on
from logitless.compat import cut_cross_entropy as cce
from logitless.compat import skyrl, verl

pytestmark = pytest.mark.slow

TOKENS, VOCAB, D = 252, 507, 123  # Apple's test sizes: ranks do not divide the vocabulary


def problem(dtype):
    generator = torch.Generator().manual_seed(3)
    hidden = (torch.randn(4, TOKENS // 4, D, generator=generator) / D**0.5).to(dtype)
    weight = torch.randn(VOCAB, D, generator=generator).to(dtype)
    target = torch.randint(0, VOCAB, (4, TOKENS // 4), generator=generator)
    target.view(-1)[torch.randperm(TOKENS, generator=generator)[: TOKENS // 5]] = -100
    return hidden, weight, target


def whole(part, counts):
    """Returns all ranks' rows."""
    padded = torch.cat([part, part.new_zeros((max(counts) - part.shape[0], *part.shape[1:]))])
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([p[:count] for p, count in zip(parts, counts, strict=True)])


def apple(mesh, dtype, reduce, z_loss):
    hidden, weight, target = (t.to(mesh.device_type) for t in problem(dtype))
    mine = cce.VocabParallelOptions.from_vocab(VOCAB, mesh.get_group(), reduce)
    shard = weight[mine.start : mine.stop].clone().requires_grad_()
    hidden.requires_grad_()
    outputs = cce.linear_cross_entropy(hidden, shard, target, vocab_parallel_options=mine, return_lse=True)
    loss = outputs[0] + cce.compute_z_loss(outputs[1], target) if z_loss else outputs[0]
    loss.backward()
    if not reduce:
        dist.all_reduce(hidden.grad)
    ranks = mesh.size()
    counts = [VOCAB // ranks + (rank < VOCAB % ranks) for rank in range(ranks)]
    return loss.detach(), hidden.grad, whole(shard.grad, counts)


def apple_alone(dtype, wide, z_loss):
    """Computes the same numbers by PyTorch."""
    hidden, weight, target = (t.to(wide).requires_grad_() if t.is_floating_point() else t for t in problem(dtype))
    logits = F.linear(hidden, weight).flatten(0, 1)
    loss = F.cross_entropy(logits, target.flatten())
    if z_loss:
        loss = loss + logits.logsumexp(-1)[target.flatten() >= 0].square().mean()
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


@on("four")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("reduce", "z_loss"), [(True, False), (True, True), (False, False)])
def test_apples_vocab_parallel_options(ranks, dtype, reduce, z_loss):
    """The error from float64 is as small as PyTorch's on one process in this dtype."""
    alone = [apple_alone(dtype, wide, z_loss) for wide in (dtype, torch.float64)]
    check_values(ranks(apple, dtype, reduce, z_loss), *alone)


def test_apples_ranges():
    for vocab, ranks in ((1023, 7), (2048, 8), (5, 8)):
        end = 0
        for rank in range(ranks):
            with patch.multiple("torch.distributed", get_rank=lambda _: rank, get_world_size=lambda _: ranks):  # noqa: B023
                made = cce.VocabParallelOptions.from_vocab(vocab)
            assert made.start == end and made.stop - made.start == vocab // ranks + (rank < vocab % ranks)
            end = made.stop
        assert end == vocab


def by_verl(mesh, dtype):
    hidden, weight, target = (t.to(mesh.device_type) for t in problem(dtype))
    weight, target = weight[:506], target.clamp(0, 505)
    shard = weight.chunk(mesh.size())[mesh.get_rank()].clone().requires_grad_()
    hidden.requires_grad_()
    log_probs, entropy = verl.linear_cross_entropy(hidden, shard, target, 1.5, "none", mesh.get_group())
    rows = torch.arange(1.0, log_probs.numel() + 1, device=hidden.device) / TOKENS
    ((log_probs * rows).sum() + (entropy * rows.flip(0)).sum()).backward()
    dist.all_reduce(hidden.grad)  # outside the kernel, like verl's own test
    return log_probs.detach(), entropy.detach(), hidden.grad, whole(shard.grad, [506 // mesh.size()] * mesh.size())


@on("two")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verls_group(ranks, dtype):
    made = []
    for wide in (dtype, torch.float64):
        hidden, weight, target = (t.to(wide) if t.is_floating_point() else t for t in problem(dtype))
        hidden, weight, target = hidden.requires_grad_(), weight[:506].requires_grad_(), target.clamp(0, 505)
        log_p = ((hidden.flatten(0, 1) @ weight.T) / 1.5).log_softmax(-1)
        log_probs = log_p.gather(1, target.reshape(-1, 1))[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        rows = torch.arange(1.0, log_probs.numel() + 1) / TOKENS
        ((log_probs * rows).sum() + (entropy * rows.flip(0)).sum()).backward()
        made.append((log_probs.detach(), entropy.detach(), hidden.grad, weight.grad))
    check_values(ranks(by_verl, dtype), *made)


def kept_ids(target):
    """Returns lists of ids that SkyRL has kept, which have the targets; two lists are empty."""
    generator = torch.Generator().manual_seed(5)
    support = torch.randint(0, VOCAB - 1, (*target.shape, 9), generator=generator).to(torch.int32)
    support[..., 4] = target
    support[0, :2] = support[1, :, 6:] = -1
    return support


def by_skyrl(mesh, dtype):
    hidden, weight, target = (t.to(mesh.device_type) for t in problem(dtype))
    weight, target = weight[:506], target.clamp(0, 505)
    shard = weight.chunk(mesh.size())[mesh.get_rank()].clone().requires_grad_()
    hidden.requires_grad_()
    support, start = kept_ids(target.cpu()).to(hidden.device), mesh.get_rank() * len(shard)
    scores = skyrl.sample_support_scores(
        hidden,
        target,
        support,
        vocab_start_index=start,
        vocab_end_index=start + len(shard),
        tp_group=mesh.get_group(),
        compute_entropy=True,
        entropy_requires_grad=True,
        lm_head_weight=shard,
        temperature=1.5,
    )
    rows = torch.arange(1.0, target.numel() + 1, device=hidden.device).reshape(target.shape) / TOKENS
    ((scores.logprobs * rows).sum() + (scores.entropy * rows.flip(0)).sum()).backward()
    dist.all_reduce(hidden.grad)  # as Megatron's copy of hidden states to the ranks does
    counts = [len(shard)] * mesh.size()
    return scores.logprobs.detach(), scores.entropy.detach(), hidden.grad, whole(shard.grad, counts)


@on("two")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_skyrls_group(ranks, dtype):
    made = []
    for wide in (dtype, torch.float64):
        hidden, weight, target = (t.to(wide) if t.is_floating_point() else t for t in problem(dtype))
        hidden, weight, target = hidden.requires_grad_(), weight[:506].requires_grad_(), target.clamp(0, 505)
        support = kept_ids(target)
        is_valid = (support >= 0).any(-1)
        z = hidden @ weight.T / 1.5
        kept = z.gather(-1, support.clamp(min=0).long()).masked_fill((support < 0) & is_valid[..., None], -torch.inf)
        log_p = kept.log_softmax(-1)
        sampled = z.gather(-1, target[..., None])[..., 0] - kept.logsumexp(-1)
        log_probs = torch.where(is_valid, sampled, 0)
        terms = log_p.exp() * torch.where(support >= 0, log_p, 0)
        entropy = torch.where(is_valid, -terms.sum(-1), 0)
        rows = torch.arange(1.0, target.numel() + 1).reshape(target.shape) / TOKENS
        ((log_probs * rows).sum() + (entropy * rows.flip(0)).sum()).backward()
        made.append((log_probs.detach(), entropy.detach(), hidden.grad, weight.grad))
    check_values(ranks(by_skyrl, dtype), *made)
