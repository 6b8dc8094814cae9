"""Gradients that come after the loss, from exp logits that the forward pass saved on CUDA."""

from __future__ import annotations

import logitless
import pytest
import torch
from logitless import linear_cross_entropy as lce
from logitless import linear_log_probs
from torch.utils.checkpoint import checkpoint

N, V, D = 512, 5000, 128
BYTES = N * V * 2


def make(dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(rows, D, device="cuda", generator=generator) for rows in (N, V))
    leaves = [(t / D**0.25).to(dtype).requires_grad_() for t in (hidden, weight)]
    targets = torch.randint(V, (N,), device="cuda", generator=generator)
    targets[::5] = -100
    return leaves, targets, torch.randn(N, device="cuda", generator=generator)


def losses(leaves, targets, **options):
    return lce(*leaves, targets, **{"reduction": "none", "max_workspace_bytes": "fastest", **options})


def exact(leaves, targets, upstream):
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    loss = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, targets, reduction="none")
    return torch.autograd.grad(loss, wide, upstream.double())


def error(got, true):
    return ((got.double() - true).norm() / true.norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_errors_are_those_of_gradients_that_are_computed_again(dtype):
    leaves, targets, upstream = make(dtype)
    true = exact(leaves, targets, upstream)
    saved, again = (
        torch.autograd.grad(losses(leaves, targets, recompute_logits=flag), leaves, upstream) for flag in (False, True)
    )
    for got, other, want in zip(saved, again, true):
        assert error(got, want) <= 1.5 * error(other, want) + torch.finfo(dtype).eps / 4


@pytest.mark.gpu
def test_exp_logits_live_until_the_backward_pass():
    leaves, targets, upstream = make()
    for recompute in (True, False):
        before = torch.cuda.memory_allocated()
        loss = losses(leaves, targets, recompute_logits=recompute)
        held = torch.cuda.memory_allocated() - before
        assert held < BYTES / 10 if recompute else held >= BYTES
        loss.backward(upstream)
        del loss
        for leaf in leaves:
            leaf.grad = None
        assert torch.cuda.memory_allocated() - before < BYTES / 10


@pytest.mark.gpu
def test_nothing_is_saved_without_gradients():
    leaves, targets, _ = make()
    with torch.no_grad():
        before = torch.cuda.memory_allocated()
        loss = losses(leaves, targets)
        assert torch.cuda.memory_allocated() - before < BYTES / 10
    assert not loss.requires_grad


@pytest.mark.gpu
def test_a_kept_graph_gives_equal_gradients_twice():
    leaves, targets, upstream = make()
    out = losses(leaves, targets, return_stats=("entropy",))
    for result in (out.loss, out.entropy):
        first, second = (torch.autograd.grad(result, leaves, upstream, retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second))
    both = torch.autograd.grad(out.loss, leaves, upstream, retain_graph=True)
    hidden = torch.autograd.grad(out.loss, leaves[0], upstream)
    torch.testing.assert_close(hidden[0], both[0])


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    leaves, targets, upstream = make()
    want = torch.autograd.grad(losses(leaves, targets), leaves, upstream)
    loss = checkpoint(lambda *leaves: losses(leaves, targets), *leaves, use_reentrant=reentrant)
    loss.backward(upstream)
    assert all(torch.equal(leaf.grad, gradient) for leaf, gradient in zip(leaves, want))


@pytest.mark.gpu
def test_saved_tensors_may_move_to_the_host_and_back():
    leaves, targets, upstream = make()
    want = torch.autograd.grad(losses(leaves, targets), leaves, upstream)
    with torch.autograd.graph.save_on_cpu():
        loss = losses(leaves, targets)
    got = torch.autograd.grad(loss, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.gpu
def test_a_budget_holds_for_saved_bytes_and_workspace_together():
    leaves, targets, upstream = make()
    want = torch.autograd.grad(losses(leaves, targets), leaves, upstream)
    for budget in (2 * BYTES, BYTES // 2, BYTES // 4):
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        got = torch.autograd.grad(losses(leaves, targets, max_workspace_bytes=budget), leaves, upstream)
        gradients = sum(t.numel() * t.element_size() for t in got)
        assert torch.cuda.max_memory_allocated() - base <= budget + gradients + (4 << 20)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


@pytest.mark.gpu
def test_batches_of_upstream_gradients():
    leaves, targets, upstream = make()
    loss = losses(leaves, targets)
    both = torch.stack([upstream, 2 * upstream])
    batch = torch.autograd.grad(loss, leaves, both, retain_graph=True, is_grads_batched=True)
    for index in range(2):
        one = torch.autograd.grad(loss, leaves, both[index], retain_graph=True)
        assert all(torch.equal(a[index], b) for a, b in zip(batch, one))


@pytest.mark.gpu
def test_log_probs_of_ids():
    leaves, _, _ = make()
    ids = torch.randint(V, (N, 3), device="cuda")
    ids[:, 2] = ids[:, 0]
    upstream = torch.randn(N, 3, device="cuda")
    options = {"max_workspace_bytes": "fastest"}
    got = torch.autograd.grad(linear_log_probs(*leaves, ids, **options), leaves, upstream)
    again = torch.autograd.grad(linear_log_probs(*leaves, ids, recompute_logits=True, **options), leaves, upstream)
    for a, b in zip(got, again):
        assert error(a, b.double()) < 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [None, BYTES // 2])
def test_compiled_code(budget):
    leaves, targets, upstream = make()
    want = torch.autograd.grad(losses(leaves, targets), leaves, upstream)
    compiled = torch.compile(lambda *leaves: losses(leaves, targets, max_workspace_bytes=budget), fullgraph=True)
    got = torch.autograd.grad(compiled(*leaves), leaves, upstream)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


@pytest.mark.gpu
def test_compiled_code_for_any_number_of_tokens_saves_nothing():
    leaves, targets, upstream = make()
    torch._dynamo.reset()
    compiled = torch.compile(lambda hidden, targets: losses((hidden, leaves[1]), targets), fullgraph=True, dynamic=True)
    for rows in (100, 300, 500):
        hidden = leaves[0].detach()[:rows].requires_grad_()
        got = torch.autograd.grad(compiled(hidden, targets[:rows]), hidden, upstream[:rows])
        want = torch.autograd.grad(losses((hidden, leaves[1]), targets[:rows]), hidden, upstream[:rows])
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * want[0].abs().max().item())


def test_the_plan_says_what_is_saved():
    sizes, options = (8192, 151936, 4096), {"dtype": "bf16", "device": "h100", "later": True}
    whole = logitless.plan(*sizes, **options)
    assert whole.cost_matmuls == 2 and whole.saved_bytes >= 2 * 8192 * 151936
    part = logitless.plan(*sizes, max_workspace_bytes="1GiB", **options)
    assert part.workspace_bytes + part.saved_bytes <= 1 << 30 and 2 < part.cost_matmuls < 3
    assert part.cached_columns > 0
    half = logitless.plan(*sizes, **options | {"dtype": "f16"})
    assert half.cost_matmuls == 2 and half.saved_bytes >= 8192 * (2 * 151936 + 151936 // 192)  # with exponents
    portable = logitless.plan(*sizes, **options | {"dtype": "f16"}, backend="cuda:portable")
    assert portable.cost_matmuls == 3 and portable.saved_bytes == 0
    assert logitless.plan(64, 1000, 32, later=True).saved_bytes == 0
    # An exact plan serves this head, and eager calls save its exp logits.
    assert logitless.plan(8192, 32000, 2048, gradient="sparsified", **options).cost_matmuls == 2
    with pytest.raises(ValueError, match="later: expected False without gradients"):
        logitless.plan(*sizes, gradients=(), **options)


def test_recompute_logits_must_be_a_bool():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    for value in (1, "yes", None):
        with pytest.raises(TypeError, match="recompute_logits: expected a bool"):
            lce(hidden, weight, torch.tensor([0, 1, 2]), recompute_logits=value)
        with pytest.raises(TypeError, match="recompute_logits: expected a bool"):
            linear_log_probs(hidden, weight, torch.tensor([[0], [1], [2]]), recompute_logits=value)
