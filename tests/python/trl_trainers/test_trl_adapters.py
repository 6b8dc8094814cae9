"""TRL's trainers with an adapter on the head: gradients beside those of whole logits, in float32 and float64."""

import copy
import math

import logitless.transformers
import logitless.trl
import pytest
import torch
import transformers
from logitless.errors import UnsupportedError
from packaging import version
from whole import close, gradients, of_whole_head

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow

UNIT = 2.0**-24
LORA = {"target_modules": ["q_proj", "lm_head"]}
COPY = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
PARAMETER = {"target_modules": ["q_proj"], "target_parameters": ["lm_head.weight"]}
CASES = [
    ("SFT", "llama", LORA, {}),
    ("SFT", "gemma2", LORA, {"completion_only_loss": False}),
    ("SFT", "cohere", LORA, {"gradient_checkpointing": True}),
    ("SFT", "llama", LORA | {"lora_bias": True, "use_rslora": True}, {}),
    ("SFT", "qwen3", COPY, {}),
    ("SFT", "qwen3", LORA, {"torch_compile": True, "torch_compile_backend": "eager"}),
    ("SFT", "llama", PARAMETER, {}),
    ("DPO", "llama", LORA, {"use_weighting": True}),
    ("DPO", "qwen3", COPY, {}),
    ("KTO", "qwen3", LORA, {}),
    ("GRPO", "llama", LORA, {"num_iterations": 2, "temperature": 0.8}),
    ("GRPO", "gemma2", COPY | {"ensure_weight_tying": True}, {"top_entropy_quantile": 0.5}),
    ("RLOO", "qwen3", LORA, {}),
]


def config(**options):
    """Returns a configuration whose adapters are random, so that they change the model from the start."""
    return peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **copy.deepcopy(options))  # it changes lists


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(params=["trl", "transformers"])
def patched(request):
    """Loads a patched model, where the patch is one of a model, and else patches TRL."""

    def make(folder):
        if request.param == "transformers":
            return logitless.transformers.patch(load(folder), max_workspace_bytes="1MiB")
        logitless.trl.patch(max_workspace_bytes="1MiB")
        return load(folder)

    return make


def name_of(value):
    return value if isinstance(value, str) else "-".join(value)


@pytest.mark.parametrize(("name", "kind", "adapters", "options"), CASES, ids=name_of)
def test_gradients_of_the_first_loss(trainers, tmp_path, monkeypatch, patched, name, kind, adapters, options):
    """The reference model is the one whose adapter is disabled."""
    folder = trainers.save(tmp_path / "model", kind)
    arguments = {"model": patched(folder), "peft_config": config(**adapters)}
    made = trainers.trainer(name, folder, tmp_path, arguments, **options | {"max_steps": 1})
    compute_loss, results = made.compute_loss, []

    def compute(model, *args, **kwargs):
        def loss_of():
            return compute_loss(model, *args, **kwargs)

        results.append(gradients(loss_of, model))
        with monkeypatch.context() as patching:
            of_whole_head(patching)
            results.append(gradients(loss_of, model))
            model.double()
            results.append(gradients(loss_of, model))
            model.float()
        return loss_of()

    made.compute_loss = compute
    made.train()
    fused, plain, exact = results[:3]
    assert fused.keys() == plain.keys() == exact.keys()
    assert sum("lm_head" in key or "modules_to_save" in key for key in exact) == (
        1 if "modules_to_save" in adapters else 3 if "lora_bias" in adapters else 2
    )
    # A factor exp(log-prob - old log-prob) takes over the rounding of log-probs, which are about log V here. RLOO's are
    # those of whole completions.
    tokens = {"GRPO": 1, "RLOO": getattr(made.args, "max_completion_length", 0)}.get(name, 0)
    unit = UNIT * (1 + tokens * math.log(made.model.config.vocab_size))
    for key, truth in exact.items():
        assert truth.any() and close(fused[key], plain[key], truth, unit), key
    assert any(not torch.equal(fused[key], plain[key]) for key in exact)  # the fused head was used


@pytest.mark.parametrize("adapters", [LORA, COPY], ids=["LoRA", "copy"])
def test_a_disabled_adapter_and_a_second_one(trainers, tmp_path, patched, adapters):
    """DPO's reference policy is the model without its adapter, or an adapter named ref where training goes on."""
    folder = trainers.save(tmp_path / "model", "llama")
    plain = peft.get_peft_model(load(folder), config(**adapters))
    plain.save_pretrained(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(patched(folder), tmp_path / "adapter", is_trainable=True)
    made = trainers.trainer("DPO", folder, tmp_path, {"model": model}, max_steps=3)
    assert list(made.model.peft_config) == ["default", "ref"]
    made.train()
    ids = torch.arange(3, 40)[None]

    def compare(expected_of):
        with torch.no_grad():
            got = made.model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
            expected = expected_of(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        assert torch.allclose(got, expected, atol=1e-5)
        return expected

    trained = compare(made.model)
    made.model.set_adapter("ref")
    reference = compare(plain)
    with made.model.disable_adapter():
        base = compare(load(folder))
    made.model.set_adapter("default")
    assert torch.equal(compare(made.model), trained)
    assert not any(torch.allclose(a, b, atol=1e-3) for a, b in ((trained, reference), (reference, base)))


def losses(made):
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "GRPO", "RLOO"])
def test_losses(trainers, tmp_path, monkeypatch, patched, name):
    """SFT has dropout before the adapter on the head; other trainers switch it off."""
    folder, results = trainers.save(tmp_path / "model", "llama"), []
    for whole in (False, True):
        arguments = {"model": patched(folder), "peft_config": config(**LORA, lora_dropout=0.3)}
        made = trainers.trainer(name, folder, tmp_path, arguments, max_steps=5)
        with monkeypatch.context() as patching:
            if whole:
                of_whole_head(patching)
            results.append(losses(made))
    assert results[0] == pytest.approx(results[1], rel=0, abs=1e-5) and len(set(results[0])) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_autocast(trainers, monkeypatch, patched, tmp_path, dtype):
    """The adapters are float32, as those of PEFT are by default."""
    import trl.trainer.utils

    base = patched(trainers.save(tmp_path / "model", "llama")).to(dtype)
    model = peft.get_peft_model(base, config(**LORA))
    trl.trainer.utils.add_fused_lm_head(base)
    ids, upstream = torch.randint(3, 90, (2, 20)), torch.randn(2, 19)

    def loss_of():
        with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype != torch.float64):
            return (model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs * upstream).sum()

    fused = gradients(loss_of, model)
    of_whole_head(monkeypatch)
    plain = gradients(loss_of, model)
    model.double()
    exact = gradients(loss_of, model)
    for key, truth in exact.items():
        assert close(fused[key], plain[key], truth, 2.0**-8), key


