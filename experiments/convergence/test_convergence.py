"""The experiment at tiny sizes, without a GPU: python -m pytest experiments/convergence"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
HERE = pathlib.Path(__file__).resolve().parent

import report  # noqa: E402
import tokens  # noqa: E402
import train  # noqa: E402
from models import LanguageModel, Size  # noqa: E402
from peer_heads import loss_named  # noqa: E402

SMALL = ["--dim", "32", "--layers", "1", "--attention-heads", "2", "--length", "16", "--batch", "4"]
SMALL += ["--warmup", "2", "--device", "cpu"]


def run(*words: object) -> str:
    command = [sys.executable, str(HERE / "run.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def data(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder as ``prepare`` writes it, without its tokenizer."""
    folder = tmp_path / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, count in (("train", 4001), ("validation", 801)):
        tokens.save_tokens(folder / f"{name}.npy.xz", (rng.zipf(1.5, count) % 300).astype(np.uint32))
    (folder / "about.json").write_text(json.dumps({"vocab": 300}))
    return folder


def test_prepare(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tokenizers")
    text = tmp_path / "text"
    text.mkdir()
    for index in range(150):
        (text / f"{index}.py").write_text(f"def f_{index}(x):\n    return x + {index}\n")
        (text / f"copy_{index}.py").write_text(f"def f_{index}(x):\n    return x + {index}\n")
    lines = [json.dumps({"question": f"What is {i} + 1 ?", "answer": f"It is {i + 1}."}) for i in range(80)]
    (tmp_path / "instructions.jsonl").write_text("\n".join(lines))
    words = ["--vocab", 400, "--tokens", 1000, "--instructions", tmp_path / "instructions.jsonl"]
    out = run("prepare", "--text", text, "--data", tmp_path / "data", *words)
    assert "documents to train on" in out
    data = tokens.load(tmp_path / "data")
    assert data.vocab == 400 and len(data.train) == 1000 and data.train.max() < 400 and (data.train == 0).any()
    tokenizer = __import__("tokenizers").Tokenizer.from_file(str(tmp_path / "data" / "tokenizer.json"))
    assert "return x + " in tokenizer.decode(data.train.tolist())
    ids, answered = tokens.load_instructions(tmp_path / "data")
    answers = tokenizer.decode([int(i) for i, chosen in zip(ids, answered) if chosen])
    assert answers.startswith("It is 1.") and "What" not in answers and answers.count("It is") == 80


def test_train_report_and_resume(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    pytest.importorskip("logitless", exc_type=ImportError)
    words = ["train", "--data", data, "--output", tmp_path / "out", *SMALL, "--validate-every", 5]
    heads = ["--heads", "exact,canonical,sparsified-2^-4,screened-2^-4"]
    run(*words, *heads, "--steps", 10)
    runs = {r.head: r for r in report.load(tmp_path / "out")}
    assert sorted(runs["exact"].loss) == list(range(1, 11)) and sorted(runs["exact"].validation) == [0, 5, 10]
    assert runs["exact"].validation[0] == pytest.approx(runs["sparsified-2^-4"].validation[0], abs=1e-6)
    assert runs["exact"].validation[0] == pytest.approx(runs["screened-2^-4"].validation[0], abs=1e-3)
    for step, value in runs["exact"].validation.items():
        assert runs["canonical"].validation[step] == pytest.approx(value, abs=0.02)
    run(*words, *heads, "--steps", 15)
    longer = {r.head: r for r in report.load(tmp_path / "out")}
    assert sorted(longer["exact"].loss) == list(range(1, 16))
    assert "| transformer | sparsified-2^-4 | 15 |" in (tmp_path / "out" / "table.md").read_text()


def test_hidden(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    pytest.importorskip("logitless", exc_type=ImportError)
    run("hidden", "--data", data, "--file", tmp_path / "h.pt", *SMALL, "--steps", 3, "--tokens", 40)
    dump = torch.load(tmp_path / "h.pt", weights_only=True)
    assert dump["hidden"].shape == (40, 32) and dump["weight"].shape == (300, 32) and dump["target"].shape == (40,)
    assert dump["hidden"].dtype == dump["weight"].dtype == torch.bfloat16 and dump["step"] == 3


def test_models_see_the_past_only() -> None:
    torch.manual_seed(0)
    model = LanguageModel("transformer", Size(50, 32, 2, 2, 12))
    ids = torch.randint(0, 50, (1, 12))
    changed = ids.clone()
    changed[0, 7] = (ids[0, 7] + 1) % 50
    a, b = model(ids), model(changed)
    assert torch.equal(a[:, :7], b[:, :7]) and not torch.equal(a[:, 7:], b[:, 7:])


def test_sequences_overlap_by_their_targets() -> None:
    rows = train.sequences(np.arange(11, dtype=np.uint32), 5)
    assert rows.tolist() == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]


def test_errors_name_what_was_expected() -> None:
    with pytest.raises(ValueError, match="--heads: expected exact, .*screened-2.-K or names out of canonical"):
        loss_named("sparse")
    with pytest.raises(ValueError, match="--model: expected one of transformer, gla"):
        LanguageModel("rnn", Size(50, 32, 1, 2, 12))
    command = [sys.executable, str(HERE / "run.py"), "hidden", "--data", "d", "--file", "f", "--model", "rnn"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--model: expected one of transformer, gla" in done.stderr


def test_a_model_whose_package_is_missing(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    pytest.importorskip("logitless", exc_type=ImportError)
    if importlib.util.find_spec("fla") is not None:
        pytest.skip("flash-linear-attention is here")
    with pytest.raises(ImportError, match="linear RNNs need flash-linear-attention"):
        LanguageModel("gla", Size(50, 32, 1, 2, 12))
    words = ["hidden", "--data", str(data), "--file", str(tmp_path / "h.pt"), *SMALL, "--model", "gla"]
    done = subprocess.run([sys.executable, str(HERE / "run.py"), *words], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("linear RNNs need flash-linear-attention"), done.stderr
