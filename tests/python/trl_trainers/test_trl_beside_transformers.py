"""A model with logitless.transformers.patch in a trainer of TRL: it trains fused, or an error names the trainer."""

import functools
import threading
import types

import logitless.transformers
import logitless.trl
import pytest
import torch
import transformers
from logitless.errors import UnsupportedError
from logitless.trl._divergence import Divergences
from logitless.trl._log_probs import LogProbs

pytestmark = pytest.mark.slow

NUMBERS = 1e-5  # tolerance of losses
BUDGET = 1 << 20
REMEDY = r"logitless\.transformers\.unpatch\(model\)"


def patch(model):
    return logitless.transformers.patch(model, max_workspace_bytes=BUDGET)


@pytest.fixture
def budgets(monkeypatch):
    """Lists the budgets of the fused calls, with their threads."""
    made = []

    def recorded(own):
        @functools.wraps(own)
        def fused(self, options, *args):
            made.append((threading.get_ident(), options["max_workspace_bytes"]))
            return own(self, options, *args)

        return fused

    for stand_in in (LogProbs, Divergences):
        monkeypatch.setattr(stand_in, "fused", recorded(stand_in.fused))
    return made


@pytest.fixture
def trainer(trainers, tmp_path):
    """Makes a trainer by name; its loaded model passes through a function first."""

    def make(name, change=lambda model: model, arguments=None, **options):
        folder = trainers.save(tmp_path / "model", "llama")
        model = change(transformers.AutoModelForCausalLM.from_pretrained(folder))
        return trainers.trainer(
            name, folder, tmp_path, {"model": model} | (arguments or {}), **{"max_steps": 2} | options
        )

    return make


def losses(made):
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


@pytest.mark.parametrize("first", [True, False], ids=["patched first", "patched in the trainer"])
@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "GRPO", "RLOO"])
def test_it_trains_fused_with_its_options(trainer, budgets, name, first):
    """Only the policy is patched. TRL's own head computes the log-probabilities of a reference model."""
    stock = losses(trainer(name))
    made = trainer(name, patch if first else lambda model: model)
    if not first:
        patch(made.model)
    assert losses(made) == pytest.approx(stock, rel=0, abs=NUMBERS)
    calls = {"SFT": 2, "DPO": 2, "KTO": 4, "GRPO": 2, "RLOO": 4}[
        name
    ]  # KTO's are also for its KL, RLOO's without gradients
    assert [budget for _, budget in budgets] == [BUDGET] * calls


