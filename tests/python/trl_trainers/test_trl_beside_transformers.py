"""A model patched by logitless.transformers.patch in a trainer of TRL: the patch has no effect there and warns."""

import linecache
import sys
import types
import warnings

import logitless.transformers
import logitless.trl
import pytest
import torch
import transformers

pytestmark = pytest.mark.slow

IMPORTED, STEP = "logitless.transformers.patch: TRL is imported", "a trainer of TRL makes the loss of Llama"


def warnings_in(call):
    """Returns logitless's warnings in a call. Each points at the caller of the model or the patch: here, or in a
    trainer."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    own = [warning for warning in caught if str(warning.message).startswith("logitless.")]
    for warning in own:
        assert "trl/trainer/" in warning.filename or warning.filename == __file__, warning
    return [str(warning.message) for warning in own]


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


@pytest.mark.parametrize("first", [True, False], ids=["patched first", "patched in the trainer"])
@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "GRPO", "RLOO"])
def test_the_first_step_says_so_once_and_the_trainer_goes_on(trainer, name, first):
    stock = trainer(name)
    stock.train()
    made = trainer(name, logitless.transformers.patch if first else lambda model: model)
    if not first:
        (message,) = warnings_in(lambda: logitless.transformers.patch(made.model))
        assert message.startswith(IMPORTED) and "logitless.trl.patch()" in message
    (message,) = warnings_in(made.train)
    assert STEP in message and "logitless.trl.patch()" in message
    for entry, expected in zip(made.state.log_history, stock.state.log_history, strict=True):
        assert entry.get("loss") == expected.get("loss")


def test_the_line_of_the_user_who_calls_the_model_is_named(trainer):
    """The user's own trainer, which TRL calls, or code without a trainer calls the model."""
    import trl

    class Own(trl.SFTTrainer):
        def compute_loss(self, model, inputs, **options):
            batch = {key: value for key, value in inputs.items() if key != "labels"}
            return model(**batch, labels=inputs["labels"], fused_lm_head=True).loss  # here

    made = trainer("SFT", logitless.transformers.patch)
    made.__class__ = Own
    for call in (made.train, lambda: made.model(**next(iter(made.get_train_dataloader())), fused_lm_head=True)):
        made.model.__dict__["_logitless_patch"].warned = False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        (warning,) = [warning for warning in caught if STEP in str(warning.message)]
        assert warning.filename == __file__ and "fused_lm_head=True" in linecache.getline(__file__, warning.lineno)


def test_a_distillation_says_so(trainer, trainers, tmp_path):
    teacher = trainers.save(tmp_path / "teacher", "qwen3")
    made = trainer("Distillation", logitless.transformers.patch, {"teacher_model": teacher})
    (message,) = warnings_in(made.train)
    assert STEP in message


def test_a_trainer_that_asks_the_model_for_logits_says_so(trainer):
    """SFT runs with the user's own loss function."""

    def loss_of(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    made = trainer("SFT", logitless.transformers.patch, {"compute_loss_func": loss_of})
    (message,) = warnings_in(made.train)
    assert STEP in message


def test_adapters_and_compiled_code_do_not_hide_it(trainer):
    peft = pytest.importorskip("peft")
    made = trainer("SFT", logitless.transformers.patch, {"peft_config": peft.LoraConfig(target_modules=["q_proj"])})
    assert len(warnings_in(made.train)) == 1
    made = trainer("SFT", logitless.transformers.patch, torch_compile=True, torch_compile_backend="eager", max_steps=1)
    assert len(warnings_in(made.train)) == 1


@pytest.mark.parametrize("first", [True, False])
def test_with_the_patch_of_trl_there_is_nothing_to_say(trainer, first):
    logitless.trl.patch(max_workspace_bytes=1 << 20)
    trained = trainer("SFT")
    trained.train()

    def patch(model):
        return logitless.transformers.patch(model, max_workspace_bytes="1MiB")

    made = trainer("SFT", patch if first else lambda model: model)
    assert warnings_in(lambda: patch(made.model)) == [] and warnings_in(made.train) == []
    assert made.state.log_history[0]["loss"] == trained.state.log_history[0]["loss"]
    logitless.trl.unpatch()
    assert len(warnings_in(made.train)) == 1


def test_options_that_do_not_count_are_named(trainer):
    logitless.trl.patch()
    made = trainer("SFT", lambda model: logitless.transformers.patch(model, gradient="sparsified"))
    (message,) = warnings_in(made.train)
    assert STEP in message and "do not count here" in message and "sparsified" in message


def test_the_trainer_of_transformers_is_not_warned_of(trainers, tmp_path):
    """A user's own step without labels, and code without TRL, give no warning either."""
    model = trainers.make_model("llama")
    (message,) = warnings_in(lambda: logitless.transformers.patch(model))
    assert message.startswith(IMPORTED)
    data = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}]
    arguments = dict(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], save_strategy="no")
    for smoothing in (0.0, 0.1):  # smoothing takes the labels away
        made = transformers.Trainer(
            model=model,
            train_dataset=data,
            args=transformers.TrainingArguments(**arguments, label_smoothing_factor=smoothing),
        )
        assert warnings_in(made.train) == []
    assert warnings_in(lambda: model(input_ids=torch.arange(9)[None]).logits.sum().backward()) == []


def test_without_trl_patch_says_nothing(trainers, monkeypatch):
    for name in [name for name in sys.modules if name == "trl" or name.startswith("trl.")]:
        monkeypatch.delitem(sys.modules, name)
    assert warnings_in(lambda: logitless.transformers.patch(trainers.make_model("llama"))) == []
    monkeypatch.setitem(sys.modules, "trl", types.ModuleType("trl"))
    (message,) = warnings_in(lambda: logitless.transformers.patch(trainers.make_model("llama")))
    assert message.startswith(IMPORTED)
