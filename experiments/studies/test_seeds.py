"""The fine-tuning of several seeds at tiny sizes, without a GPU, and its tables."""

from __future__ import annotations

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("logitless", exc_type=ImportError)
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from studies import fine_tuning_seeds, seed_tables  # noqa: E402
from studies.record import StudyRecord  # noqa: E402
from studies.test_studies import data, tiny  # noqa: E402, F401  # a fixture


def test_parts_have_their_seeds_and_share_starts(
    tmp_path: pathlib.Path,
    data: pathlib.Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seed_tables, "RECORDS", tmp_path)
    assert seed_tables.runs() == seed_tables.noise() == seed_tables.adam() == seed_tables.NOT_RUN
    chosen = ("answers", "rate x 0.9", "all tokens", "an eighth", "float32 weights", "plain text")
    monkeypatch.setattr(fine_tuning_seeds, "ARMS", {name: fine_tuning_seeds.ARMS[name] for name in chosen})
    words = ["--data", data, "--checkpoints", tmp_path / "starts", "--models", "small", "--heads", "exact,2^-9"]
    parts = [
        tiny("fine_tuning_seeds", tmp_path / f"fine_tuning_seeds-{i}-of-2.json.xz", "--part", f"{i}/2", *words)
        for i in (1, 2)
    ]
    assert [sum(key.startswith("start/") for key in part) for part in parts] == [1, 0]
    runs = [{key: cell for key, cell in part.items() if not key.startswith("start/")} for part in parts]
    assert [{key[-1] for key in part} for part in runs] == [{"0"}, {"1"}] and len(runs[0]) == len(runs[1]) == 11
    before = {cell["held_out"][0][0] for part in runs for key, cell in part.items() if "text" not in key}
    assert len(before) == 1, "all start from the same weights"
    for part in runs:
        exact, thinned = (part[next(k for k in part if f"answers/{head}/" in k)] for head in ("exact", "2^-9"))
        assert exact["losses"][0] == thinned["losses"][0], "the same data in the same order, and exact losses"
        assert all(0 <= cell["held_out"][1][1] <= cell["held_out"][1][0] for cell in part.values())
    first = [part[next(k for k in part if "answers/exact" in k)] for part in runs]
    assert first[0]["losses"][0] != first[1]["losses"][0], "a seed has an order of its own"
    noise = first[0]["noise"]["start"]["2^-9"]
    assert all(0 < noise[group] < 0.2 for group in fine_tuning_seeds.GROUPS) and "noise" not in first[1]
    labels = {arm: runs[0][f"small/{arm}/exact/seed 0"]["supervised"] for arm in ("answers", "all tokens", "an eighth")}
    assert labels["an eighth"] < labels["answers"] < labels["all tokens"]
    moved = {
        arm: runs[0][f"small/{arm}/exact/seed 0"]["adam"]["4"]["layers"][1] for arm in ("answers", "float32 weights")
    }
    assert moved["answers"] < 0.9 < moved["float32 weights"]

    rows = [row.strip("| ").split(" | ") for row in seed_tables.runs() if row.startswith("| small")]
    assert len(rows) == 11 and {len(row) for row in rows} == {10}
    assert all((row[6] == "-") == (row[2] == "exact" and "rate" not in row[1]) for row in rows)
    assert len(seed_tables.noise()) == 2 + 3 * 2 * 4 and len(seed_tables.adam()) == 2 + 3 * 2


def test_runs_from_a_start_that_is_lost_are_measured_again(tmp_path: pathlib.Path) -> None:
    from studies.session import Options, Session

    record = StudyRecord("fine_tuning_seeds", tmp_path / "record.json")
    record.begin({})
    session = Session(record, Options(device="cpu", tiny=True, checkpoints=tmp_path), 60.0)
    path = fine_tuning_seeds.start_path(session, "small")
    path.write_bytes(b"weights")
    made = path.stat().st_mtime_ns
    record.put("a", {"status": "ok", "start": made})
    record.put("b", {"status": "ok", "start": made - 1})
    assert fine_tuning_seeds.forget_runs_from_others(session, "small", ["a", "b", "c"]) == made
    assert list(record.cells) == ["a"]