def test_a_model_without_the_patch_keeps_its_head(trainers, budgets):
    """It is also so for a model that was patched before, and while others are in their steps."""
    import trl.trainer.utils

    def log_probs(model):
        return model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs

    def loop(index):
        for _ in range(50):
            results[index] = log_probs(models[index])

    ids = torch.arange(3, 40)[None]
    models = [trainers.make_model("llama") for _ in range(3)]
    for model in models:
        trl.trainer.utils.add_fused_lm_head(model)
    expected = log_probs(models[0])
    for index in (0, 1):
        logitless.transformers.patch(models[index], max_workspace_bytes=BUDGET + index)
    results, threads = {}, [threading.Thread(target=loop, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    of_thread = {thread.ident: BUDGET + index for index, thread in enumerate(threads[:2])}
    assert len(budgets) == 100 and all(of_thread[thread] == budget for thread, budget in budgets)
    assert torch.equal(results[2], expected)
    assert all(torch.allclose(results[index], expected, atol=NUMBERS) for index in range(2))
    logitless.transformers.unpatch(models[0])
    assert torch.equal(log_probs(models[0]), expected) and len(budgets) == 100


@pytest.mark.parametrize("first", [True, False])
def test_its_own_options_count_beside_the_patch_of_trl(trainer, budgets, first):
    """The reference model of DPO has those of logitless.trl.patch."""
    if first:
        logitless.trl.patch(max_workspace_bytes=BUDGET + 1)
    made = trainer("DPO", patch)
    if not first:
        logitless.trl.patch(max_workspace_bytes=BUDGET + 1)
    made.train()
    assert [budget for _, budget in budgets] == [BUDGET, BUDGET + 1] * 2
    logitless.trl.unpatch()
    made.train()
    assert [budget for _, budget in budgets][4:] == [BUDGET] * 2


def test_a_distillation_trains_fused(trainer, trainers, tmp_path, budgets):
    teacher = trainers.save(tmp_path / "teacher", "qwen3")
    stock = losses(trainer("Distillation", arguments={"teacher_model": teacher}))
    made = trainer("Distillation", patch, {"teacher_model": teacher})
    patch(made.teacher_model)  # no loss is computed of a teacher's logits
    assert losses(made) == pytest.approx(stock, rel=0, abs=NUMBERS)
    assert [budget for _, budget in budgets] == [BUDGET] * 2
    made = trainer(
        "Distillation", arguments={"teacher_model": patch(transformers.AutoModelForCausalLM.from_pretrained(teacher))}
    )
    assert losses(made) == stock and len(budgets) == 2


def test_a_distillation_of_adapters_is_refused(trainer, trainers, tmp_path):
    """TRL calls the layers below the model, so that the model with the patch is never called."""
    peft = pytest.importorskip("peft")
    arguments = {
        "teacher_model": trainers.save(tmp_path / "teacher", "qwen3"),
        "peft_config": peft.LoraConfig(target_modules=["q_proj"]),
    }
    made = trainer("Distillation", patch, arguments)
    with pytest.raises(
        UnsupportedError, match=rf"got trl\.trainer\.distillation_trainer, .*LlamaForCausalLM.*{REMEDY}"
    ):
        made.train()
    logitless.transformers.unpatch(made.model)
    made.train()


@pytest.mark.parametrize("name", ["CPO", "ORPO"])
def test_a_trainer_that_makes_logits_is_refused(trainer, name):
    """Evaluation makes them."""
    home = name.lower()
    made = trainer(name, patch, max_steps=1)
    made.evaluate(made.train_dataset)
    message = rf"got trl\.experimental\.{home}\.{home}_trainer, .*LlamaForCausalLM.*{REMEDY}"
    with pytest.raises(UnsupportedError, match=message):
        made.train()
    logitless.transformers.unpatch(made.model)
    made.train()


def test_a_compiled_trainer_that_makes_logits_is_refused(trainer):
    made = trainer("CPO", patch, max_steps=1, torch_compile=True, torch_compile_backend="eager")
    with pytest.raises(UnsupportedError, match=REMEDY):
        made.train()


def test_the_loss_of_gkd_is_refused(trainers):
    from trl.experimental.gkd import GKDTrainer

    inputs = {"input_ids": torch.arange(9)[None], "attention_mask": None}
    with pytest.raises(UnsupportedError, match=rf"got trl\.experimental\.gkd\.gkd_trainer, .*{REMEDY}"):
        GKDTrainer.compute_loss(None, patch(trainers.make_model("llama")), inputs)


def test_a_loss_function_of_logits_is_refused(trainer):
    def loss_of(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    made = trainer("SFT", patch, {"compute_loss_func": loss_of})
    with pytest.raises(UnsupportedError, match=rf"got trl\.trainer\.sft_trainer, .*{REMEDY}"):
        made.train()


def test_adapters_and_compiled_code(trainer, budgets):
    peft = pytest.importorskip("peft")
    trainer("SFT", patch, {"peft_config": peft.LoraConfig(target_modules=["q_proj"])}).train()
    trainer("SFT", patch, torch_compile=True, torch_compile_backend="eager").train()
    assert [budget for _, budget in budgets] == [BUDGET] * 4


def test_another_trl_is_refused_by_name(trainer, monkeypatch):
    import trl.trainer.utils

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, targets):
            raise NotImplementedError

    made = trainer("SFT", patch)
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Other)
    with pytest.raises(UnsupportedError, match=r"got _ChunkedLogProbFunction\(hidden, weight, targets\) of trl"):
        made.train()


def test_a_trl_that_does_not_call_its_function_is_refused(trainers):
    model = patch(trainers.make_model("llama"))

    def forward(self, input_ids, labels, fused_lm_head):
        return self.model(input_ids)

    model.forward = types.MethodType(forward, model)
    ids = torch.arange(3, 9)[None]
    with pytest.raises(UnsupportedError, match=REMEDY):
        model(input_ids=ids, labels=ids, fused_lm_head=True)


def test_without_a_trainer_of_trl_logits_are_made(trainers, tmp_path):
    """TRL is imported; the Trainer of transformers and a user's own step call the model without labels."""
    model = patch(trainers.make_model("llama"))
    data = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}]
    arguments = dict(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], save_strategy="no")
    for smoothing in (0.0, 0.1):  # smoothing takes the labels away
        transformers.Trainer(
            model=model,
            train_dataset=data,
            args=transformers.TrainingArguments(**arguments, label_smoothing_factor=smoothing),
        ).train()
    for call in (model, torch.compile(model, backend="eager", fullgraph=True)):
        call(input_ids=torch.arange(9)[None]).logits.sum().backward()
