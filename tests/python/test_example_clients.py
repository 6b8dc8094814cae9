"""The examples over transformers, PEFT and TRL, each run as a script at its tiny size."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example for some steps, checks its table, and returns the line before it."""

    def run(name, steps, *words):
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [name, "--tiny", "--steps", str(steps), *words])
        torch.manual_seed(0)
        torch.set_num_threads(1)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        *_, line, names, seconds, memory = capsys.readouterr().out.strip().splitlines()
        assert re.fullmatch(r"one step, forward and backward +logitless +\w.*", names)
        assert re.fullmatch(r"time, ms( +[\d.]+){2}", seconds)
        assert re.fullmatch(r"peak memory, MiB \(resident set\)( +[\d.]+| +-){2}", memory)
        return line

    yield run
    if "logitless.trl" in sys.modules:
        sys.modules["logitless.trl"].unpatch()


@pytest.mark.parametrize(
    ("name", "needed", "steps"),
    [
        ("transformers_trainer.py", ("transformers", "accelerate"), 8),
        ("peft_lora.py", ("transformers", "peft"), 8),
        ("trl_sft.py", ("transformers", "accelerate", "datasets", "trl"), 8),
    ],
)
def test_the_loss_falls(run, name, needed, steps):
    skip_without(needed)
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", run(name, steps)).groups())
    assert last < first - 0.5


def test_grpo(run):
    skip_without(("transformers", "accelerate", "datasets", "trl"))
    assert re.fullmatch(r"reward [\d.]+ -> [\d.]+, entropy [\d.]+", run("trl_grpo.py", 2))


def test_policy_gradient(run):
    """Every client's functions give the same first step, and a reward that rises."""
    skip_without(("transformers", "tokenizers"))
    lines = {run("policy_gradient.py", 1, "--client", client) for client in ("verl", "prime_rl", "openrlhf")}
    assert len(lines) == 1
    first, last = map(float, re.match(r"reward ([\d.]+) -> ([\d.]+), entropy", run("policy_gradient.py", 30)).groups())
    assert last > first + 3


def skip_without(needed):
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
