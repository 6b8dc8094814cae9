"""The studies at tiny sizes, without a GPU: python -m pytest experiments/studies"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
STUDY = pathlib.Path(__file__).resolve().parents[1] / "study.py"
sys.path.insert(0, str(STUDY.parent))

from studies import pages  # noqa: E402
from studies.heads import make_head  # noqa: E402
from studies.record import StudyRecord  # noqa: E402
from studies.session import Options, Session  # noqa: E402


def study(*words: object) -> str:
    command = [sys.executable, str(STUDY), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tables_of_the_pages_are_those_of_the_records() -> None:
    for name in pages.TABLES:
        text = (pages.PAGES / name).read_text()
        assert pages.with_tables(pages.PAGES / name, text) == text
    with pytest.raises(SystemExit, match="expected <!-- cce -->"):
        pages.with_tables(pages.PAGES / "papers.md", "")


def test_a_cell_is_measured_once_and_a_failed_one_again(tmp_path: pathlib.Path) -> None:
    path, calls = tmp_path / "record.json", []

    def session(seconds: float = 60.0) -> Session:
        record = StudyRecord("study", path)
        record.begin({"date": "today"})
        return Session(record, Options(device="cpu"), seconds)

    def work(value: int) -> dict[str, object]:
        calls.append(value)
        if value < 0:
            raise ValueError("below 0")
        return {"value": value}

    first = session()
    assert first.cell("a", lambda: work(1)) == first.record.ok("a") and first.cell("b", lambda: work(-1)) is None
    second = session()
    assert second.record.cells["b"]["reason"] == "ValueError: below 0" and second.record.cells["a"]["session"] == 0
    assert second.cell("a", lambda: work(2))["value"] == 1 and second.cell("b", lambda: work(3))["value"] == 3
    assert calls == [1, -1, 3] and second.record.cells["b"]["session"] == 1
    third = session(0.0)
    assert third.cell("c", lambda: work(4)) is None and third.left_out == ["c"]
    with pytest.raises(ValueError, match="--record: expected a record of other"):
        StudyRecord("other", path)


def test_heads_that_are_missing_or_unknown() -> None:
    with pytest.raises(ValueError, match="--heads: expected names out of eager"):
        make_head("sparse")
    hidden, weight, target = torch.randn(6, 8), torch.randn(9, 8), torch.arange(6)
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, target)
    torch.testing.assert_close(make_head("eager")(hidden, weight, target), expected)


def test_grids(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("headroom", exc_type=ImportError)
    words = ["grids", "--device", "cpu", "--tiny", "--record", tmp_path / "grids.json", "--minutes", 1]
    study(*words)
    cells = json.loads((tmp_path / "grids.json").read_text())["cells"]
    assert len(cells) == 25 and {cell["status"] for cell in cells.values()} == {"ok"}
    rows = cells["chunks/llama-3-8b"]["rows"]
    assert "headroom 512 MiB" in {row["method"] for row in rows} and all(row["burst_ms"] for row in rows)
    assert "ok" not in study(*words)  # nothing is measured again
