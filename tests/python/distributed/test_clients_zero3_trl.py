"""ZeRO-3 under TRL's trainers, and whole trainers with a patch: skipped without DeepSpeed, and without a known TRL."""

import contextlib
import sys
from pathlib import Path

import logitless.transformers
import logitless.trl
import pytest
import torch
from test_clients_zero3 import (
    CONFIG,
    FREED,
    KEPT,
    batch_of,
    check,
    engine_of,
    exactly,
    gradients_of,
    language_model,
    needs_deepspeed,
    run,
    start,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trl_trainers"))
pytestmark = needs_deepspeed


def needs_trl():
    made = pytest.importorskip("trl")
    if made.__version__ not in logitless.trl._patch.KNOWN:
        pytest.skip(f"trl {made.__version__} is not known")
    return made


def loss_of_trl(model, rank, part, case):
    outputs = model(**batch_of(rank, part, case), fused_lm_head=True, num_items_in_batch=7)
    return outputs.loss + 0.1 * outputs.entropy.sum()


def of_trl(case):
    from trl.trainer.utils import add_fused_lm_head

    model = language_model(case)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    add_fused_lm_head(base, temperature=0.8, outputs=("log_probs", "entropy"))
    return model


def patched_trl(mesh, case, micro, zero):
    results = []
    for fused in (False, True):
        if fused:
            logitless.trl.patch()
        try:
            made = run(
                mesh, of_trl(case), lambda engine, part: loss_of_trl(engine, mesh.get_rank(), part, case), micro, zero
            )
        finally:
            logitless.trl.unpatch()
        results.append(made)
    return results


@pytest.mark.parametrize(("zero", "micro"), [(FREED, 1), (KEPT, 2)], ids=["freed", "kept"])
@pytest.mark.parametrize("case", ["plain", "tied", "bias", "frozen", "all ignored", "checkpointing"])
def test_log_probabilities_of_trl(two, monkeypatch, case, zero, micro):
    needs_trl()
    import trl.trainer.utils
    from whole import WholeLogits

    by_rank = two(patched_trl, case, micro, zero)
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", WholeLogits)
    check(by_rank, exactly(of_trl(case), loss_of_trl, case, micro))


def whole_when_it_is_read(mesh):
    """DeepSpeed notes parameters for the backward pass where it gathers them for a reader, so not here."""
    stock = run(mesh, of_trl("plain"), lambda engine, part: loss_of_trl(engine, mesh.get_rank(), part, "plain"))
    model = of_trl("plain")
    engine = engine_of(mesh, model)
    logitless.trl.patch()
    try:
        with start(mesh).zero.GatheredParameters(model.lm_head.weight):
            loss = loss_of_trl(engine, mesh.get_rank(), 0, "plain")
    finally:
        logitless.trl.unpatch()
    seen = model.lm_head.weight.numel()
    engine.backward(loss)
    return stock[0], gradients_of(model), seen


def test_a_weight_that_is_whole_when_it_is_read(two, monkeypatch):
    needs_trl()
    import trl.trainer.utils
    from whole import WholeLogits

    by_rank = two(whole_when_it_is_read)
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", WholeLogits)
    true = exactly(of_trl("plain"), loss_of_trl, "plain")
    for stock, fused, seen in by_rank:
        assert seen == 0, "the weight was not freed"
        check([((stock, None), (fused, None))], true)


def outside_of_the_engine(mesh):
    import trl.trainer.utils

    model = of_trl("plain")
    engine_of(mesh, model)
    weight, hidden = model.lm_head.weight, torch.ones(2, 32)
    logitless.trl.patch()
    try:
        with start(mesh).zero.GatheredParameters(weight):
            trl.trainer.utils._ChunkedLogProbFunction.apply(hidden, weight, None, torch.tensor([1, 2]), 1.0, 1 << 15)
    except NotImplementedError as error:
        return str(error)
    finally:
        logitless.trl.unpatch()
    return ""


def test_log_probabilities_outside_of_the_engine_are_refused(two):
    needs_trl()
    for message in two(outside_of_the_engine):
        assert message.startswith("weight: ") and message.endswith("got a loss outside")


@contextlib.contextmanager
def accelerate_with_gloo():
    """Lets accelerate use gloo with DeepSpeed, which it does not choose by itself."""
    import accelerate
    from transformers.integrations import deepspeed

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
        patch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        chosen = "gloo", accelerate.DistributedType.MULTI_CPU
        patch.setattr(accelerate.PartialState, "_prepare_backend", lambda *args, **kwargs: chosen)
        try:
            yield
        finally:
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            deepspeed.unset_hf_deepspeed_config()


def trainer_of_transformers(fused, folder, **options):
    import transformers

    arguments = transformers.TrainingArguments(eval_strategy="epoch", prediction_loss_only=True, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)  # partitioned from the start
    data = [{"input_ids": [2 + n % 7, 9, 30 + n, 1], "labels": [-100, 9, 30 + n, 1]} for n in range(24)]
    if fused:
        logitless.transformers.patch(model, evaluate=True)
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])


def trained(mesh, name, folder, teacher, output, zero):
    """Returns losses and gradient norms of some steps by the stock trainer and the patched one."""
    import trainers

    start(mesh)
    config = {key: value for key, value in CONFIG.items() if key.startswith("zero")} | {"zero_optimization": zero}
    config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    options = dict(deepspeed=config, use_cpu=False, optim="sgd", max_steps=3, learning_rate=0.1, logging_steps=1)
    options |= dict(gradient_accumulation_steps=2) if name in ("Trainer", "SFT") else {}
    options |= dict(output_dir=output, report_to=[], save_strategy="no", disable_tqdm=True)
    results = []
    for fused in (False, True):
        with accelerate_with_gloo():
            if name == "Trainer":
                made = trainer_of_transformers(fused, folder, **options)
            else:
                if fused:
                    logitless.trl.patch()
                given = {"teacher_model": teacher} if name == "Distillation" else {}
                made = trainers.trainer(name, folder, output, given, **options)
            try:
                made.train()
            finally:
                logitless.trl.unpatch()
            seen = [
                [entry[key] for key in ("loss", "eval_loss", "grad_norm") if key in entry]
                for entry in made.state.log_history
            ]
            results.append(seen)
    return results


OF_TRAINERS = {"Trainer": FREED, "SFT": KEPT, "DPO": FREED, "KTO": KEPT, "GRPO": FREED, "Distillation": KEPT}


@pytest.mark.parametrize(("name", "zero"), OF_TRAINERS.items(), ids=OF_TRAINERS)
def test_trainers(two, tmp_path, name, zero):
    if name != "Trainer":
        needs_trl()
    trainers = pytest.importorskip("trainers")
    folder, teacher = trainers.save(tmp_path / "llama", "llama"), trainers.save(tmp_path / "qwen3", "qwen3")
    for stock, fused in two(trained, name, folder, teacher, str(tmp_path), zero):
        assert len(stock) >= 3
        for a, b in zip(fused, stock, strict=True):
            assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
