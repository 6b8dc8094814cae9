"""Whole training steps at a tiny size on the CPU: python -m pytest bench/gpu"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import time

import pytest
import torch

import step_heads
from limits import Deadline
from step_heads import Head, changed_by, chosen_heads
from step_models import BY_NAME, Spec, Training, chosen_specs, sized
from step_record import ModelRow, StepRecord, StepRow, load_steps, plot_steps, render_steps
from step_rounds import ModelBench, fewer_configurations

STEPS = pathlib.Path(__file__).resolve().parents[1] / "steps.py"
pytest.importorskip("transformers")


def tiny(name: str) -> Spec:
    return sized(BY_NAME[name], True)


def bench(heads: list[Head], name: str = "llama-1b", seconds: float = 120.0) -> StepRecord:
    record = StepRecord(None, {})
    ModelBench(record, tiny(name), "cpu", 60.0, None).run(heads, 2, Deadline(time.monotonic(), seconds))
    return record


def rows(record: StepRecord) -> dict[str, StepRow]:
    return {row.head: row for row in record.steps}


def test_names_are_checked() -> None:
    assert [spec.name for spec in chosen_specs("gla-1.3b,llama-1b")] == ["llama-1b", "gla-1.3b"]
    assert {head.name for head in chosen_heads("liger")} == {"stock", "liger"}
    assert chosen_heads("all") == [head for head in step_heads.HEADS if not head.by_name]


def test_a_run_at_a_tiny_size_has_every_head_and_what_is_missing_says_so(tmp_path: pathlib.Path) -> None:
    models = ["gemma-270m", "gla-1.3b"]  # tied weights; flash-linear-attention
    words = ["--device", "cpu", "--models", ",".join(models), "--rounds", "2", "--minutes", "5"]
    words += ["--json", str(tmp_path / "a.json")]
    done = subprocess.run([sys.executable, STEPS, *words], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    record = load_steps(tmp_path / "a.json")
    assert [model.model for model in record.models] == models
    by_head = {row.head: row for row in record.steps if row.model == models[0]}
    assert by_head.keys() == {head.name for head in chosen_heads("all") if head.fla is not True}
    for row in by_head.values():
        if row.status == "ok":
            assert row.rounds == 2 and row.ms and row.ratio and row.tokens_per_second and not row.reason
        else:
            assert not row.ours or "logitless" in row.reason, row
            assert row.head != "stock" and row.reason
    assert "| stock |" in done.stdout and re.search(r"gla-1.3b: 2 x 24 tokens", done.stdout)
    shown = subprocess.run([sys.executable, STEPS, "--show", str(tmp_path / "a.json")], capture_output=True, text=True)
    assert shown.stdout.splitlines() == render_steps(record).splitlines()


def test_bad_words_are_refused() -> None:
    for words, message in (
        (["--models", "gpt-9"], "--models: expected all or names out of llama-1b, .*; got 'gpt-9'"),
        (["--heads", "nobody"], "--heads: expected all or names out of stock, .*; got 'nobody'"),
        (["--rounds", "0"], "--rounds: expected a number of at least 1, got 0"),
    ):
        done = subprocess.run([sys.executable, STEPS, "--device", "cpu", *words], capture_output=True, text=True)
        assert done.returncode == 2 and re.search(message, done.stderr)


def test_a_head_that_fails_has_a_row_and_the_others_go_on() -> None:
    calls = []

    def missing(model: object, tokens: torch.Tensor) -> step_heads.Loss:
        raise ModuleNotFoundError("No module named 'nobody'")

    def broken(model: object, tokens: torch.Tensor) -> step_heads.Loss:
        raise RuntimeError("does not know this model")

    def breaks_later(model: object, tokens: torch.Tensor) -> step_heads.Loss:
        def loss() -> torch.Tensor:
            calls.append(1)
            if len(calls) > 3:  # the rounds follow the check, memory and a first time
                raise RuntimeError("no more")
            return step_heads.stock(model, tokens)()

        return loss

    record = bench(
        [Head("missing", missing), Head("broken", broken), Head("later", breaks_later), *chosen_heads("stock")]
    )
    by_head = rows(record)
    assert (by_head["missing"].status, by_head["missing"].reason) == (
        "skipped",
        "ModuleNotFoundError: No module named 'nobody'",
    )
    assert (by_head["broken"].status, by_head["broken"].reason) == ("failed", "RuntimeError: does not know this model")
    assert (by_head["later"].status, by_head["later"].reason) == ("failed", "in round 0: RuntimeError: no more")
    assert by_head["stock"].status == "ok" and by_head["stock"].ratio == 1.0


def test_a_head_with_another_loss_or_gradient_says_so() -> None:
    def off(factor: float, shift: float) -> step_heads.Prepare:
        def prepare(model: object, tokens: torch.Tensor) -> step_heads.Loss:
            return lambda: factor * step_heads.stock(model, tokens)() + shift

        return prepare

    by_head = rows(bench([*chosen_heads("stock"), Head("shifted", off(1.0, 0.02)), Head("close", off(1.0, 0.001))]))
    assert re.fullmatch(r"its loss differs: 6\.\d{5}, the stock head's 6\.\d{5}", by_head["shifted"].reason)
    assert by_head["shifted"].status == by_head["close"].status == "ok" and not by_head["close"].reason
    assert by_head["close"].gradient_difference == 0.0
    doubled = rows(bench([*chosen_heads("stock"), Head("doubled", off(2.0, 0.0))]))["doubled"]
    assert doubled.gradient_difference == pytest.approx(1.0, abs=2.0**-7)


def test_no_time_is_no_step() -> None:
    by_head = rows(bench(chosen_heads("stock"), seconds=0.0))
    assert by_head["stock"].status == "skipped" and by_head["stock"].ms is None


def test_steps_leave_the_weights_as_they_are_and_patches_are_taken_off() -> None:
    training = Training(tiny("llama-1b"), "cpu")
    before = {name: p.clone() for name, p in training.model.named_parameters()}
    attributes = dict(training.model.__dict__)

    def patch(model: torch.nn.Module) -> None:
        model.forward = lambda *args, **kwargs: "patched"  # type: ignore[assignment]
        model.extra = 1  # type: ignore[assignment]

    assert changed_by(patch, training.model).keys() == {"forward", "extra"}
    assert training.model.__dict__ == attributes
    step_heads.stock(training.model, training.tokens)().backward()
    training.finish_step()
    assert training.optimizer_bytes >= 2 * training.weight_bytes
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in training.model.named_parameters())


def test_fewer_configurations_are_some_of_the_list() -> None:
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    original = autotuner.prune_configs

    class Stub:
        prune_configs = autotuner.prune_configs
        configs, early_config_prune, perf_model = list(range(10)), None, None

    with fewer_configurations(4):
        chosen = autotuner.prune_configs(Stub(), {})
        assert len(set(chosen)) == 4 and set(chosen) <= set(range(10))
    with fewer_configurations(40):
        assert sorted(autotuner.prune_configs(Stub(), {})) == list(range(10))
    assert autotuner.prune_configs is original


def made_up_record() -> StepRecord:
    record = StepRecord(None, {"device": "none"})
    record.models.append(ModelRow("m", 4, 4096, 128256, 2048, 16, 1235814400, 2.3, 4.6))
    for head, ours, ms, beyond in (
        ("stock", False, 400.0, 40.0),
        ("logitless", True, 380.0, 20.0),
        ("trl", False, 390.0, 21.0),
    ):
        row = StepRow("m", head, ours, rounds=5, ms=ms, ms_least=ms - 1, ms_most=ms + 1, ratio=ms / 400.0, loss=12.1)
        row.tokens_per_second, row.beyond_gib, row.peak_gib = 16384e3 / ms, beyond, beyond + 6.9
        record.steps.append(row)
    record.steps.append(StepRow("m", "liger", status="skipped", reason="ModuleNotFoundError: no"))
    record.notes.append("something")
    return record


def test_the_table_and_the_record_have_every_row(tmp_path: pathlib.Path) -> None:
    record = made_up_record()
    text = render_steps(record)
    assert "| logitless | 43,116 | 380.0 (379.0 to 381.0) | 0.950 | 26.90 | 20.00 | 12.1000 | - | 5 |" in text
    assert "| liger | skipped: ModuleNotFoundError: no |" in text and "- something" in text
    path = tmp_path / "a.json"
    path.write_text(json.dumps(record.to_json()))
    assert render_steps(load_steps(path)) == text


def test_the_plot_has_the_names_of_its_heads(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    record = made_up_record()
    path = plot_steps(record, record.models[0], tmp_path)
    text = path.read_text()
    heads = ("stock (the model's own head)", 'Logitless, "fastest"', "TRL")
    assert all(f">{head}</text>" in text for head in heads) and ">Liger<" not in text
