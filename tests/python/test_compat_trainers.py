"""The log-probabilities of reinforcement learning's trainers beside float64, under their names."""

import pytest
import torch
import torch.nn.functional as F
from logitless.compat import openrlhf, prime_rl, verl

BATCH, TIME, VOCAB, HIDDEN = 3, 11, 157, 20
UNIT = 2.0**-24


def operands():
    return torch.randn(BATCH, TIME, HIDDEN), 0.4 * torch.randn(VOCAB, HIDDEN), torch.randint(VOCAB, (BATCH, TIME))


def whole(hidden, weight, labels, temperature, softcap=None, bias=None):
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, torch.Tensor) and temperature.numel() > 1:
        temperature = temperature.to(hidden.dtype).reshape(*labels.shape, 1)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def run(function, tensors, weights):
    """What the function returns, flat, and the gradients of its sum with weights, of the tensors."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    found = function(*leaves)
    loss = sum(
        (f.flatten() * w.flatten().to(f.dtype)[: f.numel()]).sum() for f, w in zip(found, weights) if f.requires_grad
    )
    return [f.detach().flatten() for f in found] + list(torch.autograd.grad(loss, leaves))


def check(function, reference, tensors):
    """No further from float64 than twice the same computation in float32 over whole logits, and a rounding unit."""
    weights = torch.randn(2, BATCH * TIME)
    fused, naive = run(function, tensors, weights), run(reference, tensors, weights)
    exact = run(reference, [t.double() for t in tensors], weights)
    for f, n, e in zip(fused, naive, exact, strict=True):
        assert f.dtype == torch.float32 and f.shape == e.shape
        error, bound, size = (float(torch.linalg.vector_norm(t)) for t in (f - e, n - e, e))
        assert error <= 2 * bound + UNIT * size


REDUCE = {"none": lambda t: t, "sum": torch.sum, "mean": torch.mean}


@pytest.mark.parametrize("reduction", ["none", "sum", "MEAN"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2, "each"])
def test_verl(reduction, temperature):
    hidden, weight, labels = operands()
    if temperature == "each":
        temperature = 0.5 + torch.rand(BATCH, TIME)

    def reference(hidden, weight):
        log_probs, entropy = whole(hidden, weight, labels, temperature)
        return REDUCE[reduction.lower()](log_probs), entropy

    def fused(hidden, weight):
        found = verl.linear_cross_entropy(hidden, weight, labels, temperature, reduction, None)
        assert found[0].shape == ((BATCH * TIME,) if reduction == "none" else ()) and found[1].shape == (BATCH * TIME,)
        return found

    check(fused, reference, [hidden, weight])


def test_verl_ignored_rows_and_flat_operands():
    hidden, weight, labels = operands()
    flat, every = hidden.reshape(-1, HIDDEN), labels.clone()
    labels[1, 2:5] = -100
    found = verl.linear_cross_entropy(hidden=flat, weight=weight, labels=labels.reshape(-1))
    expected = verl.linear_cross_entropy(hidden, weight, every)
    kept = labels.reshape(-1) != -100
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, torch.where(kept, b, 0.0))


def test_verl_refusals():
    hidden, weight, labels = operands()
    with pytest.raises(AssertionError, match="temperature must be a float"):
        verl.linear_cross_entropy(hidden, weight, labels, "hot")
    with pytest.raises(AssertionError, match="reduction must be a str"):
        verl.linear_cross_entropy(hidden, weight, labels, 1.0, 2)
    with pytest.raises(ValueError, match="Invalid reduction: max"):
        verl.linear_cross_entropy(hidden, weight, labels, 1.0, "max")
    with pytest.raises(ValueError, match="temperature"):
        verl.linear_cross_entropy(hidden, weight, labels, torch.ones(5))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
def test_verl_with_a_group_of_one(monkeypatch):
    hidden, weight, labels = operands()
    group = object()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda given: 1 if given is group else 0)
    alone = verl.linear_cross_entropy(hidden, weight, labels, 1.0, "none", group)
    assert torch.equal(alone[0], verl.linear_cross_entropy(hidden, weight, labels)[0])


@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("each", [True, False])
def test_prime_rl(each, softcap):
    hidden, weight, labels = operands()
    temperature = 0.5 + torch.rand(BATCH, TIME) if each else torch.tensor(0.8)
    if softcap is None:
        head = prime_rl.FusedOutputLinear(in_features=HIDDEN, out_features=VOCAB, chunk_size=64)
    else:
        sizes = dict(in_features=HIDDEN, out_features=VOCAB, chunk_size=64)
        head = prime_rl.GemmaFusedOutputLinear(**sizes, softcap=softcap)
    assert list(head.state_dict()) == ["weight"]

    def fused(hidden, weight):
        made = torch.func.functional_call(
            head, {"weight": weight}, (hidden,), dict(labels=labels, temperature=temperature)
        )
        assert made["logprobs"].shape == made["entropy"].shape == (BATCH, TIME)
        return made["logprobs"], made["entropy"]

    def reference(hidden, weight):
        return whole(hidden, weight, labels, temperature, softcap)

    check(fused, reference, [hidden, weight])


def test_prime_rl_wants_labels_and_temperature():
    hidden, _, labels = operands()
    head = prime_rl.FusedOutputLinear(HIDDEN, VOCAB)
    with pytest.raises(AssertionError, match="FusedOutputLinear requires labels"):
        head(hidden)
    with pytest.raises(AssertionError, match="FusedOutputLinear requires per-token temperatures"):
        head(hidden, labels)
    with pytest.raises(AssertionError, match="sampling_mask"):
        head(hidden, labels, torch.tensor(1.0), torch.ones(BATCH, TIME, VOCAB))


@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_openrlhf(temperature, softcap):
    hidden, weight, labels = operands()
    bias = torch.randn(VOCAB)
    options = dict(softcap=softcap, max_workspace_bytes=1 << 20)

    def fused(hidden, weight, bias):
        return openrlhf.log_probs_and_entropy_from_hidden(hidden, weight, labels, temperature, bias=bias, **options)

    def reference(hidden, weight, bias):
        return whole(hidden, weight, labels, temperature, softcap, bias)

    check(fused, reference, [hidden, weight, bias])
    alone = openrlhf.log_probs_from_hidden(hidden, weight, labels, temperature, bias=bias, **options)
    assert torch.equal(alone, fused(hidden, weight, bias)[0])
