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


def test_generate(monkeypatch, capsys, tmp_path):
    """Greedy tokens are transformers' own. A sequence has the same ones alone and in a batch."""
    skip_without(("transformers", "tokenizers"))
    from transformers import AutoModelForCausalLM

    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["generate.py", "--tiny", "--tokens", "6", "--top-p", "0.9"])
    torch.manual_seed(0)
    example = runpy.run_path(str(EXAMPLES / "generate.py"))
    example["main"]()
    assert len(capsys.readouterr().out.splitlines()) == 3
    example["tiny_model"].save(str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompts = torch.tensor([[0, 0, 5, 9], [7, 3, 5, 200]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])

    def tokens(prompts, mask, **options):
        return model.generate(prompts, attention_mask=mask, max_new_tokens=9, pad_token_id=0, **options)

    ours = {"custom_generate": example["decode"], "seeds": torch.tensor([4, 4])}
    stock = tokens(prompts, mask, do_sample=False)
    assert torch.equal(tokens(prompts, mask, do_sample=False, **ours), stock)
    whole = {"do_sample": True, "top_k": 0, "temperature": 0.7, "top_p": 0.9}
    both = tokens(prompts, mask, **whole, **ours)
    assert not torch.equal(both[0, 4:], both[1, 4:])
    ours["seeds"] = ours["seeds"][:1]
    alone = [tokens(prompts[:1, 2:], mask[:1, 2:], **whole, **ours), tokens(prompts[1:], mask[1:], **whole, **ours)]
    assert torch.equal(alone[0][0], both[0, 2:]) and torch.equal(alone[1][0], both[1])
    ours["seeds"] = torch.tensor([5])
    assert not torch.equal(tokens(prompts[1:], mask[1:], **whole, **ours)[0], both[1])
    eos = int(both[1, 5])
    ended = tokens(prompts[1:], mask[1:], **whole, eos_token_id=eos, **(ours | {"seeds": torch.tensor([4])}))
    assert ended[0].tolist() == both[1, : both[1, 4:].tolist().index(eos) + 5].tolist()
    for more, named in (({"repetition_penalty": 1.5}, "RepetitionPenalty"), ({"use_cache": False}, "use_cache=False")):
        with pytest.raises(ValueError, match=f"decode: expected options of sampling alone, got {named}"):
            tokens(prompts, mask, **whole, **more, **ours)


def skip_without(needed):
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
