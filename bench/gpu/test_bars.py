"""Tests of the comparison with a record, which need no GPU: python -m pytest bench/gpu"""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

import pytest
import torch

import bars
import published
import run
from bars import Within, compared, parse_within
from methods import our_methods
from record import Record, load

RUN = pathlib.Path(run.__file__)
ENGINES = published.RECORDS / "engines-2026-11-26.json"


def of_run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RUN), *words], capture_output=True, text=True, timeout=300)


def changed(of: str, /, **fields: object) -> Record:
    """Returns the record of all engines, in which a row of llama-3-8b differs."""
    record = load(ENGINES)
    rows = [row for row in record.rows if (row.shape, row.method) == ("llama-3-8b", of)]
    (before,) = rows
    record.rows[record.rows.index(before)] = dataclasses.replace(before, **fields)
    return record


def fails(record: Record, within: Within = Within()) -> list[str]:
    text, kept = compared(load(ENGINES), record, within)
    lines = [line.removeprefix("fails: ") for line in text.splitlines() if line.startswith("fails: ")]
    assert kept == (not lines) and text.splitlines()[-1].startswith(f"{len(lines)} of 18 rows fail")
    assert sum(line.startswith("| llama-3-8b |") for line in text.splitlines()) == 9
    return lines


def test_a_record_passes_against_itself_and_a_faster_one_does_too() -> None:
    assert fails(load(ENGINES)) == []
    assert fails(changed("logitless/mma 160 MiB", burst_ratio=1.2, sustained_ratio=1.2, extra_mib=1100.0)) == []


@pytest.mark.parametrize("engine", ["logitless", "logitless/mma", "logitless/portable"])
def test_a_slower_row_of_any_engine_fails_by_name(engine: str) -> None:
    method = f"{engine} 160 MiB"
    (bar,) = (row for row in load(ENGINES).rows if (row.shape, row.method) == ("llama-3-8b", method))
    assert bar.burst_ratio and bar.sustained_ratio
    slower = {"burst_ratio": bar.burst_ratio * 1.051, "sustained_ratio": bar.sustained_ratio * 1.189}
    assert fails(changed(method, **slower)) == [f"llama-3-8b, {method}, gradients: after idle slower"]
    slower = {"burst_ratio": bar.burst_ratio * 1.049, "sustained_ratio": bar.sustained_ratio * 1.191}
    assert fails(changed(method, **slower)) == [f"llama-3-8b, {method}, gradients: steady slower"]
    assert fails(changed(method, **slower), Within(0.05, 0.20)) == []
    assert len(fails(changed(method, **slower), Within(0.04, 0.04))) == 1
    assert fails(changed(method, burst_ratio=float("nan"))) == [f"llama-3-8b, {method}, gradients: after idle slower"]


def test_what_was_not_measured_fails() -> None:
    method = "logitless/portable unlimited"
    for fields, fault in (
        ({"status": "refused", "reason": "needs 3 MiB"}, "refused: needs 3 MiB"),
        ({"sustained_ratio": None}, "steady not measured"),
        ({"burst_ratio": None, "sustained_ratio": None}, "after idle not measured; steady not measured"),
        ({"extra_mib": None}, "memory not measured"),
        ({"data": "peaked"}, "missing"),
        ({"method": "logitless/other"}, "missing"),
    ):
        assert fails(changed(method, **fields)) == [f"llama-3-8b, {method}, gradients: {fault}"]
    other_sizes = load(ENGINES)
    other_sizes.shapes[0] = other_sizes.shapes[0]._replace(vocab=128000)
    assert len(fails(other_sizes)) == 9


def test_a_row_may_take_one_mib_and_one_percent_more_beyond_gradients() -> None:
    method = "logitless 160 MiB"
    (bar,) = (row for row in load(ENGINES).rows if (row.shape, row.method) == ("llama-3-8b", method))
    assert bar.extra_mib
    allowed = 1 + 0.01 * (bar.extra_mib - bar.gradient_mib)
    assert fails(changed(method, extra_mib=bar.extra_mib + allowed - 0.1)) == []
    more = changed(method, extra_mib=bar.extra_mib + allowed + 0.1)
    assert fails(more) == [f"llama-3-8b, {method}, gradients: more memory"]


def test_another_kind_of_device_is_noted() -> None:
    record = load(ENGINES)
    assert "devices differ" not in compared(record, record, Within())[0]
    other = load(ENGINES)
    other.meta["device"] = "NVIDIA H100 80GB HBM3"
    assert "note: the devices differ" in compared(record, other, Within())[0] and fails(other) == []


