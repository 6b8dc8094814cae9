"""The self-check of the first batch refuses errors of a hundredth in each precision, and passes what is right."""

import logitless.transformers
import pytest
import torch
from compare import make_wrong
from logitless.errors import UnsupportedError
from tiny import VOCAB, build, inputs
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.slow

MODELS = {
    "LlamaForCausalLM": {},
    "CohereForCausalLM": {"logit_scale": 0.0625},
    "GraniteForCausalLM": {"logits_scaling": 8.0},
    "Gemma2ForCausalLM": {"final_logit_softcapping": 2.0},
    "PhiForCausalLM": {},  # a bias
    "BartForConditionalGeneration": {},  # an added bias
}
PRECISIONS = ["bfloat16", "float16", "float32", "autocast"]


def tiny(name):
    model = build(name, **MODELS[name])
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: output * 1.5)
    return model


def run(model, precision):
    batch = inputs(model)
    if precision != "autocast":
        model.to(getattr(torch, precision))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        return logitless.transformers.patch(model)(**batch)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_right_passes(name, precision):
    assert torch.isfinite(run(tiny(name), precision).loss)


@pytest.mark.parametrize("wrong", [0.99, 1.01])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_a_factor_that_is_wrong_by_a_hundredth_is_refused(name, precision, wrong, monkeypatch):
    make_wrong(monkeypatch, wrong)
    model = tiny(name)
    with pytest.raises(UnsupportedError, match=f"{name} differs from the fused head's by"):
        run(model, precision)
    if precision == "float32":
        with pytest.raises(UnsupportedError):  # it raises again, because nothing was found right
            model(**inputs(model))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_bias_that_is_wrong_by_a_tenth_is_refused(precision, monkeypatch):
    make_wrong(monkeypatch, 1.1, "with_bias")
    with pytest.raises(UnsupportedError, match="differs from the fused head's by"):
        run(tiny("BartForConditionalGeneration"), precision)


class Changing(TorchFunctionMode):
    """Changes the head's product by a factor, like a mode that computes in 8 bits."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        linear = func is torch.nn.functional.linear and made.shape[-1] == VOCAB
        return made * self.factor if linear and type(made) is torch.Tensor else made


@pytest.mark.parametrize("wrong", [0.99, 1.01, 1.0])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_layer_that_is_not_its_product_is_refused(llama, precision, wrong):
    with Changing(wrong):
        if wrong == 1.0:
            assert torch.isfinite(run(llama, precision).loss)
        else:
            with pytest.raises(UnsupportedError, match="LlamaForCausalLM"):
                run(llama, precision)


class Counting(torch.nn.Module):
    """Has another weight at each use."""

    def __init__(self):
        super().__init__()
        self.uses = 0

    def forward(self, weight):
        self.uses += 1
        return weight * self.uses


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_weight_is_read_once(llama, precision):
    counting = Counting()
    torch.nn.utils.parametrize.register_parametrization(llama.lm_head, "weight", counting)
    counting.uses = 0
    assert torch.isfinite(run(llama, precision).loss)
    assert counting.uses == 1


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("factor", [1.0, 0.3, 30.0])
def test_two_heads_of_one_width_pass(llama, precision, factor):
    """Their products merge into one, with the factor between them rounded to 16 bits."""
    other = torch.nn.Linear(llama.lm_head.in_features, VOCAB, bias=False)
    both = torch.nn.Module()
    both.first, both.second = llama.lm_head, other
    both.forward = lambda hidden: both.first(hidden) + factor * both.second(hidden)
    llama.lm_head = both
    assert torch.isfinite(run(llama, precision).loss)
