"""What of the benchmark can be tested without a GPU: python -m pytest bench/gpu"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time

import pytest
import torch

import bars
import cases
import harness
import host
import mma
import table
from clock import Clock
from data import DATA, make_inputs, use_trained, with_ignored
from harness import Case
from limits import Deadline, StepTimeout, step_limit
from methods import Method, peer_methods
from record import Accuracy, Gemms, Record, Row, load
from reference import make_reference, relative_error
from shapes import GRIDS, Shape, checked_share, parse_budgets, parse_shapes, random_shapes
from timing import ShapeTiming

RUN = pathlib.Path(__file__).resolve().parent / "run.py"
SMALL = Shape("small", 48, 300, 32)


def naive(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), target)


def made_up_record() -> Record:
    record = Record(None, {"device": "none"})
    record.shapes = [Shape(f"v{v}", 8192, v, 4096) for v in (32768, 131072)]
    for shape in record.shapes:
        times = {"logits": 10.0, "d_hidden": 10.0, "d_weight": 10.0}
        record.gemms[shape.name] = Gemms(shape.name, times, times)
        size = shape.gradient_bytes / 2**20
        for method, ours, budget, ms, beyond in (
            ("logitless unlimited", True, None, 30.6, 3000.0),
            ("logitless 160 MiB", True, 160, 45.0, 150.0),
            ("slow peer", False, None, 60.0, 9000.0),
        ):
            row = Row(shape.name, method, "gradients", ours, budget, rounds=5, gradient_mib=size)
            row.burst_ms, row.burst_ratio, row.extra_mib = ms, ms / 30, size + beyond
            record.rows.append(row)
        record.rows.append(Row(shape.name, "absent", "gradients", status="failed", reason="OutOfMemoryError: 2 GB"))
        loss = Row(shape.name, "logitless loss", "loss", True, burst_ms=10.0, burst_ratio=1.0, extra_mib=1.0)
        record.rows.append(loss)
    errors = Accuracy(
        "v32768", "std3", "logitless unlimited", True, "whole, 3 F", "", 1e-7, 4e-3, 3e-3, 2e-3, 1e-3, True
    )
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
    found = with_ignored(inputs, 0.25)
    assert (found.target == -100).sum() == 12 and (inputs.target >= 0).all()
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
    assert reference.loss == pytest.approx(loss.item(), rel=1e-12)
    assert relative_error(hidden.grad[reference.rows], reference.d_hidden) < 1e-12
    assert relative_error(weight.grad[reference.columns], reference.d_weight) < 1e-12
    # two roundings to bf16 of at most 2^-9 each, and no less than a part of one
    for baseline in (reference.baseline_d_hidden, reference.baseline_d_weight):
        assert 2**-12 < baseline < 2**-8


def test_errors_of_nan_never_pass() -> None:
    record = made_up_record()
    record.accuracy[0].d_hidden_error = relative_error(torch.full((2,), float("nan")), torch.ones(2).double())
    assert not [v for v in bars.accuracy_verdicts(record.accuracy[0]) if ": dE" in v.what][0].met


def test_bars() -> None:
    found = {(v.shape, v.what): v.met for v in bars.verdicts(made_up_record())}
    assert found["v32768", "logitless unlimited: time"]
    assert not found["v32768", "logitless 160 MiB: time"]
    assert found["v32768", "logitless 160 MiB: memory"]
    assert found["v32768", "logitless loss: memory"] and found["v32768", "logitless loss: time"]
    assert found["v32768", "against slow peer (gradients)"]
    assert found["v32768", "logitless unlimited: dE on std3"]
    assert not found["v32768", "logitless unlimited: dC on std3"]


def test_bars_of_thinned_gradients() -> None:
    record = made_up_record()
    size = record.shapes[0].gradient_bytes / 2**20
    for data, ratio, mib in (("trained", 0.43, 100.0), ("peaked", 0.41, 130.0), ("std8", 9.0, 1.0)):
        row = Row("v32768", f"thinned {data}", "gradients", True, None, 2.0**-9, data, gradient_mib=size)
        row.burst_ms, row.burst_ratio, row.extra_mib = 1.0, ratio, size + mib
        record.rows.append(row)
    draw = Accuracy("v32768", "trained", "thinned", True, d_hidden_error=0.02, d_weight_error=0.007, threshold=2.0**-9)
    record.accuracy.append(draw)
    found = {v.what: v.met for v in bars.verdicts(record) if v.what.startswith("thinned")}
    assert found["thinned trained: time on trained"] and found["thinned trained: memory"]
    assert not found["thinned peaked: time on peaked"] and not found["thinned peaked: memory"]
    assert "thinned std8: time on std8" not in found and found["thinned: dE on trained"]
    assert not found["thinned: dC on trained"]


def test_a_trained_head_is_read_from_its_file(tmp_path: pathlib.Path) -> None:
    made = make_inputs(SMALL, "std1", "cpu")
    torch.save(dict(zip(("hidden", "weight", "target"), made)), tmp_path / "h.pt")
    shape = use_trained(str(tmp_path / "h.pt"))
    assert shape[1:] == SMALL[1:]
    assert all(torch.equal(a, b) for a, b in zip(make_inputs(shape, "trained", "cpu"), made))
    with pytest.raises(ValueError, match="--trained FILE"):
        make_inputs(SMALL, "trained", "cpu")


def test_record_and_table_and_plots_survive_a_round_trip(tmp_path: pathlib.Path) -> None:
    record = made_up_record()
    record.path = tmp_path / "record.json"
    record.save()
    again = load(str(record.path))
    assert again.to_json() == record.to_json()
    text = table.render(again)
    assert "failed: OutOfMemoryError: 2 GB" in text and "peer x is not available" in text and "1.020" in text
    pytest.importorskip("matplotlib")
    from plots import draw_all

    assert len(draw_all(again, str(tmp_path / "plots"))) == 2  # time against memory of each shape


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
    found = random_shapes(40, 1)
    assert found == random_shapes(40, 1) and found != random_shapes(40, 2)
    assert any(shape.vocab % 8 for shape in found) and any(shape.hidden % 8 for shape in found)
    assert parse_shapes(found[0].name) == found[:1]


def test_products_of_an_odd_shape_are_those_of_a_padded_head() -> None:
    record = Record(None, {})
    shape = Shape("odd", 33, 301, 30)
    timing = ShapeTiming(record, Clock("cpu"), shape, make_inputs(shape, "std1", "cpu"))
    assert [cell.name for cell in timing.cells] == ["logits", "d_hidden", "d_weight"]
    timing.add(Method("good", naive), 30)
    assert [row.status for row in record.rows] == ["ok", "ok"]


def test_step_limit() -> None:
    with pytest.raises(StepTimeout), step_limit(0.05):
        time.sleep(2)


def test_smoke_run_on_the_cpu(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out.json"
    words = ["--device", "cpu", "--shapes", "32x200x16", "--peers", "canonical", "--rounds", "3", "--minutes", "2"]
    done = subprocess.run(
        [sys.executable, str(RUN), *words, "--json", str(out), "--data", "std1"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    assert [row["status"] for row in content["rows"] if row["method"] == "canonical"] == ["ok", "ok"]
    assert "| canonical | fwd + bwd |" in done.stdout


def test_smoke_run_of_host_times(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out.json"
    words = ["--device", "cpu", "--shapes", "32x200x16", "--peers", "canonical", "--json", str(out), "--minutes", "4"]
    script = RUN.with_name("host.py")
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    record = load(str(out))
    assert "python bench/gpu/host.py --device cpu" in done.stdout
    eager = [row for row in record.rows if row.method == "canonical"]
    assert [row.pass_ for row in eager] == ["loss", "gradients"] and all(row.host_us for row in eager)
    assert all(row.back_to_back_ms for row in eager) and "| 32x200x16 |" in done.stdout
    if "logitless is not available" not in done.stdout:
        assert [row.budget_mib for row in record.rows if row.pass_ == "new N"] == [None, 256]


def test_bars_of_host_times() -> None:
    record = made_up_record()
    record.rows.clear()
    for method, us, together in (("canonical", 280.0, 0.32), ("torch.compile", 590.0, 0.77), ("logitless", 200.0, 0.5)):
        row = Row("v32768", method, "gradients", method == "logitless", host_us=us, back_to_back_ms=together)
        record.rows.append(row)
    record.rows.append(Row("v32768", "logitless", "new N", True, 256, host_us=310.0))
    assert host.missed_bars(record) == [
        "v32768, logitless, gradients: 0.50 ms, canonical 0.32",
        "v32768, logitless 256 MiB, new N: 310 us, bar 300",
    ]
    assert "| 0.50 (200) |" in host.render(record)


@pytest.mark.parametrize("name", cases.SETS)
def test_every_set_of_cases_runs(name: str) -> None:
    pytest.importorskip("logitless")
    if name == "trl":
        pytest.importorskip("trl")
    words = [name, "--device", "cpu", "--shapes", "24x200x16", "--rounds", "2"]
    done = subprocess.run([sys.executable, str(RUN.with_name("cases.py")), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(lines) > 2 and all(len(line) == 5 for line in lines) and all(float(line[1]) >= 0 for line in lines[1:])


def test_chosen_cases_have_what_they_are_compared_with() -> None:
    all_cases = [Case("F", int), Case("plain", int, ("F",)), Case("top_k 1", int, ("plain", "F")), Case("other", int)]
    assert [case.name for case in cases.chosen(all_cases, "top")] == ["F", "plain", "top_k 1"]


def test_ratios_are_of_the_same_round_and_memory_is_beyond_gradients() -> None:
    held: list[torch.Tensor] = []
    both = [Case("none", int), Case("some", lambda: held.append(torch.ones(1 << 22)), ("none",), 1 << 20)]
    lines = harness.measured(Clock("cpu"), both, 3)
    cells = lines[3].strip("| ").split(" | ")
    # A tensor of 16 MiB without 1 MiB of gradients; the interpreter may take some pages beside it.
    assert cells[0] == "some" and cells[3].endswith(" x none") and 15 <= int(cells[4]) <= 16, lines
    assert harness.ratio_of([2.0, 9.0, 4.0], [1.0, 1.0, 2.0]) == 2.0


def test_smoke_run_on_a_trained_head(tmp_path: pathlib.Path) -> None:
    torch.save(dict(zip(("hidden", "weight", "target"), make_inputs(SMALL, "std1", "cpu"))), tmp_path / "h.pt")
    words = ["--device", "cpu", "--trained", str(tmp_path / "h.pt"), "--peers", "none", "--thinned", "4"]
    done = subprocess.run(
        [sys.executable, str(RUN), *words, "--rounds", "3", "--minutes", "2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "### trained: N 48, V 300, D 32" in done.stdout
    if "logitless is not available" not in done.stdout:
        assert "| trained | logitless thinned 2^-4 |" in done.stdout
    missing = subprocess.run([sys.executable, str(RUN), "--trained", "nowhere.pt"], capture_output=True, text=True)
    assert missing.returncode == 2 and "--trained: expected a file, or --train-on FOLDER" in missing.stderr


def test_a_hanging_run_ends_with_its_results(tmp_path: pathlib.Path) -> None:
    words = ["--device", "cpu", "--shapes", "4096x65536x256", "--peers", "none", "--minutes", "0.15"]
    done = subprocess.run([sys.executable, str(RUN), *words], capture_output=True, text=True, timeout=120)
    assert "### Bars" in done.stdout and ("time is up" in done.stdout or done.returncode == 0)


def made_up_round(slower: float) -> list[dict]:
    return [
        {
            "what": "ceiling",
            "device": "whole",
            "blocks": 132,
            "flop": 6e12,
            "seconds": [0.01, 0.01, 0.02],
            "burst_seconds": [0.005],
        },
        {
            "what": "loss",
            "device": "whole",
            "blocks": 132,
            "flop": 5.4e12,
            "seconds": [0.01 * slower],
            "burst_seconds": [0.01],
        },
        {"what": "Triton's product", "device": "whole", "flop": 5e12, "why_not": "no peer"},
    ]


def test_shares_of_the_ceiling_of_the_same_round(tmp_path):
    rounds = [made_up_round(slower) for slower in (1.0, 2.0, 1.0)]
    assert mma.shares(rounds) == [
        ["whole", "ceiling", "1200", "1.000", "0.450", "600", "1.000", "0.900"],
        ["whole", "loss", "540", "0.450", "1.000", "540", "0.900", "1.000"],
    ]
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"date": "d", "device": "none", "command": "c", "shapes": {"s": rounds}}))
    command = [sys.executable, str(RUN.parent / "mma.py"), "--show", str(record)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "| whole | loss | 540 | 0.450 | 1.000 | 540 | 0.900 | 1.000 |" in shown and "no peer" in shown


def test_the_program_that_fails_is_named(tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho no device >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(SystemExit, match="exit status 1: no device"):
        mma.measured(program, SMALL, 1.0)
