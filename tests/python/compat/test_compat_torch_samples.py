"""logitless.compat.torch on the samples, references and error inputs of the installed torch.testing.

PyTorch tests its own function and module with them. Its test files are not in its wheel.
"""

import pytest
import torch
import torch.nn.functional as F
from exactness import check
from logitless.compat.torch import LinearCrossEntropyLoss, linear_cross_entropy

if getattr(F, "linear_cross_entropy", None) is None:
    pytest.skip("this PyTorch has no linear_cross_entropy", allow_module_level=True)
pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db  # noqa: E402
from torch.testing._internal.common_nn import linear_cross_entropy_loss_reference  # noqa: E402

OPERATORS = {op.variant_test_name or "plain": op for op in op_db if op.name == "nn.functional.linear_cross_entropy"}
MODULE = next(info for info in module_db if info.module_cls is torch.nn.LinearCrossEntropyLoss)
pytestmark = pytest.mark.slow
each_variant = pytest.mark.parametrize("variant", ["plain", "chunked", "chunked_none"])


def operands(sample):
    """Returns differentiable inputs in float64 by name, and the other arguments."""
    linear_weight, target = sample.args
    options = dict(sample.kwargs)
    leaves = {"input": sample.input, "linear_weight": linear_weight, "linear_bias": options.pop("linear_bias", None)}
    if target.is_floating_point():
        leaves["target"] = target
    else:
        options["target"] = target
    if options.get("weight") is not None:
        options["weight"] = options["weight"].float()
    return {name: leaf.detach() for name, leaf in leaves.items() if leaf is not None}, options


def reference(options, leaves):
    wide = {name: leaf.to(torch.promote_types(leaf.dtype, torch.float32)) for name, leaf in leaves.items()}
    given = {name: value for name, value in options.items() if name != "options"}
    if given.get("weight") is not None:
        given["weight"] = given["weight"].to(wide["input"].dtype)
    return linear_cross_entropy_loss_reference(**wide, **given)


@each_variant
def test_samples_of_the_function(variant):
    samples = list(OPERATORS[variant].sample_inputs("cpu", torch.float64))
    assert len(samples) > 10
    for sample in samples:
        leaves, options = operands(sample)
        check(
            lambda **made: linear_cross_entropy(**made, **options),
            lambda **made: reference(options, made),
            leaves,
            [torch.float64, torch.float32, torch.bfloat16],
        )


@each_variant
def test_gradients_of_the_function_beside_differences(variant):
    for sample in OPERATORS[variant].sample_inputs("cpu", torch.float64):
        leaves, options = operands(sample)
        names = list(leaves)

        def call(*values):
            return linear_cross_entropy(**dict(zip(names, values, strict=True)), **options)

        assert torch.autograd.gradcheck(call, [leaf.requires_grad_() for leaf in leaves.values()])


def test_refused_inputs_of_the_function():
    refused = list(OPERATORS["plain"].error_inputs("cpu"))
    assert len(refused) > 4
    for error in refused:
        with pytest.raises(error.error_type):
            linear_cross_entropy(error.sample_input.input, *error.sample_input.args, **error.sample_input.kwargs)


@pytest.mark.filterwarnings("ignore:.*LinearCrossEntropyOptions")
@pytest.mark.filterwarnings("ignore:.*linear_cross_entropy")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_samples_of_the_module(dtype):
    """Losses are compared with each sample's reference, gradients with PyTorch's module at its tolerance."""
    samples = MODULE.module_inputs_func(MODULE, device="cpu", dtype=dtype, requires_grad=True, training=True)
    assert len(samples) > 300
    for sample in samples:
        made = sample.constructor_input
        ours, theirs = (kind(*made.args, **made.kwargs) for kind in (LinearCrossEntropyLoss, MODULE.module_cls))
        theirs.load_state_dict(ours.state_dict())
        input, target = sample.forward_input.args
        got, expected = ours(input, target), theirs(input, target)
        torch.testing.assert_close(got, sample.reference_fn(ours, input, target), equal_nan=True)
        upstream = torch.rand_like(expected)
        grads = torch.autograd.grad(got, [input, *ours.parameters()], upstream)
        references = torch.autograd.grad(expected, [input, *theirs.parameters()], upstream)
        for grad, of_reference in zip(grads, references, strict=True):
            torch.testing.assert_close(grad, of_reference, equal_nan=True)


def test_refused_inputs_of_the_module():
    refused = MODULE.module_error_inputs_func(
        MODULE, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    assert len(refused) > 4
    for error in refused:
        sample = error.module_error_input
        made = sample.constructor_input
        if error.error_on is ModuleErrorEnum.CONSTRUCTION_ERROR:
            with pytest.raises(error.error_type):
                LinearCrossEntropyLoss(*made.args, **made.kwargs)
        else:
            module = LinearCrossEntropyLoss(*made.args, **made.kwargs)
            with pytest.raises(error.error_type):
                module(*sample.forward_input.args, **sample.forward_input.kwargs)
