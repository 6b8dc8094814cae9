"""Tests of the benchmark that need no GPU: python -m pytest bench/gpu"""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

import cases
import harness
import mma
import table
from clock import Clock
from data import DATA, make_inputs, use_trained, with_ignored
from harness import Case
from limits import Deadline, StepTimeout, step_limit
from methods import Method
from peer_heads import peer_methods
from record import Accuracy, Gemms, Record, Row, load
from reference import make_reference, relative_error
from shapes import GRIDS, Shape, checked_share, parse_budgets, parse_shapes, random_shapes
from timing import ShapeTiming

RUN = pathlib.Path(__file__).resolve().parent / "run.py"
SMALL = Shape("small", 48, 300, 32)


def naive(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), target)


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN.with_name(script)), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def made_up_record() -> Record:
    record = Record(None, {"device": "none"})
    record.shapes = [SMALL]
    times = {"logits": 10.0, "d_hidden": 10.0, "d_weight": 10.0}
    record.gemms["small"] = Gemms("small", times, times)
    row = Row("small", "logitless unlimited", "gradients", True, rounds=5, burst_ms=30.6, burst_ratio=1.02)
    row.gradient_mib, row.extra_mib = 100.0, 3100.0
    record.rows += [row, Row("small", "absent", "gradients", status="failed", reason="OutOfMemoryError: 2 GB")]
    errors = Accuracy("small", "std3", row.method, True, "whole, 3 F", "", 1e-7, 4e-3, 3e-3, 2e-3, 1e-3, True)
    record.accuracy.append(errors)
    record.notes.append("peer x is not available")
    return record


def test_shapes_and_budgets_are_parsed() -> None:
    assert parse_shapes("llama-3-8b,64x500x32")[1] == Shape("64x500x32", 64, 500, 32)
    assert parse_budgets("unlimited,default,2560") == [None, 0, 2560]
    assert len(GRIDS["heads"]) == 10 and len(GRIDS["nvidia"]) == 24
    for text in ("gpt-9", "1x2", "0x5x5", ""):
        with pytest.raises(ValueError, match="expected"):
            parse_shapes(text)
    with pytest.raises(ValueError, match="expected MiB"):
        parse_budgets("-3")
    with pytest.raises(ValueError, match="--peers: expected"):
        peer_methods("nobody")
    with pytest.raises(ValueError, match="expected a share"):
        checked_share(1.0)


def test_ignored_tokens_are_that_share() -> None:
    inputs = make_inputs(SMALL, "std1", "cpu")
    ignored = with_ignored(inputs, 0.25)
    assert (ignored.target == -100).sum() == 12 and (inputs.target >= 0).all()
    assert with_ignored(inputs, 0.0).target.equal(inputs.target)


@pytest.mark.parametrize("kind", DATA)
def test_reference_equals_autograd_in_fp64(kind: str) -> None:
    inputs = make_inputs(SMALL, kind, "cpu")
    reference = make_reference(inputs, rows=16, columns=40)
    hidden = inputs.hidden.double().requires_grad_()
    weight = inputs.weight.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(hidden @ weight.T, inputs.target)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    assert reference.outputs[0].item() == pytest.approx(loss.item(), rel=1e-12)
    assert relative_error(hidden.grad[reference.rows], reference.d_hidden) < 1e-12
    assert relative_error(weight.grad[reference.columns], reference.d_weight) < 1e-12
    # Two roundings to bf16 are at most 2^-9 each, and at least part of one occurs.
    for baseline in (reference.baseline_d_hidden, reference.baseline_d_weight):
        assert 2**-12 < baseline < 2**-8


def test_a_trained_head_is_read_from_its_file(tmp_path: pathlib.Path) -> None:
    made = make_inputs(SMALL, "std1", "cpu")
    torch.save(dict(zip(("hidden", "weight", "target"), made)), tmp_path / "h.pt")
    shape = use_trained(str(tmp_path / "h.pt"))
    assert shape[1:] == SMALL[1:]
    assert all(torch.equal(a, b) for a, b in zip(make_inputs(shape, "trained", "cpu"), made))
    with pytest.raises(ValueError, match="--trained FILE"):
        make_inputs(SMALL, "trained", "cpu")


