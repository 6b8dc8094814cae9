"""PEFT and the Trainer over a patched model."""

import copy

import logitless.transformers
import pytest
import torch
from compare import Reference, check_16_bits, step
from logitless.errors import UnsupportedError
from precision import exact_step
from tiny import VOCAB, inputs
from transformers import Trainer, TrainingArguments

pytestmark = pytest.mark.slow

peft = pytest.importorskip("peft")


def lora(model, **options):
    made = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6} | options))
    with torch.no_grad():  # B begins as 0, which would make A's gradient 0
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    return made


@pytest.mark.parametrize("first", [True, False], ids=["patch then PEFT", "PEFT then patch"])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},  # a frozen head
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "lm_head"], "use_rslora": True, "lora_bias": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "target_parameters": ["lm_head.weight"]},
        {"target_modules": ["q_proj", "lm_head"], "lora_alpha": 0},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    ],
    ids=[
        "frozen", "on the head", "on the head with bias", "saved", "on the head's weight", "at a scale of 0",
        "the embedding saved, tied", "the head saved, tied",
    ],
)  # fmt: skip
def test_adapters(llama, options, first):
    batch = inputs(llama)
    if "ensure_weight_tying" in options:
        llama.config.tie_word_embeddings = True
        llama.tie_weights()
    if first:
        logitless.transformers.patch(llama)
    model = lora(llama, **options)
    if not first:
        logitless.transformers.patch(model)
    fused, exact = step(model, batch), exact_step(model, batch)
    assert fused.outputs.logits is None
    reference = Reference.of(logitless.transformers.unpatch(model), batch)
    assert reference.share(fused) <= 1 and reference.share(exact) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adapters_of_another_dtype_than_the_head(llama, dtype):
    """PEFT keeps adapters in float32 beside a 16-bit model by default."""
    batch = inputs(llama)
    model = lora(llama.bfloat16(), target_modules=["lm_head"])
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.to(dtype)
    exact = step(copy.deepcopy(model).double(), batch)
    stock = step(model, batch)
    fused = step(logitless.transformers.patch(model), batch)
    assert all(gradient.dtype == dtype for gradient in fused.gradients.values())
    check_16_bits(fused, stock, exact)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"target_modules": ["lm_head"], "use_dora": True}, "head of LlamaForCausalLM has DoRA"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [1, 2]}}, "has trainable_token_indices"),
    ],
    ids=["DoRA", "trainable tokens"],
)
def test_adapters_that_are_refused_by_name(llama, options, name):
    model = lora(llama, **options)
    with pytest.raises(UnsupportedError, match=name):
        logitless.transformers.patch(model)
    assert model(**inputs(llama)).logits.shape[-1] == VOCAB


def training_arguments(folder, **options):
    pytest.importorskip("accelerate")
    quiet = dict(report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
    return TrainingArguments(output_dir=str(folder), **quiet, **options)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_sees_the_same_losses(llama, tmp_path, accumulation):
    torch.manual_seed(3)
    ids = torch.randint(3, VOCAB, (20, 12))
    data = [{"input_ids": row, "labels": torch.where(torch.arange(12) < n % 7, -100, row)} for n, row in enumerate(ids)]

    def losses(model):
        options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, learning_rate=1e-2)
        arguments = training_arguments(tmp_path, max_steps=5, logging_steps=1, seed=1, **options)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])
        assert trainer.model_accepts_loss_kwargs
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        assert trainer.predict(data[:4]).predictions.shape == (4, 12, VOCAB)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] + [evaluated]

    stock = losses(copy.deepcopy(llama))
    fused = losses(logitless.transformers.patch(llama))
    assert len(stock) == 6 and stock[0] != stock[4]
    assert max(abs(a - b) for a, b in zip(stock, fused, strict=True)) <= 1e-5


@pytest.mark.parametrize("between", [logitless.transformers.patch, logitless.transformers.unpatch])
def test_the_trainer_stays_in_16_bits(llama, tmp_path, between):
    """Its autocast surrounds the model's forward, and the model is not prepared a second time."""
    seen = set()
    llama.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, VOCAB, (4, 12))]
    arguments = training_arguments(tmp_path, max_steps=1, bf16=True)
    trainer = Trainer(logitless.transformers.patch(llama), arguments, train_dataset=data, eval_dataset=data)
    for run in (trainer.train, lambda: between(llama), trainer.evaluate, trainer.train):
        run()
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("hooks", [False, True])
def test_lora_around_a_fused_head_is_refused_a_loss(llama, hooks):
    llama.lm_head = logitless.nn.FusedHead.from_linear(llama.lm_head, shift=1, reduction="none")
    batch = inputs(llama)
    hidden = llama.model(batch["input_ids"]).last_hidden_state
    model = lora(llama, target_modules=["lm_head"])
    head = model.get_base_model().lm_head
    if hooks:
        head.register_forward_hook(lambda module, arguments, output: None)
        head.base_layer.register_forward_hook(lambda module, arguments, output: None)
    assert head(hidden).shape[-1] == llama.lm_head.weight.shape[0]
    with pytest.raises(logitless.UnsupportedError, match="FusedHead itself, got one of peft"):
        head(hidden, batch["labels"])
    head.base_layer(hidden, batch["labels"])


def test_lora_around_a_fused_head_has_its_loss_in_a_patched_model(llama):
    batch = inputs(llama)
    llama.lm_head = logitless.nn.FusedHead.from_linear(llama.lm_head, shift=1)
    model = lora(logitless.transformers.patch(llama), target_modules=["lm_head"])
    fused = step(model, batch)
    assert fused.outputs.logits is None
    assert Reference.of(logitless.transformers.unpatch(model), batch).share(fused) <= 1
