"""TRL's trainers, unpatched and patched: losses and metrics of 20 steps, and gradients beside float64."""

import logitless.trl
import pytest
import torch
from whole import WholeLogits, close, gradients

pytestmark = pytest.mark.slow

NUMBERS = 1e-5  # tolerance of losses, and of metrics in units of their size
TIMES = ("runtime", "per_second", "time")

TRAINERS = [
    ("SFT", "llama", {}),
    ("SFT", "gemma2", {"completion_only_loss": False}),
    ("SFT", "cohere", {}),
    ("SFT", "qwen3", {"gradient_accumulation_steps": 2}),
    ("DPO", "llama", {}),
    ("DPO", "gemma2", {"use_weighting": True}),
    ("KTO", "qwen3", {}),
    ("GRPO", "llama", {"num_iterations": 2, "temperature": 0.8}),
    ("GRPO", "gemma2", {"top_entropy_quantile": 0.5}),
    ("RLOO", "qwen3", {"num_iterations": 2}),
]


def name_of(value):
    return value if isinstance(value, str) else "-".join(value)


def recorded(made):
    """Returns the losses of all steps, and the log."""
    losses, compute_loss = [], made.compute_loss

    def compute(*args, **kwargs):
        loss = compute_loss(*args, **kwargs)
        losses.append(float(loss.detach()))
        return loss

    made.compute_loss = compute
    made.train()
    return losses, made.state.log_history


DISTILLATIONS = [
    ("Distillation", "llama", {"beta": 0.0}),
    ("Distillation", "gemma2", {"beta": 0.5, "temperature": 0.7}),
    ("Distillation", "cohere", {"beta": 1.0}),
]


@pytest.mark.parametrize(("name", "kind", "options"), TRAINERS + DISTILLATIONS, ids=name_of)
def test_losses_and_metrics(trainers, tmp_path, name, kind, options):
    """A distillation's teacher has another head."""
    folder = trainers.save(tmp_path / "model", kind)
    arguments = {"teacher_model": trainers.save(tmp_path / "qwen3", "qwen3")} if name == "Distillation" else {}
    stock, log = recorded(trainers.trainer(name, folder, tmp_path, arguments, **options))
    logitless.trl.patch(max_workspace_bytes=1 << 20)
    fused, fused_log = recorded(trainers.trainer(name, folder, tmp_path, arguments, **options))
    assert len(fused) == len(stock) == trainers.STEPS * options.get("gradient_accumulation_steps", 1)
    assert len(set(stock)) > 1
    worst = max(abs(a - b) for a, b in zip(fused, stock, strict=True))
    print(f"{name} {kind}: losses within {worst:.1e}")
    assert worst <= NUMBERS
    for a, b in zip(fused_log, log, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            if not any(part in key for part in TIMES):
                assert a[key] == pytest.approx(b[key], rel=NUMBERS, abs=NUMBERS, nan_ok=True), key


@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO"])
def test_adapters(trainers, tmp_path, name):
    """The head is frozen, and the reference model is the one without adapters."""
    peft = pytest.importorskip("peft")
    folder = trainers.save(tmp_path / "model", "llama")
    config, losses = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]), []
    for patched in (False, True):
        if patched:
            logitless.trl.patch()
        losses.append(recorded(trainers.trainer(name, folder, tmp_path, {"peft_config": config}, max_steps=5))[0])
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=NUMBERS)


@pytest.mark.parametrize(("name", "kind", "options"), TRAINERS, ids=name_of)
def test_gradients_of_the_first_loss(trainers, tmp_path, monkeypatch, name, kind, options):
    """Errors are at most twice TRL's in the same precision, plus a rounding unit; models in float64 decide."""
    import trl.trainer.utils

    folder = trainers.save(tmp_path / "model", kind)
    made = trainers.trainer(name, folder, tmp_path, **options | {"max_steps": 1})
    compute_loss, results = made.compute_loss, []

    def compute(model, *args, **kwargs):
        def loss_of():
            return compute_loss(model, *args, **kwargs)

        stock = gradients(loss_of, model)
        logitless.trl.patch(max_workspace_bytes=1 << 20)
        fused = gradients(loss_of, model)
        logitless.trl.unpatch()
        models = [each for each in (model, getattr(made, "ref_model", None)) if each is not None]
        with monkeypatch.context() as patched:
            patched.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", WholeLogits)
            for each in models:
                each.double()
            results.append((stock, fused, gradients(loss_of, model)))
            for each in models:
                each.float()
        return loss_of()

    made.compute_loss = compute
    made.train()
    check_gradients(*results[0])


def check_gradients(stock, fused, exact):
    assert fused.keys() == stock.keys() == exact.keys()
    assert any(not torch.equal(fused[name], stock[name]) for name in exact)  # the fused head was used
    for name, truth in exact.items():
        assert close(fused[name], stock[name], truth, 2.0**-24), name
