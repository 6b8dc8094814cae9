"""Loss and gradients of tiny models equal those of the unpatched model, one class for each way to make logits."""

import inspect

import logitless.transformers
import pytest
from compare import Reference, check_16_bits, difference, step
from precision import exact_step
from tiny import build, inputs

pytestmark = pytest.mark.slow

FAMILIES = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Gemma2ForCausalLM": {"final_logit_softcapping": 2.0},
    "CohereForCausalLM": {"logit_scale": 0.25},
    "GraniteForCausalLM": {"logits_scaling": 8.0},
    "PhiForCausalLM": {},  # a bias
    "GPT2LMHeadModel": {},  # tied weights
    "MixtralForCausalLM": {"output_router_logits": True, "router_aux_loss_coef": 0.1},
    "RecurrentGemmaForCausalLM": {"logits_soft_cap": 2.0},
    "T5ForConditionalGeneration": {},
    "BartForConditionalGeneration": {},  # final_logits_bias
    "BertForMaskedLM": {},
    "BertLMHeadModel": {"is_decoder": True},
    "LlavaForConditionalGeneration": {},
    "EncoderDecoderModel": {},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_unpatched_model(name):
    model = build(name, **FAMILIES[name])
    batch = inputs(model)
    signature, reference = inspect.signature(model.forward), Reference.of(model, batch)
    stock = reference.stock

    assert logitless.transformers.patch(model, max_workspace_bytes=1 << 20) is model
    first, second = step(model, batch), step(model, batch)  # with the self-check and after it
    assert inspect.signature(model.forward) == signature
    assert reference.share(first) <= 1 and reference.share(second) <= 1
    assert reference.share(exact_step(model, batch)) <= 1
    assert first.outputs.logits is None and first.outputs["logits"] is None
    assert list(first.outputs) == list(stock.outputs)  # nothing replaces the logits by position either

    logitless.transformers.unpatch(model)
    assert "forward" not in model.__dict__
    assert difference(stock, step(model, batch)) == 0.0


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "CohereForCausalLM", "GraniteForCausalLM", "LlamaForCausalLM"])
def test_16_bit_models_are_as_close_to_float64_as_the_unpatched_model(name):
    model = build(name)
    batch = inputs(model)
    rounded = model.bfloat16()
    exact = step(build(name).bfloat16().double(), batch)
    stock = step(rounded, batch)
    fused = step(logitless.transformers.patch(rounded), batch)
    check_16_bits(fused, stock, exact)
