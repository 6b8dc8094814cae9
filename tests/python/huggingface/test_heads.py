"""Heads of more than one linear layer, and heads whose weight is made at each use."""

import copy

import logitless.transformers
import peft
import pytest
import torch
from compare import Reference, check_patched, step
from logitless.errors import UnsupportedError
from precision import exact_step, rounded_step
from tiny import VOCAB, inputs
from torch import nn

pytestmark = pytest.mark.slow

WIDTH = 32  # of the tiny model


def narrow():
    return nn.Sequential(nn.Linear(WIDTH, 12, bias=False), nn.Linear(12, VOCAB, bias=False))


def transformed():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))


def wide():
    return nn.Sequential(nn.Linear(WIDTH, 2 * VOCAB), nn.ReLU(), nn.Linear(2 * VOCAB, VOCAB))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("make", [narrow, transformed, wide])
def test_a_head_of_two_linear_layers(llama, make, lora):
    llama.lm_head = make()
    model = llama
    if lora:
        names = [f"lm_head.{name}" for name, module in llama.lm_head.named_children() if isinstance(module, nn.Linear)]
        model = peft.get_peft_model(llama, peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False))
    check_patched(model, inputs(llama))


@pytest.mark.parametrize("check", [True, False])
def test_logits_that_another_layer_of_their_width_takes_are_refused(llama, check):
    """The vocabulary is as wide as the model: then nothing shows which layer makes logits."""
    llama.lm_head = nn.Sequential(nn.Linear(WIDTH, VOCAB), nn.Linear(VOCAB, VOCAB))
    logitless.transformers.patch(llama, check=check)
    with pytest.raises(UnsupportedError, match=r"linear\(\) with its logits"):
        llama(**inputs(llama))


@pytest.mark.parametrize("scale", [0, 0.0, torch.tensor(0.0)])
def test_logits_of_zero(llama, scale):
    llama.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, VOCAB))
    llama.lm_head.register_forward_hook(lambda module, args, out: out * scale + torch.linspace(0, 1, VOCAB))
    check_patched(llama)


@pytest.mark.parametrize(
    "normalise",
    [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm],
    ids=["spectral_norm", "spectral_norm as a hook", "weight_norm"],
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_weight_that_is_made_at_each_use(llama, normalise, precision):
    """In training each use of a spectral norm advances its power iteration: the self-check must not count as a use."""
    normalise(llama.lm_head)
    model, batch = llama.to(getattr(torch, precision)), inputs(llama)
    stock, fused = copy.deepcopy(model), logitless.transformers.patch(copy.deepcopy(model))
    for _ in range(3):
        if precision == "float32":
            rounded = tuple(rounded_step(stock, batch, seed) for seed in range(2))
            exact = exact_step(stock, batch)
            assert Reference(step(stock, batch), exact, rounded).share(step(fused, batch)) <= 1
        else:
            step(stock, batch)
            step(fused, batch)
        expected, state = stock.state_dict(), fused.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], value) for key, value in expected.items())
