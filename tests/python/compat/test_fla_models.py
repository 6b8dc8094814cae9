"""Whole models of flash-linear-attention with logitless.compat.fla's criterion, beside the same loss in float64."""

import random

import pytest
import torch
import torch.nn.functional as F
from logitless.compat.fla import FusedLinearCrossEntropyLoss
from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 1003, "intermediate_size": 256}
MODELS = {
    "gla": ("GLAConfig", {"num_heads": 2, "fuse_cross_entropy": False, "fuse_linear_cross_entropy": True}),
    "gated_deltanet": (
        "GatedDeltaNetConfig",
        {"num_heads": 2, "head_dim": 64, "fuse_cross_entropy": False, "fuse_linear_cross_entropy": True},
    ),
    "kda": ("KDAConfig", {"num_heads": 2, "head_dim": 64}),
}


class PlainLoss(nn.Module):
    """A model's criterion over whole logits; ``dtype`` is the product's."""

    ignore_index = -100

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, hidden, labels, weight, bias=None):
        logits = F.linear(hidden.to(self.dtype), weight.to(self.dtype), None if bias is None else bias.to(self.dtype))
        at_least_float32 = torch.promote_types(self.dtype, torch.float32)
        return F.cross_entropy(logits.flatten(0, -2).to(at_least_float32), labels.flatten())


@pytest.fixture
def one_configuration(monkeypatch):
    """Limits Triton's autotuners to one configuration per kernel, because tuning a model takes minutes."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.prune_configs
    monkeypatch.setattr(
        Autotuner, "prune_configs", lambda self, kwargs: random.Random(0).sample(list(original(self, kwargs)), 1)
    )


def step(model, criterion, tokens, labels):
    """Returns the loss and the gradients of all parameters."""
    model.criterion = criterion
    model.zero_grad(set_to_none=True)
    loss = model(tokens, labels=labels).loss
    loss.backward()
    return {"loss": loss.detach().double()} | {name: p.grad.double() for name, p in model.named_parameters()}


def errors(got, truth):
    return {name: float((got[name] - exact).norm() / exact.norm()) for name, exact in truth.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_a_model_trains_as_with_float64_logits(name, tied, one_configuration):
    """The error is at most twice that of the plain loss of 16-bit logits, plus a rounding of 16-bit gradients."""
    models = pytest.importorskip("fla.models")
    from transformers import AutoModelForCausalLM

    config_name, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(models, config_name)(**SMALL, **options, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16).train()
    tokens = torch.randint(0, SMALL["vocab_size"], (2, 96), device="cuda")
    labels = tokens.clone()
    labels[0, :17] = -100
    try:
        truth = step(model, PlainLoss(torch.float64), tokens, labels)
    except RuntimeError as error:  # some versions of Triton miscompile the layers
        if "Please upgrade Triton" not in str(error):
            raise
        pytest.skip(str(error))
    plain = errors(step(model, PlainLoss(torch.bfloat16), tokens, labels), truth)
    ours = errors(step(model, FusedLinearCrossEntropyLoss(), tokens, labels), truth)
    assert set(ours) == set(truth) and len(truth) > 20
    for each, error in ours.items():
        assert error <= 2 * plain[each] + (2**-22 if each == "loss" else 2**-8), (each, error, plain[each])
