"""Models whose frozen head bitsandbytes or torchao has quantised, with and without LoRA on it."""

import copy

import logitless.transformers
import peft
import pytest
import torch
from logitless.errors import UnsupportedError
from tiny import VOCAB, inputs
from torch import nn

bnb = pytest.importorskip("bitsandbytes")
ao = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.slow

KINDS = {"int8": ao.Int8WeightOnlyConfig, "float8": ao.Float8WeightOnlyConfig, "bits8": None, "nf4": None}
WIDTH = 32  # of the tiny model; two rows share a block of 64


def quantise(model, kind):
    if KINDS[kind]:
        ao.quantize_(model, KINDS[kind](), filter_fn=lambda module, name: module is model.lm_head)
        return
    if kind == "bits8":
        head = bnb.nn.Linear8bitLt(WIDTH, VOCAB, bias=False, has_fp16_weights=False)
    else:
        head = bnb.nn.Linear4bit(WIDTH, VOCAB, bias=False, quant_type="nf4")
    head.load_state_dict(model.lm_head.state_dict())
    model.lm_head = head.to("cpu")


def step(model, batch):
    loss = model(**batch).loss
    loss.backward()
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach().double(), {name.replace(".base_layer", ""): grad for name, grad in grads.items()}


def with_lora(model):
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_head_trains_as_its_dequantised_one(llama, kind, lora):
    dense, batch = copy.deepcopy(llama), inputs(llama)
    llama.requires_grad_(lora is False)
    quantise(llama, kind)
    with torch.no_grad():
        dense.lm_head.weight.copy_(logitless.QuantizedWeight(llama.lm_head).rows(0, VOCAB, torch.float32))
    dense.requires_grad_(lora is False).lm_head.requires_grad_(False)
    if lora:
        llama, dense = with_lora(llama), with_lora(dense)
    exact_loss, exact = step(copy.deepcopy(dense).double(), batch)
    own_loss, own = step(dense, batch)
    loss, grads = step(logitless.transformers.patch(llama), batch)
    unit = torch.finfo(torch.float32).eps
    assert (loss - exact_loss).abs() <= 2 * (own_loss - exact_loss).abs() + 4 * unit * exact_loss.abs()
    assert grads.keys() == exact.keys()
    for name, gradient in exact.items():
        allowed = 2 * (own[name] - gradient).norm() + unit * gradient.norm()
        assert (grads[name] - gradient).norm() <= allowed, name


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_and_sixteen_bits(llama, kind):
    batch = inputs(llama.bfloat16())
    dense = copy.deepcopy(llama)
    quantise(llama, kind)
    with torch.no_grad():
        dense.lm_head.weight.copy_(logitless.QuantizedWeight(llama.lm_head).rows(0, VOCAB, torch.bfloat16))
        expected = dense(**batch).loss
    logitless.transformers.patch(llama, evaluate=True)
    with torch.no_grad():
        assert (llama(**batch).loss - expected).abs() <= 2**-8 * expected
    llama(**batch).loss.backward()
    assert all(p.grad is not None for name, p in llama.named_parameters() if "lm_head" not in name)


def test_trained_and_unknown_heads_are_refused(llama):
    llama.lm_head = bnb.nn.Linear8bitLt(WIDTH, VOCAB, bias=False, has_fp16_weights=True)
    with pytest.raises(UnsupportedError, match="trained Int8Params"):
        logitless.transformers.patch(llama)

    class Linear3bit(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden).round()

    llama.lm_head = Linear3bit(WIDTH, VOCAB)
    with pytest.raises(UnsupportedError, match="Linear3bit .quantised"):
        logitless.transformers.patch(llama)


def test_sparsified_gradients_are_refused(llama):
    quantise(llama, "int8")
    logitless.transformers.patch(llama, gradient="sparsified")
    with pytest.raises(UnsupportedError, match="gradient: expected its default with a QuantizedWeight"):
        llama(**inputs(llama))