def test_record_and_table_survive_a_round_trip(tmp_path: pathlib.Path) -> None:
    record = made_up_record()
    record.path = tmp_path / "record.json"
    record.save()
    again = load(str(record.path))
    assert again.to_json() == record.to_json()
    text = table.render(again)
    assert "| logitless unlimited | fwd + bwd | 30.60 | 1.020 | - | - | 3100.0 | 3000.0 |" in text
    assert "failed: OutOfMemoryError: 2 GB" in text and "peer x is not available" in text
    assert "| std3 | logitless unlimited | fwd + bwd | 1.0e-07 | - | 4.00e-03 | 2.00 | 3.00e-03 | 3.00 | true |" in text


def test_failing_and_skipped_methods_are_reported() -> None:
    def refuse(*_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 9 GB")

    def hang(*_: torch.Tensor) -> torch.Tensor:
        time.sleep(5)
        raise AssertionError("not reached")

    record = Record(None, {})
    timing = ShapeTiming(record, Clock("cpu"), SMALL, make_inputs(SMALL, "std1", "cpu"))
    timing.add(Method("good", naive), 30)
    timing.add(Method("refuses", refuse, passes=("loss",)), 30)
    timing.add(Method("hangs", hang, passes=("loss",)), 0.2)
    timing.add(Method("late", naive, passes=("loss",)), 0)
    timing.run(4, Deadline(time.monotonic(), 30))
    rows = {(row.method, row.pass_): row for row in record.rows}
    assert rows["good", "gradients"].rounds >= 3 and rows["good", "loss"].sustained_ratio is not None
    assert rows["refuses", "loss"].status == "failed" and "9 GB" in rows["refuses", "loss"].reason
    assert rows["hangs", "loss"].status == "failed" and "StepTimeout" in rows["hangs", "loss"].reason
    assert rows["late", "loss"].status == "skipped"


def test_random_shapes_are_the_same_again_and_not_all_even() -> None:
    shapes = random_shapes(40, 1)
    assert shapes == random_shapes(40, 1) and shapes != random_shapes(40, 2)
    assert any(shape.vocab % 8 for shape in shapes) and any(shape.hidden % 8 for shape in shapes)
    assert parse_shapes(shapes[0].name) == shapes[:1]


def test_products_of_an_odd_shape_are_those_of_a_padded_head() -> None:
    record = Record(None, {})
    shape = Shape("odd", 33, 301, 30)
    timing = ShapeTiming(record, Clock("cpu"), shape, make_inputs(shape, "std1", "cpu"))
    assert [cell.name for cell in timing.cells] == ["logits", "d_hidden", "d_weight"]
    timing.add(Method("good", naive), 30)
    assert [row.status for row in record.rows] == ["ok", "ok"]


def test_a_limit_ends_what_it_holds_leaves_no_timer_and_does_not_nest() -> None:
    with pytest.raises(StepTimeout, match="longer than 0.05 s"), step_limit(0.05):
        time.sleep(10)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with step_limit(10), pytest.raises(RuntimeError, match="a step has a limit already"), step_limit(1):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_smoke_run_on_the_cpu(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out.json"
    words = ["--device", "cpu", "--shapes", "32x200x16", "--peers", "canonical", "--rounds", "3", "--minutes", "2"]
    done = run("run.py", *words, "--json", str(out), "--data", "std1")
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    assert [row["status"] for row in content["rows"] if row["method"] == "canonical"] == ["ok", "ok"]
    assert "| canonical | fwd + bwd |" in done.stdout


def test_smoke_run_of_host_times(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out.json"
    words = ["--device", "cpu", "--shapes", "32x200x16", "--peers", "canonical", "--json", str(out), "--minutes", "4"]
    done = run("host.py", *words)
    assert done.returncode == 0, done.stderr
    record = load(str(out))
    assert "python bench/gpu/host.py --device cpu" in done.stdout
    assert "us of a call (of logitless_run), 8x" in done.stdout
    eager = [row for row in record.rows if row.method == "canonical"]
    assert [row.pass_ for row in eager] == ["loss", "gradients"] and all(row.host_us for row in eager)
    assert all(row.back_to_back_ms for row in eager) and "| 32x200x16 |" in done.stdout


@pytest.mark.parametrize("name", cases.SETS)
def test_every_set_of_cases_runs(name: str) -> None:
    pytest.importorskip("logitless")
    if name == "trl":
        pytest.importorskip("trl")
    done = run("cases.py", name, "--device", "cpu", "--shapes", "24x200x16", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(lines) > 2 and all(len(line) == 5 for line in lines) and all(float(line[1]) >= 0 for line in lines[1:])


def test_ratios_are_of_the_same_round_and_memory_is_beyond_gradients() -> None:
    held: list[torch.Tensor] = []
    both = [Case("none", int), Case("some", lambda: held.append(torch.ones(1 << 22)), ("none",), 1 << 20)]
    lines = harness.measured(Clock("cpu"), both, 3)
    cells = lines[3].strip("| ").split(" | ")
    # The tensor has 16 MiB, and 1 MiB of gradients is subtracted. The interpreter may allocate some pages besides.
    assert cells[0] == "some" and cells[3].endswith(" x none") and 15 <= int(cells[4]) <= 16, lines
    assert harness.ratio_of({0: 4.0, 1: 9.0, 2: 6.0, 3: 1.0}, {0: 1.0, 1: 1.0, 2: 2.0}, {0: 1.0, 2: 1.0, 3: 1.0}) == 2.0
    assert harness.ratio_of({0: 4.0}, {1: 1.0}) is harness.ratio_of({0: 4.0}) is None


def test_smoke_run_on_a_trained_head(tmp_path: pathlib.Path) -> None:
    torch.save(dict(zip(("hidden", "weight", "target"), make_inputs(SMALL, "std1", "cpu"))), tmp_path / "h.pt")
    words = ["--device", "cpu", "--trained", str(tmp_path / "h.pt"), "--peers", "none", "--sparsified", "4"]
    done = run("run.py", *words, "--rounds", "3", "--minutes", "2")
    assert done.returncode == 0, done.stderr
    assert "### trained: N 48, V 300, D 32" in done.stdout
    if "logitless is not available" not in done.stdout:
        assert "| trained | logitless sparsified 2^-4 |" in done.stdout
    missing = run("run.py", "--trained", "nowhere.pt")
    assert missing.returncode == 2 and "--trained: expected a file, or --train-on FOLDER" in missing.stderr


def test_a_hanging_run_ends_with_its_results(tmp_path: pathlib.Path) -> None:
    done = run("run.py", "--device", "cpu", "--shapes", "4096x65536x256", "--peers", "none", "--minutes", "0.15")
    assert "### 4096x65536x256" in done.stdout and ("time is up" in done.stdout or done.returncode == 0)


def made_up_round(slower: float) -> list[dict]:
    ceiling = {"what": "ceiling", "flop": 6e12, "seconds": [0.01, 0.01, 0.02], "burst_seconds": [0.005]}
    loss = {"what": "loss", "flop": 5.4e12, "seconds": [0.01 * slower], "burst_seconds": [0.01]}
    triton = {"what": "Triton's product", "flop": 5e12, "why_not": "no peer"}
    return [{"device": "whole"} | measured for measured in (ceiling, loss, triton)]


def test_shares_of_the_ceiling_of_the_same_round(tmp_path):
    rounds = [made_up_round(slower) for slower in (1.0, 2.0, 1.0)]
    assert mma.shares(rounds) == [
        ["whole", "ceiling", "1200", "1.000", "0.450", "600", "1.000", "0.900"],
        ["whole", "loss", "540", "0.450", "1.000", "540", "0.900", "1.000"],
    ]
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"date": "d", "device": "none", "command": "c", "shapes": {"s": rounds}}))
    shown = run("mma.py", "--show", str(record)).stdout
    assert "| whole | loss | 540 | 0.450 | 1.000 | 540 | 0.900 | 1.000 |" in shown and "no peer" in shown


def test_the_program_that_fails_is_named(tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho no device >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(SystemExit, match="exit status 1: no device"):
        mma.measured(program, SMALL, 1.0)
