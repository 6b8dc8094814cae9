"""What a study's next call makes of what an earlier one left: python -m pytest experiments/studies/test_going_on.py"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import study  # noqa: E402
import tokens  # noqa: E402
import train  # noqa: E402
from limits import StepTimeout  # noqa: E402
from studies import lm, paper_tables, rnn_tables  # noqa: E402
from studies.record import SettingsDiffer, StudyRecord, with_status  # noqa: E402
from studies.session import Options, Session  # noqa: E402


@pytest.fixture
def data(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, count in (("train", 3001), ("validation", 801)):
        tokens.save_tokens(folder / f"{name}.npy.xz", (rng.zipf(1.5, count) % 300).astype(np.uint32))
    (folder / "about.json").write_text(json.dumps({"vocab": 300}))
    return folder


def session_of(folder: pathlib.Path, data: pathlib.Path | None = None, seconds: float = 600.0, **more: Any) -> Session:
    """A call of a study, as the ones before left its record and checkpoints."""
    record = StudyRecord("study", folder / "record.json")
    record.begin({"date": f"call {len(record.sessions)}"})
    more = {"device": "cpu", "tiny": True} | more
    return Session(record, Options(data=data, checkpoints=folder / "checkpoints", **more), seconds)


def settings(steps: int = 6) -> train.Settings:
    return lm.tiny_settings("recurrence", 300, steps, "cpu")


ROW = {"status": "ok", "reason": "", "method": "a"}
LATE = {"status": "skipped", "reason": "no time left for its rounds", "method": "b"}
CUT = {"status": "failed", "reason": "StepTimeout: longer than 40 s", "method": "c"}


def test_a_cell_whose_rows_had_too_little_time_is_measured_again(tmp_path: pathlib.Path) -> None:
    fails = {"status": "failed", "reason": "ValueError: no", "method": "d"}
    remark = ROW | {"reason": "no time left for sustained figures"}
    assert with_status([ROW, fails, remark], "method") == {"status": "ok"}
    partial = with_status([ROW, LATE, CUT, CUT], "method")
    assert partial == {"status": "partial", "reason": "too little time for b, c"}
    assert session_of(tmp_path).cell("x", lambda: {"rows": [ROW, LATE]} | partial) is None
    again = session_of(tmp_path)
    assert again.record.holds("x") and not again.record.final("x")
    again.cell("x", lambda: {"rows": [CUT, LATE]} | partial)  # had even less time
    assert again.record.cells["x"]["rows"] == [ROW, LATE]
    assert again.cell("x", lambda: {"rows": [ROW, ROW]})


def test_a_failed_retry_keeps_what_there_was(tmp_path: pathlib.Path) -> None:
    session_of(tmp_path).cell("x", lambda: {"status": "partial", "loss": {"1": 2.0}})

    def fails() -> dict[str, Any]:
        raise StepTimeout("longer than 9 s")

    again = session_of(tmp_path)
    assert again.cell("x", fails) is None
    cell = StudyRecord("study", again.record.path).cells["x"]
    assert cell["loss"] == {"1": 2.0} and cell["status"] == "partial" and cell["session"] == 0
    assert cell["reason"] == "cut off: longer than 9 s"


def test_a_cell_is_begun_with_about_the_time_that_it_needs(tmp_path: pathlib.Path) -> None:
    assert session_of(tmp_path, seconds=20.0, tiny=False).cell("x", lambda: {}, least=30.0) is None
    assert session_of(tmp_path, seconds=20.0).cell("x", lambda: {}, least=30.0) is not None
    shape = study_shape()
    session = session_of(tmp_path, seconds=20.0, tiny=False)
    from studies import grids

    grids.measured(session, "y", grids.GRIDS[0], shape)
    assert session.left_out == ["y (needs 82 s)"]


def study_shape() -> Any:
    from shapes import Shape

    return Shape("small", 48, 300, 32)


def test_a_grid_that_is_cut_off_keeps_its_rows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from record import Row
    from studies import grids

    class Cut:
        def __init__(self, record: Any, *_: object) -> None:
            self.record = record

        def run(self, *_: object) -> None:
            self.record.rows += [Row("small", "a", "loss", burst_ms=self.ms), Row("small", "b", "loss")]
            raise StepTimeout("longer than 9 s")

    Cut.ms = 2.0  # type: ignore[attr-defined]
    monkeypatch.setattr(grids, "ShapeBench", Cut)
    found = grids.measure(session_of(tmp_path), grids.GRIDS[0], study_shape(), 9.0)
    assert [row["status"] for row in found["rows"]] == ["ok", "skipped"]
    assert (found["status"], found["reason"]) == ("partial", "too little time for b")
    Cut.ms = None  # type: ignore[attr-defined]
    with pytest.raises(StepTimeout):
        grids.measure(session_of(tmp_path), grids.GRIDS[0], study_shape(), 9.0)


def test_steps_that_are_cut_off_keep_their_rounds(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from studies import scale

    calls: list[int] = []
    step_ms = scale.ModelBench._step_ms

    def slow(self: Any, loss: Any) -> float:
        calls.append(1)
        if len(calls) > 8:  # two heads are prepared, and two rounds are done
            raise StepTimeout("longer than 9 s")
        return step_ms(self, loss)

    monkeypatch.setattr(scale.ModelBench, "_step_ms", slow)
    monkeypatch.setattr(scale.heads, "BASELINE", "eager")
    session = session_of(tmp_path, rounds=5)
    found = scale.steps(session, "transformer", 1, ("eager",), 60.0)
    assert found["status"] == "partial" and [row["rounds"] for row in found["rows"]] == [2, 2]
    calls[:] = [1] * 7  # now one is prepared
    found = scale.steps(session, "transformer", 1, ("eager",), 60.0)
    assert found["status"] == "failed" and "too little" not in found["reason"]
    session.cell("transformer/B8", lambda: {"rows": []}, settings={"heads": ("eager",), "tune": 2})
    with pytest.raises(SettingsDiffer, match="transformer/B8: expected heads"):
        scale.run(session)


def test_rows_that_failed_give_way_to_earlier_records(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from record import Row
    from shapes import BY_NAME

    shape = BY_NAME["gemma-2-2b"]
    monkeypatch.setattr(paper_tables, "RECORDS", tmp_path)
    earlier = paper_tables.measured("cce", shape)
    assert earlier is not None and earlier.ms("torch.compile", "gradients")
    record = StudyRecord("grids", tmp_path / "grids.json.xz")
    record.begin({"date": "today"})
    rows = [
        Row(shape.name, "torch.compile", "gradients", status="skipped", reason="no time left to prepare it"),
        Row(shape.name, "apple cce_kahan_full_c", "gradients", status="failed", reason="OutOfMemoryError: no"),
        Row(shape.name, "logitless unlimited", "gradients", burst_ms=1.0),
    ]
    cell = {"status": "partial", "gemms": [], "rows": [dataclasses.asdict(row) for row in rows]}
    record.put(f"cce/{shape.name}", cell)
    found = paper_tables.measured("cce", shape)
    assert found is not None and found.ms("torch.compile", "gradients") == earlier.ms("torch.compile", "gradients")
    assert (
        found.ms("logitless unlimited", "gradients") == 1.0
        and found.time("apple cce_kahan_full_c", "gradients") == "failed"
    )
    assert found.ratio("logitless unlimited", "torch.compile", "gradients") is None  # of two runs
    assert paper_tables.cce()[-1].endswith("Times of different runs compare less well than those of one.")


def test_a_table_names_the_records_that_its_figures_are_of(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from record import Row
    from shapes import BY_NAME

    monkeypatch.setattr(paper_tables, "RECORDS", tmp_path)
    shape = BY_NAME["llama-3-8b"]
    record = StudyRecord("grids", tmp_path / "grids.json.xz")
    record.begin({"date": "today"})
    methods = ("canonical", "logitless 512 MiB", "logitless 128 MiB", "logitless unlimited")
    rows = [dataclasses.asdict(Row(shape.name, name, "gradients", burst_ms=1.0)) for name in methods]
    record.put(f"chunks/{shape.name}", {"status": "ok", "gemms": [], "rows": rows})
    found = paper_tables.measured("chunks", shape)
    assert found is not None and found.ms("verl", "gradients")  # of an earlier record, and of no row of the table
    assert paper_tables.chunks()[-1] == "Measured: grids, today."


def test_a_run_whose_curve_is_lost_starts_again(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    pytest.importorskip("logitless", exc_type=ImportError)
    whole = lm.trained(session_of(tmp_path, data), "run/logitless", settings(), "logitless")
    assert whole is not None and set(whole["loss"]) == {"1", "2", "3", "4", "5", "6"}
    for left in ({}, {"run/logitless": {"status": "partial", "step": 3, "loss": {}, "validation": {}, "session": 0}}):
        session = session_of(tmp_path, data)
        session.record.cells = left  # as a call leaves it that ends after its checkpoint of step 6
        found = lm.trained(session, "run/logitless", settings(), "logitless")
        assert found is not None and found["loss"] == pytest.approx(whole["loss"], abs=1e-4)
        assert set(found["validation"]) == {"0", "3", "6"} and "sessions" not in found


def test_a_run_is_done_also_where_its_memory_is_not(
    tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("logitless", exc_type=ImportError)
    seen: list[dict[str, Any]] = []
    for error in (torch.OutOfMemoryError("too large"), StepTimeout("longer than 9 s")):
        session = session_of(tmp_path / type(error).__name__, data)

        def fails(session: Session, _: object, error: BaseException = error) -> dict[str, float]:
            seen.append(dict(StudyRecord("study", session.record.path).cells["run/logitless"]))
            raise error

        monkeypatch.setattr(lm, "memory_of_step", fails)
        found = lm.trained(session, "run/logitless", settings(), "logitless")
        assert found is not None and found["status"] == "ok" and len(found["loss"]) == 6
        assert found["no memory"].endswith(str(error))
    assert [cell["status"] for cell in seen] == ["ok", "ok"] and all(len(cell["loss"]) == 6 for cell in seen)


def test_a_run_of_several_calls_names_them(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    pytest.importorskip("logitless", exc_type=ImportError)
    first = session_of(tmp_path, data)
    trainer = lm.make_trainer(first, settings(), lm.load_data(data), "logitless")
    trainer.advance()
    trainer.save(lm.checkpoint_path(first, "run/logitless"))
    first.record.put("run/logitless", {"status": "partial", "step": 1, "loss": {"1": 6.0}, "validation": {"0": 6.0}})
    with pytest.raises(ValueError, match="expected a run of 6 steps, got 1"):
        lm.restored(first, settings(), "run/logitless")
    second = session_of(tmp_path, data)
    found = lm.trained(second, "run/logitless", settings(), "logitless")
    assert found is not None and found["sessions"] == [0, 1] and len(found["loss"]) == 6
    assert second.record.about()[-1].startswith("Its figures are of 2 calls")
    assert lm.restored(second, settings(), "run/logitless").step == 6


def test_a_checkpoint_is_whole_or_the_one_before(
    tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("logitless", exc_type=ImportError)
    path = tmp_path / "run.pt"
    trainer = lm.make_trainer(session_of(tmp_path), settings(), lm.load_data(data), "eager")
    trainer.save(path)
    before = path.read_bytes()

    def ends(_: object, file: pathlib.Path) -> None:
        pathlib.Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", ends)
    with pytest.raises(KeyboardInterrupt):
        trainer.save(path)
    assert path.read_bytes() == before
    other = lm.make_trainer(
        session_of(tmp_path), lm.tiny_settings("transformer", 300, 6, "cpu"), lm.load_data(data), "eager"
    )
    with pytest.raises(
        ValueError, match="expected one of {'model': 'transformer'}, got one of {'model': 'recurrence'}"
    ):
        other.restore(path)


def test_errors_are_of_a_model_that_is_trained(
    tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from studies import accumulation

    monkeypatch.setattr(accumulation.lm, "trained", lambda *_: None)
    session = session_of(tmp_path, data)
    accumulation.run(session)
    assert not session.record.cells


def test_a_record_is_of_one_set_of_settings(tmp_path: pathlib.Path) -> None:
    first = session_of(tmp_path)
    first.cell("x", lambda: {}, settings={"model": "gla", "heads": ("a", "b")})
    assert session_of(tmp_path).cell("x", lambda: {}, settings={"heads": ("a", "b")}) is not None
    with pytest.raises(SettingsDiffer, match="x: expected model kda, got model gla: another --record"):
        session_of(tmp_path).cell("x", lambda: {}, settings={"model": "kda"})
    first.record.begin({}, {"tiny": True})
    first.record.save()
    with pytest.raises(SettingsDiffer, match="expected tiny False, got tiny True"):
        StudyRecord("study", first.record.path).begin({}, {"tiny": False})


def test_a_call_with_other_settings_is_refused(
    tmp_path: pathlib.Path, data: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("logitless", exc_type=ImportError)
    words = ["mve", "--device", "cpu", "--tiny", "--data", str(data), "--minutes", "5", "--heads", "eager"]
    words += ["--record", str(tmp_path / "mve.json"), "--rounds", "1"]
    assert study.main([*words, "--models", "recurrence"]) == 0
    before = (tmp_path / "mve.json").read_text()
    assert study.main([*words, "--models", "transformer"]) == 2
    assert "run/eager: expected model transformer, got model recurrence" in capsys.readouterr().err
    assert json.loads(before)["cells"] == json.loads((tmp_path / "mve.json").read_text())["cells"]
    with pytest.raises(SystemExit):
        study.main(["mve", "--device", "cpu", "--record", str(tmp_path / "mve.json")])
    assert "expected tiny False, got tiny True" in capsys.readouterr().err


def test_a_try_out_stays_away_from_the_records(tmp_path: pathlib.Path) -> None:
    def places(*words: str) -> tuple[pathlib.Path, pathlib.Path | None]:
        return study.places(study.parser().parse_args(["mve", *words]))

    assert places() == (study.RECORDS / "mve.json.xz", None)
    record, checkpoints = places("--tiny")
    assert study.RECORDS not in record.parents and checkpoints == record.parent / "checkpoints"
    chosen = tmp_path / "r.json"
    assert places("--tiny", "--record", str(chosen)) == (chosen, tmp_path / "checkpoints")
    assert places("--record", str(chosen)) == (chosen, None)


def test_tables_of_runs_without_a_curve(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rnn_tables, "RECORDS", tmp_path)
    empty = {"status": "ok", "loss": {}, "validation": {}, "step_ms": [], "tokens": 32}
    for name in ("mve", "accumulation"):
        record = StudyRecord(name, tmp_path / f"{name}.json.xz")
        record.begin({"date": "today"})
        for head in (rnn_tables.heads.BASELINE, "logitless"):
            key = f"run/{head}" if name == "mve" else f"gla/{head}"
            record.put(key, empty | ({"peak_gib": 2.0} if head == rnn_tables.heads.BASELINE else {}))
    assert "| logitless | - | - | - | - |" in rnn_tables.mve_runs()
    assert "| logitless | - | - | - | - | - | - |" in rnn_tables.mve_criteria()
    assert "| gla | logitless | - | - | - | - |" in rnn_tables.accumulation_losses()


def test_a_run_that_shared_the_gpu_has_no_time_of_a_step(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rnn_tables, "RECORDS", tmp_path)
    record = StudyRecord("accumulation", tmp_path / "accumulation.json.xz")
    run = {"status": "ok", "validation": {"2": 4.0}, "step_ms": [7.0]}
    record.begin({"date": "today"})
    record.put("gla/logitless", run)
    record.begin({"date": "tomorrow", "note": "on a GPU shared with other runs"})
    record.put("gla/thinned", run)
    record.put("kda/logitless", run | {"sessions": [0]})
    table = "\n".join(rnn_tables.accumulation_losses())
    assert "| gla | logitless | 4.0000 | +0.0000 | - | 7.00 |" in table
    assert "| gla | thinned | 4.0000 | +0.0000 | - | - |" in table
    assert "| kda | logitless | 4.0000 | +0.0000 | - | - |" in table
    assert "tomorrow, on a GPU shared with other runs" in table


def test_a_head_that_fails_has_its_reason_among_the_times(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from data import Inputs
    from studies import sparsity

    calls: list[int] = []

    def tires(hidden: Any, weight: Any, target: Any) -> Any:
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("tired")
        return torch.nn.functional.cross_entropy(hidden @ weight.T, target)

    def make_head(name: str) -> Any:
        if name == "cce":
            raise ImportError("no cut_cross_entropy")
        return tires if name == "tires" else lambda h, w, t: torch.nn.functional.cross_entropy(h @ w.T, t)

    monkeypatch.setattr(sparsity.heads, "make_head", make_head)
    inputs = Inputs(torch.randn(6, 8), torch.randn(9, 8), torch.arange(6))
    times = sparsity.times(session_of(tmp_path), inputs, ("cce", "eager", "tires"))
    assert times["cce"] == {"reason": "ImportError: no cut_cross_entropy"}
    assert times["tires"] == {"reason": "RuntimeError: tired"} and set(times["eager"]) == {"loss", "gradients"}
    monkeypatch.setattr(rnn_tables, "RECORDS", tmp_path)
    record = StudyRecord("sparsity", tmp_path / "sparsity.json.xz")
    record.begin({"date": "today"})
    record.put("gla", {"status": "ok", "times": times})
    assert "| gla | cce | ImportError: no cut_cross_entropy | - | - | - |" in rnn_tables.sparsity_times()


def test_runs_from_a_lost_start_are_made_again(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    from studies import fine_tuning

    session = session_of(tmp_path)
    for key in ("start", "stock"):
        session.record.put(key, {"status": "ok"})
    path = lm.checkpoint_path(session, "fine-tuning/start")
    path.parent.mkdir(parents=True)
    path.touch()
    fine_tuning.forget_lost_start(session)
    assert set(session.record.cells) == {"start", "stock"}
    path.unlink()
    fine_tuning.forget_lost_start(session)
    assert not session.record.cells
