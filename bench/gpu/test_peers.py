"""Tests of the peers that need no GPU: how they are called, what they refuse, and their tables."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import subprocess
import sys
import time
import types
from typing import Any

import pytest
import torch

import harness
import peer_heads
import published
import run
from accuracy import check_shape
from bench import measure_shape
from clock import Clock
from data import make_inputs
from limits import Deadline, DeviceFault
from methods import Method, Refused, our_methods
from peer_heads import BLACKWELL, HOPPER, peer_methods
from record import PASSES, Accuracy, Gemms, Record, Row, load
from reference import make_reference, relative_error
from shapes import Shape
from timing import ShapeTiming

SMALL = Shape("small", 48, 300, 32)
ROUND = Shape("round", 128, 256, 64)  # sizes that every peer takes


@pytest.mark.parametrize("pass_", ["tokens", "entropy"])
def test_reference_for_upstream_gradients_equals_autograd_in_fp64(pass_: str) -> None:
    inputs = make_inputs(SMALL, "std3", "cpu")
    upstream = inputs.upstream(pass_)
    reference = make_reference(inputs, upstream, rows=16, columns=40)
    hidden, weight = (part.double().requires_grad_() for part in inputs[:2])
    log_p = torch.log_softmax(hidden @ weight.T, dim=1)
    losses = torch.nn.functional.nll_loss(log_p, inputs.target, reduction="none")
    outputs = (losses, -(log_p.exp() * log_p).sum(1))[: len(upstream)]
    torch.autograd.backward(outputs, [gradient.double() for gradient in upstream])
    outputs = tuple(output.detach() for output in outputs)
    assert hidden.grad is not None and weight.grad is not None and len(outputs) == len(reference.outputs)
    assert all(relative_error(got, expected) < 1e-12 for got, expected in zip(outputs, reference.outputs))
    assert relative_error(hidden.grad[reference.rows], reference.d_hidden) < 1e-12
    assert relative_error(weight.grad[reference.columns], reference.d_weight) < 1e-12
    for baseline in (reference.baseline_d_hidden, reference.baseline_d_weight):
        assert 2**-12 < baseline < 2**-8


def errors(methods: list[Method]) -> dict[tuple[str, str], Accuracy]:
    record = Record(None, {})
    check_shape(record, Clock("cpu"), SMALL, ["std3"], methods, Deadline(time.monotonic(), 120))
    return {(item.method, item.pass_): item for item in record.accuracy}


def test_errors_of_every_pass_are_those_of_eager_in_bf16() -> None:
    """Each error is at most twice eager's, and a rounding to bf16, in which some keep their outputs."""
    pytest.importorskip("logitless")
    ours = our_methods([None], [""], None, PASSES)
    peers, _ = peer_methods("canonical,torch-fused,trl,liger-cutedsl", PASSES)  # what runs on the CPU, if installed
    seen = errors(ours + peers)
    assert ("logitless unlimited", "entropy") in seen and ("logitless loss", "loss") in seen
    for (method, pass_), item in seen.items():
        refuses = (method.startswith("torch fused") and pass_ == "entropy") or method == "liger cutedsl"
        assert bool(item.reason) == refuses, (method, pass_, item.reason)
        eager = seen["canonical", pass_.replace("loss", "gradients")]
        for name in ("loss_error", "entropy_error", "d_hidden_error", "d_weight_error"):
            got, bound = getattr(item, name), getattr(eager, name)
            assert refuses or got is None or got <= 2 * bound + 2**-8, (method, pass_, name, got, bound)
        assert refuses or (item.entropy_error is not None) == (pass_ == "entropy")


def rows_of(*methods: Method) -> dict[tuple[str, str], Row]:
    record = Record(None, {})
    timing = ShapeTiming(record, Clock("cpu"), SMALL, make_inputs(SMALL, "std1", "cpu"))
    for method in methods:
        timing.add(method, 30)
    timing.run(3, Deadline(time.monotonic(), 30))
    return {(row.method, row.pass_): row for row in record.rows}