def test_the_limits_are_beyond_the_spread_of_the_records() -> None:
    seen: dict[object, tuple[list[float], list[float]]] = {}
    for path in published.RECORDS.glob("*.json"):
        if published.kind_of(path.stem) in ("peers", "heads", "engines", "budgets", "products", "odd", "random"):
            record = load(path)
            for key, row in bars.rows_of(record).items():
                known = seen.setdefault((record.meta["device"], key), ([], []))
                for ratios, ratio in zip(known, (row.burst_ratio, row.sustained_ratio)):
                    ratios += [] if ratio is None else [ratio]
    for which, limit in enumerate(Within()):
        several = [ratios[which] for ratios in seen.values() if len(ratios[which]) > 1]
        assert len(several) > 5 and max(max(ratios) / min(ratios) for ratios in several) < 1 + limit


def test_a_run_takes_its_options_from_the_record() -> None:
    args = run.arguments().parse_args(bars.words_of(load(ENGINES)))
    assert [shape.name for shape in args.shapes] == ["llama-3-8b", "gemma-2-2b"] and args.budgets == [None, 160]
    assert (args.engines, args.rounds, args.minutes, args.peers, args.data) == (
        "auto,mma,portable",
        4,
        1.2,
        "none",
        "none",
    )
    products = bars.words_of(load(published.RECORDS / "products-2026-11-23.json"))
    assert run.arguments().parse_args(products).json is None


def test_methods_of_8_bit_logits_have_the_loss() -> None:
    pytest.importorskip("logitless")
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(32, 64), torch.randn(300, 64) / 8, torch.randint(300, (32,))
    methods = our_methods([0], [""], None, ("loss", "gradients"), [9], fp8=True)
    assert [method.name for method in methods[2:]] == ["logitless fp8", "logitless sparsified 2^-9, fp8"]
    exact = methods[0].loss(hidden, weight, target)
    for method in methods[1:]:
        assert torch.allclose(method.loss(hidden, weight, target), exact, rtol=0.02)


def test_every_engine_has_sparsified_rows() -> None:
    pytest.importorskip("logitless")
    methods = our_methods([None], ["", "mma", "portable"], [9])
    sparsified = [method.name for method in methods if method.threshold == 2**-9]
    assert sparsified == [f"logitless{engine} sparsified 2^-9" for engine in ("", "/mma", "/portable")]


def test_percents_are_parsed() -> None:
    assert parse_within("5%") == (0.05, 0.05) and parse_within("3,12.5%") == (0.03, 0.125)
    for text in ("", "x", "-1%", "nan", "inf", "1,2,3"):
        with pytest.raises(ValueError, match="expected percents such as"):
            parse_within(text)


def test_two_records_are_compared_by_the_command_line(tmp_path: pathlib.Path) -> None:
    slower = changed("logitless/portable loss", burst_ratio=1.3)
    slower.path = tmp_path / "slower.json"
    slower.save()
    words = ["--show", str(slower.path), "--against", str(ENGINES)]
    done = of_run(*words)
    assert done.returncode == 1, done.stderr
    assert "fails: llama-3-8b, logitless/portable loss, loss: after idle slower" in done.stdout
    assert "| llama-3-8b | logitless/portable loss | loss | 1.162 | 1.300 | 1.119 |" in done.stdout
    assert of_run(*words, "--within", "12%").returncode == 0
    for wrong, message in (
        (["--within", "5%"], "--within: expected --against RECORD, too"),
        (["--against", str(tmp_path / "none.json")], "expected a record of python bench/gpu/run.py"),
        (
            ["--against", str(published.RECORDS / "fsdp-2026-11-24.json")],
            "expected a record of python bench/gpu/run.py",
        ),
        (["--against", str(published.RECORDS / "heads-2026-11-20.json")], "expected a record with ratios"),
        (["--against", str(ENGINES), "--within", "much"], "expected percents"),
    ):
        done = of_run(*wrong)
        assert done.returncode == 2 and message in done.stderr, done.stderr


def test_a_run_is_compared_with_a_record(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("logitless")
    first, second, third = (tmp_path / f"{name}.json" for name in ("first", "second", "third"))
    words = ["--device", "cpu", "--shapes", "32x200x16", "--peers", "none", "--data", "none", "--sparsified", "none"]
    made = of_run(*words, "--budgets", "unlimited", "--rounds", "3", "--minutes", "2", "--json", str(first))
    assert made.returncode == 0, made.stderr
    # The second run's record can be compared with in turn.
    for record, against in ((second, first), (third, second)):
        done = of_run("--against", str(against), "--within", "1e9%", "--json", str(record))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "0 of 2 rows fail" in done.stdout and "| 32x200x16 | logitless loss | loss |" in done.stdout
        assert [row.method for row in load(record).rows] == ["logitless loss", "logitless unlimited"]
