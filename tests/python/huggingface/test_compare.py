"""The measure detects an error of a thousandth in any tensor and in either precision."""

import logitless.transformers
import pytest
import torch
from compare import Reference, make_wrong, step
from precision import exact_step
from tiny import build, inputs

pytestmark = pytest.mark.slow

FAMILIES = ["LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration", "MixtralForCausalLM"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_thousandth_in_one_tensor_is_found(name):
    model = build(name)
    batch = inputs(model)
    reference = Reference.of(model, batch)
    logitless.transformers.patch(model)
    for fused in (step(model, batch), exact_step(model, batch)):
        assert reference.share(fused) <= 1
        dtype = fused.gradients["shared.weight" if name.startswith("T5") else next(iter(fused.gradients))].dtype
        assert not reference.unseen(dtype)
        allowed, checked = reference.allowed(dtype), 0
        for key, gradient in fused.gradients.items():
            wrong = fused._replace(gradients=fused.gradients | {key: 1.001 * gradient})
            # A bias that the softmax cancels is 0 but for rounding.
            zero = float(gradient.abs().max()) <= 2 * allowed[key]
            assert zero or reference.share(wrong) > 1, key
            checked += not zero
        assert checked >= len(fused.gradients) - 2 * model.config.num_hidden_layers
        assert reference.share(fused._replace(loss=1.001 * fused.loss)) > 1


def test_what_is_missing_or_no_number_is_found(llama):
    batch = inputs(llama)
    reference = Reference.of(llama, batch)
    fused = step(logitless.transformers.patch(llama), batch)
    key = "lm_head.weight"
    rest = {name: gradient for name, gradient in fused.gradients.items() if name != key}
    assert reference.share(fused._replace(gradients=rest)) == float("inf")
    wrong = fused.gradients[key].clone()
    wrong[3, 5] = float("nan")
    assert reference.share(fused._replace(gradients=rest | {key: wrong})) == float("inf")


def test_a_reference_without_a_bound_is_refused(llama):
    with torch.no_grad():
        llama.lm_head.weight[3, 5] = float("nan")
    with pytest.raises(ArithmeticError, match="lm_head.weight"):
        Reference.of(llama, inputs(llama))


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("CohereForCausalLM", {"logit_scale": 0.25}),
        ("GraniteForCausalLM", {"logits_scaling": 8.0}),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 2.0}),
    ],
)
def test_a_thousandth_in_a_factor_of_the_logits_is_found(name, option, monkeypatch):
    model = build(name, **option)
    batch = inputs(model)
    reference = Reference.of(model, batch)
    assert reference.share_of(logitless.transformers.patch(model, check=False), batch) <= 1
    make_wrong(monkeypatch, 1.001)
    for run in (step, exact_step):
        assert reference.share(run(model, batch)) > 1
