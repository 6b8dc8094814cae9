"""The studies at tiny sizes, without a GPU: python -m pytest experiments/studies"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import study  # noqa: E402
from limits import StepTimeout  # noqa: E402
from studies import pages  # noqa: E402
from studies.heads import make_head  # noqa: E402
from studies.record import StudyRecord, read  # noqa: E402
from studies.session import Options, Session  # noqa: E402


def run(*words: object) -> None:
    assert study.main([str(word) for word in words]) == 0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder that prepare wrote, of a small text."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").mkdir()
    for index in range(500):
        (folder / "text" / f"{index}.py").write_text(f"def f_{index}(x):\n    return x + {index}\n" * 4)
    (folder / "wiki.txt").write_text("A line of text , with words in it .\n" * 200)
    lines = [json.dumps({"question": f"What is {i} + 1 ?", "answer": f"It is {i + 1}."}) for i in range(80)]
    (folder / "instructions.jsonl").write_text("\n".join(lines))
    words = ["--text", folder / "text", "--wikitext", folder / "wiki.txt", "--instructions"]
    run("prepare", "--data", folder, *words, folder / "instructions.jsonl", "--vocab", 400, "--tokens", 3000)
    return folder


def tiny(name: str, record: pathlib.Path, *words: object) -> dict[str, dict[str, Any]]:
    """The cells of a study at tiny sizes."""
    run(name, "--device", "cpu", "--tiny", "--record", record, "--minutes", 5, *words)
    cells: dict[str, dict[str, Any]] = read(record)["cells"]
    assert cells and {cell["status"] for cell in cells.values()} == {"ok"}, cells
    return cells


def test_the_tables_of_the_pages_are_those_of_the_records() -> None:
    for name in pages.TABLES:
        text = (pages.PAGES / name).read_text()
        assert pages.with_tables(pages.PAGES / name, text) == text
    with pytest.raises(SystemExit, match="expected <!-- cce -->"):
        pages.with_tables(pages.PAGES / "papers.md", "")


def test_a_compressed_record_is_the_same_and_has_the_same_bytes(tmp_path: pathlib.Path) -> None:
    paths = [tmp_path / name for name in ("a.json.xz", "b.json.xz", "c.json")]
    for path in paths:
        record = StudyRecord("study", path)
        record.begin({"date": "today"}, {"tiny": True})
        record.put("cell", {"status": "ok", "ms": [1.5] * 1000})
    compressed, again, plain = (path.read_bytes() for path in paths)
    assert compressed == again and len(compressed) < len(plain) / 10
    assert read(paths[0]) == read(paths[2]) == json.loads(plain)
    assert StudyRecord("study", paths[0]).cells == record.cells and sorted(tmp_path.iterdir()) == paths


def test_published_records_are_compressed() -> None:
    names = [path.name for path in study.RECORDS.iterdir()]
    assert names and all(name.endswith(".json.xz") for name in names), names
    assert all(read(study.RECORDS / name)["cells"] for name in names)


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
    pytest.importorskip("logitless", exc_type=ImportError)
    cells = tiny("grids", tmp_path / "grids.json.xz")
    rows = cells["chunks/llama-3-8b"]["rows"]
    assert len(cells) == 7 and all(row["burst_ms"] for row in rows)
    assert "logitless 512 MiB" in {row["method"] for row in rows}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory, data: pathlib.Path) -> pathlib.Path:
    """A folder of records of the studies of linear RNNs at tiny sizes."""
    pytest.importorskip("logitless", exc_type=ImportError)
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("records")
    words = ["--data", data, "--checkpoints", folder / "checkpoints", "--rounds", 2]
    for name in ("scale", "crossover", "accumulation", "sparsity"):
        tiny(name, folder / f"{name}.json.xz", *words)
    tiny("mve", folder / "mve.json.xz", *words, "--models", "recurrence")
    return folder


def cells_of(records: pathlib.Path, name: str) -> dict[str, dict[str, Any]]:
    return StudyRecord(name, records / f"{name}.json.xz").cells


def test_prepared_instructions_say_what_is_to_be_predicted(data: pathlib.Path) -> None:
    import tokenizers

    from studies.corpus import load_instructions, load_wikitext

    found = load_instructions(data)
    tokenizer = tokenizers.Tokenizer.from_file(str(data / "tokenizer.json"))
    answers = tokenizer.decode([int(i) for i, chosen in zip(found.ids, found.answered) if chosen])
    assert answers.startswith("It is 1.") and "What" not in answers and answers.count("It is") == 80
    assert len(found.ids) == len(found.answered) and len(load_wikitext(data)) > 100


def test_mve_goes_on_from_a_checkpoint(tmp_path: pathlib.Path, data: pathlib.Path, records: pathlib.Path) -> None:
    cells = cells_of(records, "mve")
    whole = cells["run/logitless"]
    assert whole["step"] == 6 and set(whole["validation"]) == {"0", "3", "6"} and len(whole["loss"]) == 6
    assert whole["validation"]["6"] == pytest.approx(cells["run/eager"]["validation"]["6"], abs=0.02)
    assert cells["batch/thinned/x4"]["batch"] == 8

    # As a call leaves it that ends in the middle of a run.
    from studies import lm, mve

    options = Options(device="cpu", data=data, tiny=True, models=("recurrence",), checkpoints=tmp_path / "other")
    session = Session(StudyRecord("mve", tmp_path / "half.json"), options, 600.0)
    session.record.begin({"date": "today"})
    settings = mve.settings(session)
    trainer = lm.make_trainer(session, settings, lm.load_data(data), "logitless")
    for _ in range(3):
        trainer.advance()
    trainer.save(lm.checkpoint_path(session, "run/logitless"))
    session.record.put("run/logitless", {"status": "partial", "step": 3, "loss": {"1": 1.0}, "validation": {"0": 6.0}})
    found = lm.trained(session, "run/logitless", settings, "logitless")
    assert found is not None and found["step"] == 6 and set(found["loss"]) == {"1", "4", "5", "6"}
    assert found["validation"]["6"] == pytest.approx(whole["validation"]["6"], abs=1e-5)


def test_scale(records: pathlib.Path) -> None:
    cells = cells_of(records, "scale")
    assert set(cells) == {f"transformer/B{batch}" for batch in (1, 4, 8, 16)}
    rows = {row["head"]: row for row in cells["transformer/B8"]["rows"]}
    assert set(rows) == {"eager", "logitless", "thinned", "no head"}
    assert rows["logitless"]["loss"] == pytest.approx(rows["eager"]["loss"], rel=0.01) and rows["thinned"]["ms"]


def test_accumulation_and_sparsity(records: pathlib.Path) -> None:
    cells = cells_of(records, "accumulation")
    errors = cells["recurrence/errors"]["heads"]
    assert errors["logitless"]["d_hidden"] <= 2 * errors["unavoidable"]["d_hidden"] + 2.0**-8
    assert errors["thinned"]["d_hidden"] < 1 and cells["transformer/thinned/wikitext2"]["perplexity"] > 1
    found = cells_of(records, "sparsity")["recurrence"]
    assert 0 <= found["above"] <= 1 and found["above_a_row"] <= 400 and 0 < found["kept_a_row"] <= 400
    assert found["times"]["logitless"]["gradients"] > 0


def test_tables_of_records(records: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from studies import heads, rnn_tables

    monkeypatch.setattr(heads, "BASELINE", "eager")
    monkeypatch.setattr(heads, "ALL", ("eager", "logitless", "thinned"))
    monkeypatch.setattr(rnn_tables, "RECORDS", tmp_path)
    assert rnn_tables.mve_criteria() == rnn_tables.NOT_RUN
    for path in records.glob("*.json.xz"):
        shutil.copy(path, tmp_path)
    record = StudyRecord("mve", tmp_path / "mve.json.xz")
    for key, cell in record.cells.items():  # which the CPU does not measure
        cell["peak_gib"] = {"eager": 4.0, "logitless": 1.9, "thinned": 2.1}[key.split("/")[1]]
        cell["tokens_per_second"] = 1000.0 + 500 * key.endswith("x4")
        cell["step_ms"] = [10.0]
    record.save()
    tables = {name: table() for name, table in rnn_tables.TABLES.items() if name != "scale-largest"}
    assert tables.pop("scale-picture")[0].startswith("![Tokens a second")
    assert all(len(lines) > 2 and lines[-1] != rnn_tables.NOT_RUN[0] for lines in tables.values())
    row = next(line for line in tables["mve-criteria"] if line.startswith("| logitless"))
    assert "yes: -52%" in row and "yes: +50.0% with 8 sequences" in row and "yes: +0.0%" in row
    assert "**no**: -48%" in next(line for line in tables["mve-criteria"] if line.startswith("| thinned"))


def test_blocks_that_a_filter_keeps() -> None:
    from studies.sparsity import BLOCK, kept_blocks, softmax_statistics

    p = torch.zeros(BLOCK + 3, 3 * BLOCK + 1)
    p[5, 2 * BLOCK] = p[BLOCK + 1, 3 * BLOCK] = 0.5
    assert kept_blocks(p).tolist() == [[False, False, True, False], [False, False, False, True]]
    weight = torch.zeros(2 * BLOCK, 4)
    weight[7] = 40.0
    found = softmax_statistics(torch.ones(BLOCK, 4), weight)
    assert found["above_a_row"] == 1 and found["blocks"] == 0.5 and found["kept_a_row"] == pytest.approx(1, abs=1e-5)


def test_fine_tuning(tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("logitless", exc_type=ImportError)
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from studies import fine_tables

    words = ["--data", data, "--checkpoints", tmp_path / "checkpoints"]
    cells = tiny("fine_tuning", tmp_path / "fine_tuning.json.xz", *words)
    assert set(cells) == {"start", "errors", "stock", "logitless", "thinned"}
    error = {name: row["d_hidden"] for name, row in cells["errors"]["heads"].items()}
    assert 0 < error["logitless"] <= 2 * error["unavoidable"] + 2**-8 and cells["errors"]["tokens"] > 0
    assert cells["stock"]["held_out"][0] == cells["thinned"]["held_out"][0] != cells["stock"]["held_out"][1]
    assert len(cells["logitless"]["losses"]) == 4
    assert cells["logitless"]["losses"] == pytest.approx(cells["stock"]["losses"], abs=0.02)
    monkeypatch.setattr(fine_tables, "RECORDS", tmp_path)
    assert any(line.startswith("| thinned |") for line in fine_tables.runs())
    assert fine_tables.cce() == fine_tables.NOT_RUN
    shutil.copy(tmp_path / "fine_tuning.json.xz", tmp_path / "fine_tuning_cce.json.xz")
    found = {line.split(" | ")[0].strip("| "): line.count(" - ") for line in fine_tables.cce()[2:]}
    assert (found["unavoidable"], found["eager"], found["stock"], found["thinned"]) == (2, 2, 2, 0)
    assert fine_tables.memory() == fine_tables.NOT_RUN  # which the CPU does not measure
    record = StudyRecord("fine_tuning", tmp_path / "fine_tuning.json.xz")
    for name in ("stock", "logitless"):
        now = dict.fromkeys(fine_tables.CATEGORIES, 1024.0)
        record.cells[name]["memory"] = {"at_peak": now, "timeline": [now] * 3}
    record.save()
    assert "| stock | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 6.00 |" in fine_tables.memory()
    pytest.importorskip("matplotlib")
    paths = fine_tables.draw(tmp_path)
    assert len(paths) == 2 and all(">logitless</text>" in path.read_text() for path in paths)


def test_the_largest_batch_is_looked_for_from_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from studies import scale

    record = StudyRecord("scale")
    record.begin({})
    session = Session(record, Options(device="cpu", tiny=True, cap_gib=20.0), 60.0)
    peaks = {8: 10.0, 4: 6.0}
    for batch, peak in peaks.items():
        rows = [{"head": "thinned", "peak_gib": peak}]
        record.put(f"transformer/B{batch}", {"status": "ok", "rows": rows})
    assert scale.guess(session, "transformer", "thinned") == 17 and scale.guess(session, "transformer", "liger") == 8
    properties = type("Properties", (), {"total_memory": 140 << 30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    for fits, start, expected in ((19, 17, 19), (15, 17, 15), (17, 17, 17), (60, 8, 60), (1, 40, 1), (29, 64, 29)):
        tried: list[int] = []

        def step(*arguments: Any, limit: int = fits, seen: list[int] = tried) -> float:
            seen.append(arguments[-1])
            return 2.0 if arguments[-1] <= limit else 0.0

        monkeypatch.setattr(scale, "timed_step", step)
        found = scale.largest(session, "transformer", "thinned", start)
        assert found["batch"] == expected and found["too_large"] == expected + 1 and "status" not in found, tried
        assert {expected, expected + 1} <= set(tried) and len(tried) == len(set(tried)) <= 12
    assert fractions == [pytest.approx(20 / 140), 1.0] * 6
    monkeypatch.setattr(scale, "timed_step", lambda *_: 0.0)
    assert scale.largest(session, "transformer", "thinned", 9)["status"] == "refused"


def test_a_largest_batch_that_is_not_found_in_time_is_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from studies import scale

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"total_memory": 140 << 30}))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda _: None)
    record = StudyRecord("scale")
    tried: list[int] = []

    def step(*arguments: Any) -> float:
        tried.append(arguments[-1])
        if len(tried) in (4, 6):
            raise StepTimeout("longer than 9 s")
        return 2.0 if arguments[-1] <= 21 else 0.0

    monkeypatch.setattr(scale, "timed_step", step)
    for batch, too_large, sessions in ((20, None, None), (21, None, [0, 1]), (21, 22, [0, 1, 2])):
        record.begin({})
        session = Session(record, Options(device="cpu", tiny=True, cap_gib=20.0), 60.0)
        session.cell("transformer/largest/a", lambda: scale.largest(session, "transformer", "a", 17))
        cell = record.cells["transformer/largest/a"]
        assert (cell["batch"], cell.get("too_large"), cell.get("sessions")) == (batch, too_large, sessions), tried
        assert cell["status"] == ("ok" if too_large == 22 else "partial")
    session = Session(StudyRecord("scale"), Options(device="cpu", tiny=True, cap_gib=20.0), 60.0)
    assert scale.largest(session, "transformer", "a", 17, seconds=0.0)["status"] == "partial"


def test_a_step_of_a_batch_takes_time_or_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from step_models import Training
    from studies import scale

    session = Session(StudyRecord("scale"), Options(device="cpu", tiny=True), 60.0)
    training = Training(scale.spec_of(session, "transformer", 1), "cpu")
    assert scale.timed_step(session, training, "transformer", "eager", 3) > 0

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(scale.heads, "make_head", lambda _: fails)
    assert scale.timed_step(session, training, "transformer", "eager", 3) == 0
