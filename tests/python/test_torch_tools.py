"""Tools of PyTorch over the operators: batches of upstream gradients, and counts of FLOP."""

import logitless
import pytest
import torch
import torch.nn.functional as F
from test_autograd import head
from test_package import python
from torch.utils.flop_counter import FlopCounterMode

lce = logitless.linear_cross_entropy
pytestmark = pytest.mark.filterwarnings("ignore")


def by_grad(loss, leaves, batch):
    return torch.autograd.grad(loss, leaves, batch, is_grads_batched=True, retain_graph=True)


def by_vmap(loss, leaves, batch):
    return torch.vmap(lambda upstream: torch.autograd.grad(loss, leaves, upstream, retain_graph=True))(batch)


@pytest.mark.parametrize("batched", [by_grad, by_vmap])
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"reduction": "none", "gradient": "thinned"}], ids=str)
def test_batch_of_upstream_gradients(batched, options):
    input, weight, bias, target = head()
    scale = torch.tensor(0.5, requires_grad=True)
    leaves = (input, weight, bias, scale)
    loss = lce(input, weight, target, linear_bias=bias, scale=scale, **options)
    batch = torch.randn(3, *loss.shape)
    one_by_one = [torch.autograd.grad(loss, leaves, upstream, retain_graph=True) for upstream in batch]
    for found, expected in zip(batched(loss, leaves, batch), zip(*one_by_one)):
        assert torch.equal(found, torch.stack(expected))


@pytest.mark.parametrize("batched", [by_grad, by_vmap])
def test_batch_of_upstream_gradients_of_statistics(batched):
    input, weight, _, target = head()
    out = lce(input, weight, target, return_stats=["lse", "entropy"])
    for stat in (out.lse, out.entropy):
        batch = torch.randn(3, *stat.shape)
        found = batched(stat, (input, weight), batch)
        one_by_one = [torch.autograd.grad(stat, (input, weight), upstream, retain_graph=True) for upstream in batch]
        for f, e in zip(found, zip(*one_by_one)):
            assert torch.equal(f, torch.stack(e))


@pytest.mark.parametrize("batched", [by_grad, by_vmap])
def test_batch_into_main_grad_is_refused(batched):
    input, weight, _, target = head()
    loss = lce(input, weight, target, main_grad=torch.zeros(13, 6))
    with pytest.raises(NotImplementedError, match="main_grad: expected None with a batch of upstream gradients"):
        batched(loss, input, torch.ones(3))


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def stock(input, weight, target):
    F.cross_entropy(F.linear(input, weight), target, reduction="sum").backward()


PRODUCT = 2 * 9 * 13 * 6

FIRST_USE = """
import torch, logitless
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    logitless.linear_cross_entropy(torch.randn(4, 8), torch.randn(9, 8), torch.zeros(4, dtype=torch.int64))
assert counter.get_total_flops() == 2 * 4 * 9 * 8
"""


def test_flops_of_a_first_use():
    python(FIRST_USE)


@pytest.mark.parametrize("trained", [(True, True), (False, True), (True, False)], ids=str)
def test_flops_are_those_of_linear(trained):
    input, weight, _, target = head()
    input, weight = (t if on else t.detach() for t, on in zip((input, weight), trained))
    expected = flops(lambda: stock(input, weight, target))
    assert expected == PRODUCT * (1 + sum(trained))
    assert flops(lambda: lce(input, weight, target).backward()) == expected
    assert flops(lambda: lce(input.detach(), weight.detach(), target)) == PRODUCT
    later = flops(lambda: lce(input, weight, target, reduction="none").sum().backward())
    assert later == expected + PRODUCT  # logits once more


def test_flops_of_other_products():
    input, weight, bias, target = head()
    assert flops(lambda: lce(input, weight, target, main_grad=torch.zeros(13, 6)).backward()) == 4 * PRODUCT
    scale = torch.tensor(0.5, requires_grad=True)
    plain = input.detach(), weight.detach()
    assert flops(lambda: lce(*plain, target, scale=scale).backward()) == 2 * PRODUCT
    assert flops(lambda: lce(*plain, target, linear_bias=bias).backward()) == PRODUCT
    for reduction in ("mean", "none"):
        options = {"gradient": "thinned", "reduction": reduction}
        assert flops(lambda: lce(input, weight, target, **options).sum().backward()) == PRODUCT
