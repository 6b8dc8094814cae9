"""Options that are numbers: tensors and other objects in their place, and a divisor of 0."""

import logitless
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import DEVICES, head, lce

NAMES = ["z_loss", "scale", "softcap", "label_smoothing", "num_items"]


@pytest.mark.parametrize("name", [*NAMES, "threshold"])
def test_tensors_are_numbers(name):
    input, weight, _, target = head()
    options = {"gradient": "sparsified", "seed": 1} if name == "threshold" else {}
    expected = lce(input, weight, target, **{name: 0.5}, **options)
    for tensor in (torch.tensor(0.5), torch.tensor([[0.5]], dtype=torch.float64)):
        assert torch.equal(lce(input, weight, target, **{name: tensor}, **options), expected)


class Changing:
    """A number whose value may change between calls."""

    def __float__(self):
        return float(self.value)


class ChangingInteger(Changing):
    def __index__(self):
        return self.value


@pytest.mark.parametrize("name", [*NAMES, "ignore_index", "shift"])
def test_objects_that_are_numbers_are_read_at_every_call(name):
    input, weight, _, target = head()
    values, option = ((0, 1), ChangingInteger()) if name in ("ignore_index", "shift") else ((0.25, 0.5), Changing())
    target[0] = 0
    for option.value in values:
        got, expected = (lce(input, weight, target, **{name: x}) for x in (option, option.value))
        assert torch.equal(got, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gradient", ["exact", "always-sparsified"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0), torch.tensor([0.0])], ids=str)
def test_num_items_of_nothing_divides_by_zero(zero, dtype, gradient, device):
    if device == "cuda" and dtype == torch.float64 and gradient != "exact":
        pytest.skip("only the CPU has sparsified gradients of float64")
    input, weight, _, target = head(dtype=dtype, device=device)
    zeros = [zero, zero.to(device)] if torch.is_tensor(zero) else [zero]
    for zero in zeros:
        for targets, expected in ((target, torch.inf), (torch.full_like(target, -100), torch.nan)):
            stock = F.cross_entropy(input @ weight.T, targets, reduction="sum") / 0
            loss = lce(input, weight, targets, num_items=zero, gradient=gradient)
            constant = lce(input.detach(), weight.detach(), targets, num_items=zero)
            for value in (loss, stock, constant):
                assert value.item() == expected or (expected != expected and value.isnan())
            for g in torch.autograd.grad(loss, (input, weight)):
                assert not g[1].isfinite().all() or (g == 0).all()


def test_num_items_of_nothing_in_numpy():
    input, weight, _, target = (t.detach().numpy() for t in head())
    for options in ({"num_items": 0}, {"num_items": 0, "gradients": True}):
        assert logitless.numpy.linear_cross_entropy(input, weight, target, **options).loss == np.inf
        nothing = np.full_like(target, -100)
        assert np.isnan(logitless.numpy.linear_cross_entropy(input, weight, nothing, **options).loss)
