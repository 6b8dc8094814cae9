"""Code that would see or change the gradient of the logits is an error, because that gradient never exists."""

import contextlib
import types

import logitless.transformers
import pytest
import torch
from compare import Reference, step
from logitless.errors import UnsupportedError
from tiny import build, inputs
from torch.nn import functional as F
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.slow


def tenth(module, grad_input, grad_output):
    return tuple(None if grad is None else grad * 0.1 for grad in grad_input)


def tenth_of_output(module, grad_output):
    return tuple(None if grad is None else grad * 0.1 for grad in grad_output)


@pytest.mark.parametrize(
    ("name", "part", "register"),
    [
        ("LlamaForCausalLM", "lm_head", lambda module: module.register_full_backward_hook(tenth)),
        ("LlamaForCausalLM", "lm_head", lambda module: module.register_full_backward_pre_hook(tenth_of_output)),
        ("LlamaForCausalLM", "lm_head", lambda module: module.register_backward_hook(tenth)),
        ("BertForMaskedLM", "cls", lambda module: module.register_full_backward_hook(tenth)),
    ],
)
def test_a_backward_hook_around_the_head_is_refused(name, part, register):
    model = logitless.transformers.patch(build(name))
    handle = register(model.get_submodule(part))
    with pytest.raises(UnsupportedError, match=f"{part} of {name} has a backward hook.*unpatch"):
        model(**inputs(model))
    handle.remove()
    assert model(**inputs(model)).logits is None


def test_a_backward_hook_of_all_modules_is_refused(llama):
    logitless.transformers.patch(llama)
    handle = register_module_full_backward_hook(lambda module, grad_input, grad_output: None)
    try:
        with pytest.raises(UnsupportedError, match="backward hooks of all modules.*LlamaForCausalLM"):
            llama(**inputs(llama))
        assert llama(input_ids=inputs(llama)["input_ids"]).logits is not None
    finally:
        handle.remove()


@pytest.mark.parametrize("part", ["model.norm", "model.layers.1", "model.layers.0.mlp.down_proj"])
def test_a_backward_hook_elsewhere_is_called(llama, part):
    seen, batch = [], inputs(llama)
    llama.get_submodule(part).register_full_backward_hook(lambda *gradients: seen.append(part) or tenth(*gradients))
    stock = Reference.of(llama, batch)
    seen.clear()
    assert stock.share(step(logitless.transformers.patch(llama), batch)) <= 1
    assert seen == [part]


class Tenth(torch.autograd.Function):
    @staticmethod
    def forward(context, logits):
        return logits * 1.0

    @staticmethod
    def backward(context, gradient):
        return gradient * 0.1


class TenthOfTheSame(Tenth):
    @staticmethod
    def forward(context, logits):
        return logits


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(context, logits, labels):
        return F.cross_entropy(logits, labels)

    @staticmethod
    def backward(context, gradient):
        raise AssertionError("never called")


def without_gradients(logits, labels):
    with torch.no_grad():
        logits = logits * 0.5
    return F.cross_entropy(logits, labels)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda logits, labels: F.cross_entropy(Tenth.apply(logits), labels), "mul.. without gradients"),
        (lambda logits, labels: F.cross_entropy(TenthOfTheSame.apply(logits), labels), "view_as"),
        (Loss.apply, "cross_entropy.. without gradients"),
        (without_gradients, "mul.. without gradients"),
    ],
    ids=["a function of the logits", "the same logits", "a loss", "no_grad"],
)
def test_an_autograd_function_and_no_grad_are_refused(llama, change, name):
    """The loss has another part with a gradient, so that no other error would occur."""

    def loss_function(logits, labels, vocab_size, **kwargs):
        loss = change(logits.view(-1, vocab_size), labels.clamp(min=0).view(-1))
        return loss + llama.lm_head.weight.square().sum()

    llama.loss_function = loss_function
    logitless.transformers.patch(llama)
    with pytest.raises(UnsupportedError, match=name):
        llama(**inputs(llama))


def test_without_gradients_the_same_operations_are_known(llama):
    batch = inputs(llama)
    logitless.transformers.patch(llama, evaluate=True)
    for mode in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        with mode():
            assert llama(**batch).logits is None


@pytest.mark.parametrize(
    "change",
    [
        lambda head, own: lambda hidden: own(Tenth.apply(hidden)),
        lambda head, own: lambda hidden: F.linear(hidden, head.weight.detach()),
        lambda head, own: types.MethodType(lambda self, hidden: F.linear(hidden, self.weight.detach()), head),
    ],
    ids=["a function of the hidden states", "a frozen weight", "a method"],
)
def test_a_forward_of_the_heads_own_is_refused(llama, change):
    """Such a forward makes the same logits with other gradients."""
    llama.lm_head.forward = change(llama.lm_head, llama.lm_head.forward)
    logitless.transformers.patch(llama)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has a forward of its own"):
        llama(**inputs(llama))
    assert llama(input_ids=inputs(llama)["input_ids"]).logits is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_head_in_a_checkpoint_has_its_gradients(llama, reentrant):
    """Under reentrant checkpoints the head first runs without gradients, and then makes logits."""

    class Checkpointed(torch.nn.Sequential):
        def forward(self, hidden):
            return checkpoint(super().forward, hidden, use_reentrant=reentrant)

    llama.lm_head = Checkpointed(llama.lm_head)
    batch = inputs(llama)
    reference = Reference.of(llama, batch)
    logitless.transformers.patch(llama)
    if reentrant:
        with pytest.raises(UnsupportedError, match="not made of the logits"):
            llama(**batch)
    else:
        assert reference.share(step(llama, batch)) <= 1
