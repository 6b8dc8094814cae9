"""logitless.LinearCrossEntropyLoss: its options and adapters. compat/test_compat_torch.py compares its values."""

import inspect

import logitless
import logitless.compat.quack
import logitless.compat.torch
import pytest
import torch
import torch.nn.functional as F

UPSTREAM = getattr(torch.nn, "LinearCrossEntropyLoss", None)
# PyTorch's names of arguments, and ours.
OURS = {"input": "hidden", "linear_weight": "weight", "target": "targets", "linear_bias": "bias"}
needs_upstream = pytest.mark.skipif(UPSTREAM is None, reason="this PyTorch has no nn.LinearCrossEntropyLoss")


@needs_upstream
def test_constructor_has_the_upstream_parameters():
    theirs = {
        "class_weight" if name == "weight" else name: parameter
        for name, parameter in inspect.signature(UPSTREAM).parameters.items()
    }
    ours = inspect.signature(logitless.LinearCrossEntropyLoss).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


@needs_upstream
def test_function_has_the_upstream_parameters():
    theirs = dict(inspect.signature(F.linear_cross_entropy).parameters)
    del theirs["options"]
    ours = inspect.signature(logitless.linear_cross_entropy).parameters
    names = ["class_weight" if name == "weight" else OURS.get(name, name) for name in theirs]
    assert list(ours)[: len(theirs)] == names


def test_options_and_call_arguments():
    model = logitless.LinearCrossEntropyLoss(
        5, 11, scale=0.5, softcap=4.0, z_loss=0.1, shift=1, max_workspace_bytes=10**8
    )
    input, target = torch.randn(2, 7, 5), torch.randint(0, 11, (2, 7))
    out = model(input, target, token_weight=torch.rand(2, 7), num_items=3, return_stats=["nll"])
    expected = logitless.linear_cross_entropy(
        input, model.linear.weight, target, scale=0.5, softcap=4.0, z_loss=0.1, shift=1, return_stats=["nll"]
    )
    assert torch.equal(out.nll, expected.nll)
    assert "softcap=4.0" in repr(model)


class Adapter(torch.nn.Module):
    """An adapter like PEFT's: calling it adds a product to the base layer's; its weight is the base layer's."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.product = base_layer, torch.nn.Linear(base_layer.in_features, base_layer.out_features)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, *arguments):
        return self.base_layer(*arguments) + self.product(arguments[0])


@pytest.mark.parametrize("make", [logitless.LinearCrossEntropyLoss, logitless.compat.torch.LinearCrossEntropyLoss])
def test_an_adapter_around_the_weight_is_refused(make):
    loss = make(5, 11)
    loss.linear = Adapter(loss.linear)
    with pytest.raises(logitless.UnsupportedError, match="linear: expected a torch.nn.Linear, got a .*Adapter"):
        loss(torch.randn(3, 5), torch.zeros(3, dtype=torch.int64))


def test_an_adapter_around_a_layer_that_is_a_loss_is_refused():
    loss = Adapter(logitless.compat.quack.LinearCrossEntropy(5, 11))
    with pytest.raises(logitless.UnsupportedError, match="LinearCrossEntropy itself, got one of .*Adapter"):
        loss(torch.randn(3, 5), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("name", ["scale", "class_weight", "weight"])
def test_an_option_of_the_module_is_no_argument_of_its_call(name):
    module = logitless.LinearCrossEntropyLoss(6, 13)
    with pytest.raises(TypeError, match=rf"^forward\(\) got an unexpected keyword argument '{name}'"):
        module(torch.randn(2, 6), torch.tensor([1, 2]), **{name: 2.0})
