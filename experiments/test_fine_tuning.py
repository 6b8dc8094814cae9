"""Fine-tuning at a tiny size, without a GPU: python -m pytest experiments/test_fine_tuning.py"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("logitless", exc_type=ImportError)
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
HERE = pathlib.Path(__file__).resolve().parent

import tokens  # noqa: E402


@pytest.fixture
def data(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder as ``prepare`` writes it, without its tokenizer."""
    rng = np.random.default_rng(0)
    for name, count in (("train", 3001), ("validation", 801), ("instructions", 2400)):
        tokens.save_tokens(tmp_path / f"{name}.npy.xz", (rng.zipf(1.5, count) % 300).astype(np.uint32))
    tokens.save_tokens(tmp_path / "answered.npy.xz", (np.arange(2400) % 12 > 6).astype(np.uint32))
    (tmp_path / "about.json").write_text(json.dumps({"vocab": 300}))
    return tmp_path


def run(data: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "fine_tuning.py"), "--data", str(data), "--device", "cpu", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_all_heads_start_from_the_same_weights_and_are_trained_once(data: pathlib.Path) -> None:
    record = data / "record.json"
    done = run(data, "--heads", "stock,logitless,sparsified,cce", "--json", str(record))
    assert done.returncode == 0, done.stderr
    cells = json.loads(record.read_text())["cells"]
    assert cells["stock"]["held_out"][0] == cells["sparsified"]["held_out"][0] != cells["stock"]["held_out"][1]
    assert len(cells["logitless"]["losses"]) == 4
    assert cells["logitless"]["losses"] == pytest.approx(cells["stock"]["losses"], abs=0.02)
    assert "| sparsified |" in done.stdout and ("- cce: not installed" in done.stdout or cells["cce"]["status"] == "ok")
    again = run(data, "--heads", "stock,liger", "--json", str(record))
    assert again.returncode == 0, again.stderr
    stored = json.loads(record.read_text())["cells"]
    assert stored["stock"] == cells["stock"] and "liger" in stored
    other = run(data, "--heads", "stock", "--json", str(record), "--seed", "1")
    assert other.returncode == 2 and "--json: expected a record of seed 0, got --seed 1" in other.stderr
    (data / "start.pt").unlink()  # runs from other weights cannot be compared with these
    assert run(data, "--heads", "stock", "--json", str(record)).returncode == 0
    assert set(json.loads(record.read_text())["cells"]) == {"stock"}


def test_the_start_is_dumped_for_the_benchmark(data: pathlib.Path) -> None:
    assert run(data, "--dump", str(data / "start-states.pt")).returncode == 0
    dump = torch.load(data / "start-states.pt", weights_only=True)
    assert len(dump["hidden"]) == len(dump["target"]) > 0 and dump["weight"].shape[1] == dump["hidden"].shape[1]


def test_an_unknown_head_is_refused(data: pathlib.Path) -> None:
    done = run(data, "--heads", "sparse")
    assert done.returncode == 2 and "--heads: expected names out of stock, logitless" in done.stderr
