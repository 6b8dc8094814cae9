"""examples/train_language_model.py, tiny: its output and files, its errors, and Ctrl-C."""

import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

for needed in ("tokenizers", "matplotlib", "tqdm"):
    pytest.importorskip(needed)

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train_language_model.py"
SMALL = ["--vocab", "400", "--dim", "32", "--batch", "2", "--length", "32", "--device", "cpu"]


@pytest.fixture
def texts(tmp_path):
    """Returns a folder with a text of 4,000 lines, and one that repeats a line."""
    text = "".join(f"{k} is a number, {k * k} its square and {k**3} its cube.\n" for k in range(4000))
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "one_line.txt").write_text("nothing new\n" * 20000)
    return tmp_path


@pytest.fixture
def start(texts, tmp_path):
    """Returns start(*words) -> the running example in this folder."""
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'python'}", "OMP_NUM_THREADS": "1"}
    processes = []

    def start(*words):
        process = subprocess.Popen(
            [sys.executable, EXAMPLE, *words],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # this includes a head's process
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_diverged_model_generates_nothing(capsys):
    example = runpy.run_path(str(EXAMPLE))
    model = example["LanguageModel"](100, 64, 8)
    model.head.weight.data[3] = torch.nan
    assert example["generate"](model, torch.arange(8), 8) == []
    assert capsys.readouterr().out.startswith("the model has diverged: its logits are NaN")


def test_both_heads_train_alike(start, tmp_path):
    process = start("text.txt", *SMALL, "--steps", "12", "--output", "out")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert re.search(r"losses of the first 8 steps differ by \S+ at the most", out)
    assert re.search(r"goes on with a piece of the text:\n'.*(number|square|cube).*' ->\n['\"].{8,}['\"]\n$", out)
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    for head in ("materialized", "logitless"):
        run = figures[head]
        assert len(run["losses"]) == 12 and run["losses"][-1] < run["losses"][0] - 0.1
        assert run["peak_bytes"] >= run["before_bytes"] > 0 < run["head_seconds"] <= run["step_seconds"]
    assert len(figures["logitless"]["generated"]) == 16 and max(figures["logitless"]["generated"]) < 400
    assert len(figures["differences"]) == 8
    assert all(0 <= got <= bound < 1e-3 for got, bound in zip(figures["differences"], run["tolerances"]))
    for name in ("loss", "agreement", "memory"):
        assert ElementTree.parse(tmp_path / "out" / f"{name}.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--steps", "0"], 2, "argument --steps: expected a whole number of at least 1, got '0'"),
        (["--dim", "24"], 2, "argument --dim: expected a multiple of 16, got 24"),
        (["--vocab", "200"], 2, "argument --vocab: expected at least 256, an entry for each byte, got 200"),
        (["--device", "tpu"], 2, "argument --device: expected one of auto, cpu"),
        (["nowhere"], 1, "text: expected files and folders, got 'nowhere', which does not exist"),
        (["text.txt", "--vocab", "100000"], 1, "text: expected at least 3,200,000 bytes for --vocab 100000"),
        (["one_line.txt", "--vocab", "5000"], 1, "--vocab: expected at most 2"),
    ],
)
def test_bad_arguments_are_refused(texts, monkeypatch, capsys, words, code, expected):
    """In this process, since imports take longer than all else."""
    monkeypatch.chdir(texts)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *words])
    with pytest.raises(SystemExit) as refused:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    got = refused.value.code  # a text is what Python prints, with the status 1
    assert (got if isinstance(got, int) else 1) == code and expected in f"{got} {capsys.readouterr().err}"


def test_a_budget_that_is_too_small_is_refused(start):
    process = start("text.txt", *SMALL, "--budget", "1B")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "logitless: " in err and "Traceback" not in err, err


def test_heads_that_do_not_agree_are_an_error(start, tmp_path):
    """The library scales its loss by 1.01."""
    (tmp_path / "sitecustomize.py").write_text(
        "import logitless\n"
        "right = logitless.linear_cross_entropy\n"
        "logitless.linear_cross_entropy = lambda *args, **options: 1.01 * right(*args, **options)\n"
    )
    process = start("text.txt", *SMALL, "--steps", "2")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "error: step 1: expected the heads' losses within" in err


@pytest.mark.parametrize("whole_group", [True, False], ids=["of a terminal", "of kill"])
def test_an_interrupt_ends_it_at_once(start, whole_group):
    process = start("text.txt", *SMALL, "--steps", "1000000")
    for line in process.stdout:
        if line.startswith("step"):
            break
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip().endswith("train_language_model.py: interrupted") and "Traceback" not in err
