"""Several targets per row and logitless.linear_log_probs, beside PyTorch with all logits in memory."""

import itertools

import logitless
import logitless.numpy
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import lce

SHAPES = [((6, 5), 3), ((4,), 1), ((2, 3, 2), 64), ((1,), 7)]
VOCAB, DIM = 37, 8


def problem(rows, count, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    input = torch.randn(*rows, DIM, dtype=dtype, generator=generator)
    weight = torch.randn(VOCAB, DIM, dtype=dtype, generator=generator)
    bias = torch.randn(VOCAB, dtype=dtype, generator=generator)
    ids = torch.randint(0, VOCAB, (*rows, count), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -100
    if count > 1:
        ids[..., 1] = ids[..., 0]  # a repeated id
    probs = torch.rand(*rows, count, dtype=dtype, generator=generator)
    return [t.requires_grad_() for t in (input, weight, bias)], ids, probs


def loss_of(leaves, ids, probs, **options):
    input, weight, bias = leaves
    return lce(input, weight, ids, target_weight=probs, bias=bias, **options)


def log_probs_of(leaves, ids, **options):
    return logitless.linear_log_probs(*leaves[:2], ids, bias=leaves[2], **options)


def reference(leaves, ids, scale=1.0, softcap=None, temperature=1.0):
    input, weight, bias = leaves
    logits = scale * (input @ weight.T) + bias
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, torch.Tensor) and temperature.dim() > 0:
        temperature = temperature[..., None]
    log_probs = F.log_softmax(logits / temperature, -1)
    return torch.where(ids == -100, 0, log_probs.gather(-1, ids.clamp(min=0)))


def close(got, expected, tolerance=1e-12):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def same_gradients(leaves, got, expected, tolerance=1e-12):
    for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves)):
        close(a, b, tolerance)


OPTIONS = [{}, {"scale": 0.5, "softcap": 3.0}, {"temperature": 0.7}, {"temperature": "rows"}]