def add_adapter(model, adapter):
    """Adds it by transformers' own function, of which 5.24 refuses the newest PEFT that there is, 0.21."""
    from transformers.integrations.peft import MIN_PEFT_VERSION

    if version.parse(peft.__version__) < version.parse(MIN_PEFT_VERSION):
        pytest.skip(f"model.add_adapter() needs PEFT {MIN_PEFT_VERSION}")
    model.add_adapter(adapter)


def test_an_adapter_without_a_peft_model(trainers, tmp_path, monkeypatch, patched):
    """TRL does not refuse it, and its own head leaves it out."""
    folder = trainers.save(tmp_path / "model", "llama")
    model = patched(folder)
    add_adapter(model, config(**LORA))
    made = trainers.trainer("SFT", folder, tmp_path, {"model": model}, max_steps=1)
    batch = next(iter(made.get_train_dataloader()))

    def loss_of():
        return made.compute_loss(made.model, batch)

    fused = gradients(loss_of, model)
    of_whole_head(monkeypatch)
    plain = gradients(loss_of, model)
    assert sum("lm_head.lora" in key for key in fused) == 2
    for key, expected in plain.items():
        assert torch.allclose(fused[key], expected, atol=1e-5), key


def test_a_distillation_without_a_peft_model(trainers, tmp_path):
    """The model whose head has the merged weight W + f B A says what B's gradient is, f times that of W times A'."""
    folder = trainers.save(tmp_path / "model", "llama")
    model, merged = logitless.transformers.patch(load(folder)), load(folder)
    add_adapter(model, config(target_modules=["lm_head"]))
    a, b = model.lm_head.lora_A["default"].weight, model.lm_head.lora_B["default"].weight
    factor, results = model.lm_head.scaling["default"], []
    merged.lm_head.weight.data += factor * b @ a
    for student, trained in ((model, b), (merged, merged.lm_head.weight)):
        arguments = {"model": student, "teacher_model": load(folder)}
        made = trainers.trainer("Distillation", folder, tmp_path, arguments, max_steps=1, learning_rate=0.0)

        def compute(*args, compute_loss=made.compute_loss, trained=trained, **kwargs):
            loss = compute_loss(*args, **kwargs)
            results.append((loss.detach(), *torch.autograd.grad(loss, trained, retain_graph=True)))
            return loss

        made.compute_loss = compute
        made.train()
    (loss, gradient), (expected, whole) = results
    assert torch.allclose(loss, expected, atol=1e-5) and torch.allclose(gradient, factor * whole @ a.T, atol=1e-5)


def test_refusals(trainers, tmp_path):
    """TRL refuses other adapters itself, and LoRA where it is not patched."""
    folder = trainers.save(tmp_path / "model", "llama")

    def make(model=folder, name="SFT", options=LORA, **more):
        arguments = {"model": model, "peft_config": config(**options) if options else None}
        return trainers.trainer(name, folder, tmp_path, arguments, max_steps=1, **more)

    refusal = "Applying a PEFT adapter to `lm_head` is not supported"
    with pytest.raises(ValueError, match=refusal):
        make()
    logitless.trl.patch()
    with pytest.raises(ValueError, match=refusal):
        make(options=LORA | {"use_dora": True})
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32=True` is not supported when the lm_head carries a PEFT"):
        make(name="GRPO", cast_lm_head_to_fp32=True)
    made = make()
    batch = next(iter(made.get_train_dataloader()))
    fused = made.compute_loss(made.model, batch)
    logitless.trl.unpatch()
    with pytest.raises(UnsupportedError, match=r"adapter.*expected logitless\.trl\.patch\(\)"):
        made.compute_loss(made.model, batch)
    logitless.transformers.patch(made.model)
    assert torch.equal(made.compute_loss(made.model, batch), fused)
    logitless.trl.unpatch()
    with pytest.raises(ValueError, match=refusal):
        make()


def test_a_head_with_a_forward_of_its_own_or_with_partitioned_weights_is_refused(trainers):
    import trl.trainer.utils

    base = trainers.make_model("llama")
    model = peft.get_peft_model(base, config(**LORA))
    logitless.transformers.patch(base)
    trl.trainer.utils.add_fused_lm_head(base)
    base.lm_head.forward = lambda hidden: hidden @ base.lm_head.weight.T
    ids = torch.arange(3, 9)[None]
    with pytest.raises(UnsupportedError, match="forward of its own"):
        model(input_ids=ids, labels=ids, fused_lm_head=True)
    base.lm_head.lora_A["default"].weight.ds_id = 3
    with pytest.raises(UnsupportedError, match="ZeRO-3"):
        model(input_ids=ids, labels=ids, fused_lm_head=True)