def test_what_a_method_refuses_is_no_failure() -> None:
    def raising(error: Exception) -> Any:
        def call(*_: torch.Tensor) -> torch.Tensor:
            raise error

        return call

    eager = peer_methods("canonical", PASSES)[0][0]
    mean = Method("mean", eager.loss, passes=PASSES)
    one = ("gradients",)
    narrow = Method("narrow", raising(NotImplementedError("M must be a multiple of 128")), passes=one)
    asserts = Method("asserts", raising(AssertionError()), passes=one)
    broken = Method("broken", raising(ValueError("no such argument")), passes=one)
    rows = rows_of(eager, mean, narrow, asserts, broken)
    assert all(rows["canonical", pass_].status == "ok" and rows["canonical", pass_].rounds for pass_ in PASSES)
    assert {pass_: rows["mean", pass_].status for pass_ in PASSES[:2]} == {"loss": "ok", "gradients": "ok"}
    assert rows["mean", "tokens"].reason == "it returns no loss for each token"
    assert rows["mean", "entropy"].reason == "it returns no entropy" and rows["mean", "entropy"].status == "refused"
    assert rows["narrow", "gradients"].reason == "NotImplementedError: M must be a multiple of 128"
    assert rows["asserts", "gradients"].reason == "AssertionError: raise error"
    statuses = [rows[name, "gradients"].status for name in ("narrow", "asserts", "broken")]
    assert statuses == ["refused", "refused", "failed"]
    ours = Row("", "ours", "gradients", ours=True)
    harness.tried(ours, 30, raising(NotImplementedError("ours takes all")))
    assert ours.status == "failed"


def test_sizes_and_devices_of_peers_are_checked_before_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape, expected in (
        ("quack", Shape("", 128, 300, 64), "N, V and D that are multiples of 8, got (128, 300, 64)"),
        ("quack", ROUND, "compute capability 9.0, bf16, V a multiple of 128 and D of 8"),
        ("liger-cutedsl", ROUND, "compute capability 9.0 or 10.0, got (0, 0)"),
        ("liger-cutile", ROUND, "compute capability 9.0, got (0, 0)"),
        ("megatron", ROUND, "compute capability 10, got (0, 0)"),
    ):
        methods, missing = peer_methods(name)
        inputs = make_inputs(shape, "std1", "cpu")
        reasons = []
        for method in methods:
            row = Row("", method.name, "gradients")
            harness.tried(row, 30, lambda: method.outputs("gradients", *inputs))
            reasons += [row.reason] if row.status == "refused" else []
        assert missing or f"expected {expected}" in " ".join(reasons), (name, reasons)


def test_missing_peers_are_notes_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    methods, missing = peer_methods("fla,torch-fused,canonical")
    assert [method.name for method in methods] == ["canonical"]
    assert missing[0].startswith("peer fla is not available: ModuleNotFoundError")
    assert missing[1].endswith("F.linear_cross_entropy needs PyTorch 2.13 or newer, this is 2.11.0")


class Called(Exception):
    """Holds the arguments of a call."""