@pytest.mark.parametrize("rows,count", SHAPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_log_probs(rows, count, options):
    leaves, ids, upstream = problem(rows, count)
    if options.get("temperature") == "rows":
        options = options | {"temperature": torch.rand(rows, dtype=torch.float64) + 0.5}
    got = log_probs_of(leaves, ids, **options)
    expected = reference(leaves, ids, **options)
    assert got.shape == ids.shape and got.dtype == torch.float64
    close(got, expected)
    same_gradients(leaves, (got * (upstream - 0.4)).sum(), (expected * (upstream - 0.4)).sum())


@pytest.mark.parametrize("rows,count", SHAPES)
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss(rows, count, reduction, smoothing):
    leaves, ids, probs = problem(rows, count)
    got = loss_of(leaves, ids, probs, reduction=reduction, label_smoothing=smoothing)
    log_probs = F.log_softmax(F.linear(*leaves), -1)
    dense = torch.zeros_like(log_probs).scatter_add(-1, ids.clamp(min=0), torch.where(ids == -100, 0, probs))
    valid = (ids != -100).any(-1)
    target = (1 - smoothing) * dense + smoothing / VOCAB
    expected = torch.where(valid, -(target * log_probs).sum(-1), 0)
    if reduction != "none":
        expected = expected.sum() / (valid.sum() if reduction == "mean" else 1)
    close(got, expected)
    same_gradients(leaves, got.sum(), expected.sum())


def test_is_pytorchs_cross_entropy_of_probabilities():
    leaves, _, _ = problem((9,), 5)
    ids = torch.stack([torch.randperm(VOCAB)[:5] for _ in range(9)])
    probs = torch.softmax(torch.randn(9, 5, dtype=torch.float64), -1)
    dense = torch.zeros(9, VOCAB, dtype=torch.float64).scatter_(1, ids, probs)
    for reduction, smoothing in itertools.product(("mean", "sum", "none"), (0.0, 0.2)):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        close(loss_of(leaves, ids, probs, **options), F.cross_entropy(F.linear(*leaves), dense, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype):
    """The error from float64 is at most twice that of whole logits, plus a rounding of the result."""
    leaves, ids, probs = problem((40,), 4, torch.float64)
    low = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    exact = [leaf.detach().double().requires_grad_() for leaf in low]
    truth = torch.autograd.grad(-(reference(exact, ids) * probs).sum(), exact)
    naive = torch.autograd.grad(-(reference(low, ids) * probs.to(dtype)).sum(), low)
    got = torch.autograd.grad(loss_of(low, ids, probs.float(), reduction="sum"), low)
    log_probs = log_probs_of(low, ids)
    assert log_probs.dtype == torch.float32
    again = torch.autograd.grad((log_probs * -probs.float()).sum(), low)
    for mine, mine_again, theirs, right in zip(got, again, naive, truth):
        allowed = 2 * (theirs - right).abs().max() + torch.finfo(dtype).eps * right.abs().max()
        assert (mine - right).abs().max() <= allowed
        assert (mine_again - right).abs().max() <= allowed


def test_statistics():
    leaves, ids, probs = problem((2, 3), 4)
    out, rows = loss_of(leaves, ids, probs, return_stats=True), torch.arange(6.0).reshape(2, 3)
    assert out.correct_count is None and out.is_top1 is None and int(out.valid_count) == 6
    expected = -(reference(leaves, ids) * torch.where(ids == -100, 0, probs)).sum(-1)
    close(out.nll, expected)
    same_gradients(leaves, (out.nll * rows).sum(), (expected * rows).sum())
    for name in ("correct_count", "is_top1"):
        with pytest.raises(ValueError, match=f"return_stats: expected no {name} with several targets"):
            loss_of(leaves, ids, probs, return_stats=(name,))


def test_shift_moves_targets_with_their_weights():
    leaves, ids, probs = problem((2, 5), 3)
    got = loss_of(leaves, ids, probs, shift=1, reduction="none")
    inner = loss_of([leaves[0][:, :-1], *leaves[1:]], ids[:, 1:], probs[:, 1:], reduction="none")
    close(got[:, :-1], inner)
    assert (got[:, -1] == 0).all()


def test_knowledge_of_a_teachers_largest():
    """The loss uses the ids of linear_top_k; its gradient is that of the divergence over these."""
    leaves, _, _ = problem((5,), 1)
    teacher = torch.randn(VOCAB, DIM, dtype=torch.float64)
    top = logitless.linear_top_k(leaves[0].detach(), teacher, 8)
    probs = top.log_probs.exp()
    loss = loss_of([*leaves[:2], None], top.ids, probs, reduction="sum")
    log_probs = F.log_softmax(leaves[0] @ leaves[1].T, -1).gather(-1, top.ids)
    divergence = (probs * (top.log_probs - log_probs)).sum()
    same_gradients(leaves[:2], loss, divergence)


def test_numpy():
    leaves, ids, probs = problem((2, 5), 3)
    arrays = [leaf.detach().numpy() for leaf in leaves]
    got = logitless.numpy.linear_log_probs(arrays[0], arrays[1], ids.numpy(), bias=arrays[2], softcap=4.0)
    np.testing.assert_allclose(got, reference(leaves, ids, softcap=4.0).detach().numpy(), rtol=1e-12, atol=1e-12)
    for reduction in ("sum", "none"):
        options = {"bias": arrays[2], "target_weight": probs.numpy(), "reduction": reduction, "gradients": True}
        result = logitless.numpy.linear_cross_entropy(*arrays[:2], ids.numpy(), **options)
        loss = -(reference(leaves, ids) * torch.where(ids == -100, 0, probs)).sum(-1)
        np.testing.assert_allclose(result.loss, (loss.sum() if reduction == "sum" else loss).detach(), rtol=1e-12)
        gradients = result.d_hidden, result.d_weight, result.d_bias
        for got, expected in zip(gradients, torch.autograd.grad(loss.sum(), leaves)):
            np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cuda(dtype):
    leaves, ids, probs = problem((130,), 5)
    low = [leaf.detach().to("cuda", dtype).requires_grad_() for leaf in leaves]
    # The exact leaves are on the CPU: even in float64 the naive computation rounds differently from the reference.
    exact = [leaf.detach().cpu().double().requires_grad_() for leaf in low]
    expected = reference(exact, ids)
    truth = [gradient.cuda() for gradient in torch.autograd.grad(-(expected * probs).sum(), exact)]
    ids, probs, expected = ids.cuda(), probs.cuda(), expected.cuda()
    unit = torch.finfo(dtype).eps
    log_probs = log_probs_of(low, ids)
    assert (log_probs - expected).abs().max() <= 64 * max(unit if dtype != torch.bfloat16 else 0, 2**-24)
    weights = probs if dtype == torch.float64 else probs.float()
    loss = loss_of(low, ids, weights, reduction="sum")
    naive = torch.autograd.grad(-(reference(low, ids) * probs.to(dtype)).sum(), low)
    for gradients in (torch.autograd.grad(loss, low), torch.autograd.grad((log_probs * -weights).sum(), low)):
        for mine, theirs, right in zip(gradients, naive, truth):
            assert (mine - right).abs().max() <= 2 * (theirs - right).abs().max() + unit * right.abs().max()
