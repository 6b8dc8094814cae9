"""Tests of published tables and records: python -m pytest bench/gpu"""

from __future__ import annotations

import pathlib
import re

import pytest

import published
import terms
from record import load, read_json, write_json


def test_the_tables_of_the_results_are_those_of_the_records() -> None:
    for page in published.PAGES:
        text = page.read_text()
        assert published.with_tables(page, text) == text
    with pytest.raises(SystemExit, match=f"expected <!-- {published.HEAD} -->"):
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


def test_every_record_is_published_and_says_where_it_is_from() -> None:
    in_words = {"mma-2026-11-25", "overlap-2026-11-24"}  # one line of docs/results.md each
    assert {path.stem for path in published.RECORDS.glob("*.json")} == set(published.TABLES) | in_words
    assert all(f"`bench/records/{name}.json`" in published.RESULTS.read_text() for name in in_words)
    for name in published.TABLES:
        assert {"device", "date"} <= set(published.facts_of(name)), name
        assert re.match(r"(One|Two) NVIDIA H\d00s?, \d{4}-\d\d-\d\d: `python bench/", published.source(name)), name


def test_tables_speak_the_words_of_the_pages() -> None:
    tables = "\n".join(line for name in published.TABLES for line in published.table_of(name)[1:])
    assert not re.search(r"thinned|classifier|canonical|burst|sustained|bare|apple|3F", tables)
    assert [terms.in_words(name) for name in ("logitless/mma 160 MiB", "logitless", "logitless sparsified 2^-9")] == [
        "Logitless (mma), 160 MiB",
        'Logitless, `"fastest"`',
        "Logitless, sparsified 2^-9",
    ]


def test_the_first_page_has_six_rows_and_says_what_gradients_are() -> None:
    table = [line for line in published.first_page() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert rows[0] == ["", "time, ms", "extra memory, MiB", "loss and gradients are"] and len(rows) == 2 + 6
    assert [row[3] for row in rows[2:]] == ["exact"] * 5 + ["unbiased"]
    assert terms.gradients_are("apple cce") == "filtered" and terms.gradients_are("apple cce_exact") == "exact"


def test_a_plot_has_words_as_words_and_no_two_methods_alike(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    from plots import plot_time_against_memory

    record = load(str(published.RECORDS / f"{published.HEAD}.json"))
    path = plot_time_against_memory(record, record.shapes[0], tmp_path)
    text = path.read_text()
    words = ("Logitless, sparsified", "Logitless, exact", "torch.compile", terms.MATMULS)
    assert all(f">{word}</text>" in text for word in words)
    assert path.read_text() == (published.ROOT / "docs" / "plots" / path.name).read_text()


def test_the_first_picture_is_that_of_the_record(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    published.draw_memory_of_a_step(tmp_path)
    text = (tmp_path / "memory-of-a-step.svg").read_text()
    assert all(f">{words}</text>" in text for words in ("stock transformers: 32.1 GiB", "11.7 GiB", "optimizer"))
    assert text == (published.PLOTS / "memory-of-a-step.svg").read_text()