def record_arguments(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """Lets a library's function, or an autograd function's ``apply``, check its arguments and raise them."""
    owner = importlib.import_module(module)
    function = getattr(owner, name)
    target = getattr(function, "__self__", function)  # of a bound ``apply``
    of_class = isinstance(target, type) and issubclass(target, torch.autograd.Function)
    signature = inspect.signature(target.forward if of_class else getattr(function, "apply", function))

    def call(*args: Any, **options: Any) -> None:
        bound = signature.bind(*([None] if of_class else []), *args, **options)
        bound.apply_defaults()
        raise Called(bound.arguments)

    call.apply = call  # type: ignore[attr-defined]
    monkeypatch.setattr(owner, name, call)


LIGER, CUTEDSL, CUTILE = "liger_kernel.ops", "liger_kernel.ops.cutedsl.ops", "liger_kernel.ops.cutile.ops"
FLCE, SCALED = "LigerFusedLinearCrossEntropyFunction", "LigerFusedLinearScaledCrossEntropyFunction"
# Peer, what it calls, device, method, pass, and arguments that make the variant.
CALLS = [
    ("liger", f"{LIGER}.fused_linear_cross_entropy", FLCE, HOPPER, "liger", "gradients", {"chunk_mem_const": 1}),
    ("liger", f"{LIGER}.fused_linear_cross_entropy", FLCE, HOPPER, "liger", "tokens", {"reduction": "none"}),
    ("liger", f"{LIGER}.fused_linear_cross_entropy", FLCE, HOPPER, "liger fp32", "gradients",
     {"accum_dtype": torch.float32, "ignore_index": -100, "softcap": None, "ce_impl": None}),
    ("liger", f"{LIGER}.fused_linear_cross_entropy", FLCE, HOPPER, "liger larger chunk", "gradients",
     {"chunk_mem_const": 32, "reduction": "mean"}),
    ("liger-cutedsl", f"{CUTEDSL}.fused_linear_cross_entropy_sm90", "liger_fused_linear_cross_entropy_sm90", HOPPER,
     "liger cutedsl", "gradients", {"reduction": "mean"}),
    ("liger-cutedsl", f"{CUTEDSL}.fused_linear_cross_entropy", FLCE, BLACKWELL, "liger cutedsl", "gradients",
     {"reduction": "mean"}),
    ("liger-cutedsl", f"{LIGER}.fused_linear_scaled_cross_entropy", SCALED, HOPPER, "liger scaled", "entropy",
     {"temperature": 1.0, "ignore_index": -100, "return_entropy": True}),
    ("liger-cutile", f"{CUTILE}.fused_linear_cross_entropy", FLCE, HOPPER, "liger cutile", "gradients",
     {"reduction": "mean"}),
    ("liger-cutile", f"{CUTILE}.fused_linear_scaled_cross_entropy", SCALED, HOPPER, "liger cutile scaled", "tokens",
     {"temperature": 1.0, "ignore_index": -100, "return_entropy": False}),
    ("quack", "quack.linear_cross_entropy", "chunked_linear_cross_entropy", HOPPER, "quack", "gradients",
     {"chunk_size": 4096, "tuned": True, "use_scaled_exp": False}),
    ("quack", "quack.linear_cross_entropy", "chunked_linear_cross_entropy", HOPPER, "quack untuned, one chunk",
     "gradients", {"chunk_size": 128, "tuned": False}),
    ("quack", "quack.linear_cross_entropy", "scaled_exp_lce_supported", HOPPER, "quack scaled-exp", "gradients",
     {"chunk_size": 4096, "reduction": "mean"}),
    ("fla", "fla.modules.fused_linear_cross_entropy", "fused_linear_cross_entropy_loss", HOPPER, "fla", "gradients",
     {"reduction": "mean", "accumulate_grad_in_fp32": True}),
    ("verl", "verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy", HOPPER, "verl whole dz", "entropy",
     {"temperature": 1.0, "reduction": "none", "dist_process_group": None}),
    ("trl", "trl.kernels", "ChunkedLogProbFunction", HOPPER, "trl", "entropy",
     {"temperature": 1.0, "outputs": ("log_probs", "entropy"), "chunk_size": 32768, "bias": None}),
    ("apple", "cut_cross_entropy", "linear_cross_entropy", HOPPER, "apple cce_exact", "tokens",
     {"impl": "cce_exact", "reduction": "none"}),
    ("apple", "cut_cross_entropy", "linear_cross_entropy", HOPPER, "apple torch_compile", "gradients",
     {"impl": "torch_compile", "reduction": "mean"}),
    ("megatron", "megatron.core.fusions.fused_linear_cross_entropy", "linear_cross_entropy", BLACKWELL, "megatron",
     "tokens", {"reduction": "none", "tp_group": None}),
    ("torch-fused", "torch.nn.functional", "linear_cross_entropy", HOPPER, "torch fused 2048 rows", "tokens",
     {"reduction": "none"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("peer", "module", "name", "capability", "method", "pass_", "expected"), CALLS, ids=lambda word: str(word)[:20]
)
def test_calls_fit_the_signatures_of_installed_peers(
    peer: str,
    module: str,
    name: str,
    capability: peer_heads.Capability,
    method: str,
    pass_: str,
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, missing = peer_methods(peer)
    if missing:
        pytest.skip(missing[0])
    record_arguments(monkeypatch, module, name)
    monkeypatch.setattr(peer_heads, "capability_of", lambda tensor: capability)
    methods = {each.name: each for each in peer_methods(peer)[0]}
    inputs = make_inputs(ROUND, "std1", "cpu")
    with pytest.raises(Called) as called:
        methods[method].outputs(pass_, *inputs)
    arguments = called.value.args[0]
    assert {key: arguments[key] for key in expected} == expected
    given = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    assert all(any(got.equal(each) for got in given) for each in inputs[: 2 if name.startswith("scaled_exp") else 3])
    if method == "verl whole dz":
        kernels = sys.modules["verl.utils.kernel.kernels"]
        assert kernels._config._backward == kernels.BackwardEnum._Total_Separate
    if peer == "torch-fused":
        assert arguments["options"].batch_chunk_size == 2048


@pytest.mark.parametrize(
    ("tokens", "hidden", "rows"), [(256, 64, 4096), (4096, 4096, 2048), (256, 128, 256), (128, 128, 0)]
)
def test_quack_gets_no_chunk_of_as_many_rows_as_the_hidden_size(
    tokens: int, hidden: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(*_: Any, **options: Any) -> None:
        raise Called(options)

    package, module = types.ModuleType("quack"), types.ModuleType("quack.linear_cross_entropy")
    vars(module).update(chunked_linear_cross_entropy=called, scaled_exp_lce_supported=lambda *_: True)
    monkeypatch.setitem(sys.modules, "quack", package)
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy", module)
    methods = {method.name: method for method in peer_methods("quack")[0]}
    inputs = make_inputs(Shape("", tokens, 256, hidden), "std1", "cpu")
    method = methods["quack scaled-exp, one chunk"] if rows in (256, 0) else methods["quack scaled-exp"]
    with pytest.raises(Called if rows else Refused) as error:
        method.outputs("gradients", *inputs)
    if rows:
        assert error.value.args[0]["chunk_size"] == rows
    else:
        assert str(error.value) == "expected a chunk of other than D rows, got 128"


def test_packages_without_their_init(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy" / "part").mkdir(parents=True)
    (tmp_path / "needy" / "__init__.py").write_text("import a_package_that_nobody_has")
    (tmp_path / "needy" / "part" / "__init__.py").write_text("answer = 42")
    monkeypatch.syspath_prepend(str(tmp_path))
    peer_heads.without_init("needy")
    assert importlib.import_module("needy.part").answer == 42
    with pytest.raises(ModuleNotFoundError, match="No module named 'nobody'"):
        peer_heads.without_init("nobody")
    for name in ("needy", "needy.part"):
        monkeypatch.delitem(sys.modules, name)


def test_options_of_peers() -> None:
    parse = run.arguments().parse_args
    assert parse([]).peer_errors and parse(["--peer-errors"]).peer_errors
    assert not parse(["--no-peer-errors"]).peer_errors
    assert parse([]).passes == ("loss", "gradients") and parse(["--passes", "entropy"]).passes == ("entropy",)
    with pytest.raises(ValueError, match="expected names out of loss, gradients, tokens, entropy; got 'all'"):
        run.parse_passes("all")


def test_a_run_has_every_pass_with_errors_and_what_is_refused(tmp_path: pathlib.Path) -> None:
    words = ["--device", "cpu", "--shapes", "32x200x16", "--peers", "canonical,torch-fused", "--rounds", "3"]
    words += ["--passes", ",".join(PASSES), "--data", "std1", "--sparsified", "4", "--budgets", "unlimited"]
    command = [sys.executable, str(pathlib.Path(run.__file__)), *words, "--json", str(tmp_path / "a.json")]
    done = subprocess.run([*command, "--minutes", "3"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    record = load(tmp_path / "a.json")
    checked = {(item.method, item.pass_) for item in record.accuracy}
    for row in record.rows:
        refused = row.method.startswith("torch fused") and row.pass_ == "entropy"
        assert row.status == ("refused" if refused else "ok"), row
        key = (row.method, "gradients" if row.pass_ == "loss" and "loss" not in row.method else row.pass_)
        assert (key in checked) != refused
    assert {row.pass_ for row in record.rows if row.method == "canonical"} == set(PASSES)
    assert "refused: it returns no entropy" in done.stdout and "| canonical | with entropy |" in done.stdout


def test_a_run_goes_on_without_a_peer_that_broke_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--device", "cpu", "--data", "none", "--leave-out", "a b", "--minutes", "9"]
    args, broken = run.arguments().parse_args(words), []
    monkeypatch.setattr(Clock, "works", lambda clock: not broken)
    (eager,), _ = peer_methods("canonical")

    def breaks(*inputs: torch.Tensor) -> torch.Tensor:
        broken.append(1)
        return eager.loss(*inputs)

    bad, record = Method("bad", breaks), Record(None, {})
    with pytest.raises(DeviceFault, match="^bad$") as fault:
        measure_shape(record, args, SMALL, [], [eager, bad, eager], Deadline(time.monotonic(), 60))
    assert [row.method for row in record.rows] == ["canonical"] * 2 + ["bad"] * 2
    again = run.again_without(args, str(fault.value), 90)
    assert again == ["--leave-out", "a b;bad", "--minutes", "7.50"]
    again = ["--leave-out", "canonical;other", "--shapes", "16x64x16", "--peers", "canonical", "--data", "none"]
    done = subprocess.run([sys.executable, run.__file__, "--device", "cpu", *again, "--minutes", "1"],
                          capture_output=True, text=True, timeout=200)  # fmt: skip
    assert done.returncode == 0 and "- canonical is left out" in done.stdout and "| canonical |" not in done.stdout


def test_the_tables_of_peers() -> None:
    record = Record(None, {})
    record.shapes = [SMALL]
    parts = {"logits": 10.0, "d_hidden": 10.5, "d_weight": 9.5}
    record.gemms = {"small": Gemms("small", parts, {name: 1.1 * ms for name, ms in parts.items()})}

    def row(method: str, pass_: str, ms: float, mib: float, ours: bool = False) -> Row:
        matmuls = 10 if pass_ == "loss" else 30
        times = {"burst_ms": ms, "burst_ratio": ms / matmuls, "sustained_ms": 1.1 * ms, "sustained_ratio": ms / matmuls}
        gradient_mib = 0.0 if pass_ == "loss" else 10.0
        return Row(
            "small", method, pass_, ours, rounds=1, extra_mib=mib + gradient_mib, gradient_mib=gradient_mib, **times
        )

    late = Row("small", "verl", "gradients", status="skipped", reason="no time left", extra_mib=60, gradient_mib=10)
    no_entropy = Row("small", "liger", "entropy", status="refused", reason="it returns no entropy")
    broken = Row("small", "liger cutile", "gradients", status="failed", reason="it does not start")
    record.rows = [late, broken, row("liger", "gradients", 60, 63), row("liger", "tokens", 90, 120), no_entropy]
    record.rows += [row("liger scaled", "gradients", 45, 500), row("liger scaled", "entropy", 48, 500)]
    record.rows += [row("logitless loss", "loss", 10, 2, True), row("logitless unlimited", "gradients", 30, 1200, True)]
    record.accuracy = [
        Accuracy("small", "std1", "logitless unlimited", True, "", "", 1e-7, 4e-3, 3e-3),
        Accuracy("small", "std1", "liger", False, "", "", 1.2e-4, 5e-3, 6e-3, pass_="tokens"),
        Accuracy("small", "std1", "liger scaled", False, "", "", 2e-6, 5e-3, 6e-3, pass_="entropy", entropy_error=2e-3),
        Accuracy("small", "std1", "verl", False, "", "", 3e-7, pass_="loss"),
    ]
    title, _, _, _, *mean = published.peers(record)[: 4 + 5]
    assert title == "The mean loss and its gradients:"
    assert mean == [
        "| three matmuls | 30.0 / 33.0 | - | - | - | - | - | - |",
        '| Logitless, `"fastest"` | 30.0 / 33.0 | 1.00 / 1.00 | 1,200 | exact | 1e-07 | 0.40% | 0.30% |',
        "| Liger, CuTe DSL, per-token operator | 45.0 / 49.5 | 1.50 / 1.50 | 500 | exact | - | - | - |",
        "| Liger | 60.0 / 66.0 | 2.00 / 2.00 | 63 | exact | - | - | - |",
        "| verl | not run | - | 50 | exact | 3e-07 | - | - |",
    ]
    blank, title, *_ = others = published.peers(record)[4 + 5 :]
    assert (blank, title) == ("", "Other calls, of one matmul or three:")
    assert others[5:] == [
        "| one matmul, or three | 10.0 / 11.0 ms | - | 30.0 / 33.0 ms | - | - | 30.0 / 33.0 ms | - | - |",
        "| Logitless, loss | 1.00 / 1.00 | 2 | - | - | - | - | - | - |",
        "| Liger, CuTe DSL, per-token operator | - | - | - | - | - | 1.60 / 1.60 | 500 | 2e-03 |",
        "| Liger | - | - | 3.00 / 3.00 | 120 | 1e-04 | refused | - | - |",
    ]
    assert published.KINDS["peers"] is published.peers
