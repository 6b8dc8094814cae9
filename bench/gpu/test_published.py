"""Tables and records that are published: python -m pytest bench/gpu"""

from __future__ import annotations

import pathlib
import re

import pytest

import published
from record import load, read_json, write_json


def test_the_tables_of_the_results_are_those_of_the_records() -> None:
    for page in published.PAGES:
        text = page.read_text()
        assert published.with_tables(page, text) == text
    with pytest.raises(SystemExit, match="expected <!-- head-2026-11-25 -->"):
        published.with_tables(published.RESULTS, "")


def test_a_compressed_record_is_the_same_and_has_the_same_bytes(tmp_path: pathlib.Path) -> None:
    content = {"cells": {"a": {"status": "ok", "ms": [1.5] * 1000}}}
    paths = [tmp_path / name for name in ("a.json.xz", "b.json.xz", "c.json")]
    for path in paths:
        write_json(path, content)
        assert read_json(path) == content
    compressed, again, plain = (path.read_bytes() for path in paths)
    assert compressed == again and len(compressed) < len(plain) / 10 and sorted(tmp_path.iterdir()) == paths


def test_records_of_studies_can_be_read() -> None:
    paths = list((published.RECORDS / "studies").iterdir())
    assert paths and all(path.name.endswith(".json.xz") and read_json(path)["cells"] for path in paths)


def test_every_record_is_published_and_says_what_it_is_of() -> None:
    # docs/architecture_mma.md, docs/parallel.md and docs/parallel_clients.md say what these found.
    of_others = {"mma-2026-11-25", "parallel-2026-11-24", published.OVERLAP, "fsdp-2026-11-24"}
    assert {path.stem for path in published.RECORDS.glob("*.json")} == set(published.TABLES) | of_others
    for name in published.TABLES:
        record = published.loaded(name)
        assert getattr(record, "steps", record.rows) and {"device", "date"} <= set(record.meta), name


def test_a_plot_has_words_as_words_and_no_two_methods_alike(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    from plots import plot_time_against_memory

    record = load(str(published.RECORDS / "heads-2026-11-22.json"))
    path = plot_time_against_memory(record, record.shapes[0], tmp_path)
    text = path.read_text()
    assert re.search(r">logitless sparsified</text>", text) and re.search(r">torch.compile</text>", text)
    assert path.read_text() == (published.ROOT / "docs" / "plots" / path.name).read_text()
