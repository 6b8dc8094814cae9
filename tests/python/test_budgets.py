"""Budgets: how they are written, and that the smallest budget in an error is enough and the smallest.

This holds for all outputs and for each pass that needs it.
"""

import contextlib
import re
from pathlib import Path

import logitless
import logitless.numpy
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from logitless import call, native, passes, run
from logitless import options as _options
from support import python

FASTEST = _options.FASTEST
SIZES = {
    "256MiB": 256 << 20,
    "256 MiB": 256 << 20,
    "256mib": 256 << 20,
    "256Mi": 256 << 20,
    "1GB": 10**9,
    "1g": 10**9,
    "64k": 64_000,
    "64KiB": 64 << 10,
    "1.5GiB": 3 << 29,
    ".5TiB": 1 << 39,
    "4096": 4096,
    "4096B": 4096,
    "fastest": FASTEST,
}


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_sizes_are_read_as_the_command_line_reads_them(text, size):
    assert _options.budget(text) == size


def test_every_function_takes_a_size():
    x, w, y = torch.randn(3, 8), torch.randn(5, 8), torch.tensor([1, 2, 3])
    for budget in ("1MiB", "fastest"):
        logitless.linear_cross_entropy(x, w, y, max_workspace_bytes=budget)
        logitless.linear_log_probs(x, w, y[:, None], max_workspace_bytes=budget)
        logitless.linear_top_k(x, w, 2, max_workspace_bytes=budget)
        logitless.linear_divergence(x, w, x, w, max_workspace_bytes=budget)
        logitless.numpy.linear_cross_entropy(x.numpy(), w.numpy(), y.numpy(), max_workspace_bytes=budget)
        logitless.nn.FusedHead(8, 5, max_workspace_bytes=budget)(x, y)
    assert logitless.plan(512, 4096, 64, max_workspace_bytes="2MiB").workspace_bytes <= 2 << 20


def test_dtypes_are_named_shortly():
    for short, long in (("f32", "float32"), ("bf16", "bfloat16"), ("f16", "float16"), ("f64", "float64")):
        plans = [logitless.plan(64, 512, 32, dtype=name, weight_dtype=name) for name in (short, long)]
        assert plans[0] == plans[1]
        for head in (
            logitless.nn.FusedHead(8, 5, dtype=short),
            logitless.LinearCrossEntropyLoss(8, 5, dtype=short).linear,
        ):
            assert head.weight.dtype == getattr(torch, long)


def test_constants_are_those_of_the_header():
    header = (Path(__file__).resolve().parents[2] / "include" / "logitless" / "logitless.h").read_text()
    match = re.search(r"LOGITLESS_DEFAULT_THRESHOLD \(1\.0 / (\d+)\)", header)
    assert 1 / int(match[1]) == _options.DEFAULT_THRESHOLD == native.schema().options["threshold"]["default"]
    assert "LOGITLESS_FASTEST ((uint64_t)INT64_MAX)" in header and FASTEST == 2**63 - 1


def test_the_default_takes_less_than_the_fastest():
    head = {"dtype": "bf16", "device": "h200"}
    default, fastest = (logitless.plan(8192, 256_000, 2304, **head, max_workspace_bytes=b) for b in (None, "fastest"))
    assert default.workspace_bytes <= 2.1 * 2**30 < fastest.workspace_bytes
    assert default.predicted_seconds <= 1.06 * fastest.predicted_seconds
    assert "a quarter of the float32 logits" in default.choice and fastest.choice == "the fastest"
    assert all(plan.choice == "" for plan in logitless.plans(8192, 256_000, 2304, **head))


def test_the_saved_size_does_not_depend_on_numbers_that_compiled_code_may_not_know(monkeypatch):
    monkeypatch.setattr(run, "plan_on", lambda spec, device: native.plan_of(spec, 1, "cuda", "h100"))
    flags = _options.Flags(want_d_hidden=True, want_d_weight=True, want_d_bias=True, saves=True)
    later = passes.PassKey(_options.FORWARD, flags)
    with torch.device("meta"):
        bias, targets = torch.empty(128256), torch.empty(4096, dtype=torch.int64)
        hidden, weight = (torch.empty(n, 2048, dtype=torch.bfloat16) for n in (4096, 128256))
    tensors = {"hidden": hidden, "weight": weight, "bias": bias, "targets": targets}
    for budget in (315_201_945, 402_758_041):
        options = call.UNUSED | {"max_workspace_bytes": budget}
        sizes = {run.saved_size(later, tensors, None, options | {"temperature": t, "scale": t}) for t in (1.0, 0.7)}
        assert len(sizes) == 1


# ---- what a refusal names


@contextlib.contextmanager
def counted():
    """Counts runs of the library."""
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((native, "run"), (native, "run_on_host"), (native, "run_divergence")):
            original = getattr(module, name)
            patch.setattr(module, name, lambda *a, _run=original, **k: (runs.append(1), _run(*a, **k))[1])
        yield runs


def check(call):
    """Checks call(budget), which makes the first pass and returns a function for a later one, or None."""
    with counted() as runs:
        with pytest.raises(logitless.BudgetTooSmallError) as refused:
            call(1)
        required = refused.value.required_bytes
        assert f"at least {required} byte" in str(refused.value)
        with pytest.raises(logitless.BudgetTooSmallError) as refused:
            call(required - 1)
        assert refused.value.required_bytes == required
        assert runs == []
    later = call(required)
    if later is not None:
        later()


SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 700), st.integers(1, 70))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def tensors(shape, dtype, other=None):
    n, v, d = shape
    x, w = torch.randn(n, d).to(dtype), torch.randn(v, d).to(other or dtype)
    return x.requires_grad_(), w.requires_grad_(), torch.randint(v, (n,))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@given(
    SHAPES,
    DTYPES,
    st.sampled_from(
        ["", "bias", "smoothing", "stats", "main_grad", "sparsified", "several", "no weight", "no grad", "fp32 weight"]
    ),
)
def test_of_a_loss(reduction, shape, dtype, kind):
    other = torch.float32 if kind == "fp32 weight" and dtype != torch.float64 else None
    x, w, y = tensors(shape, dtype, other)
    options = {"reduction": reduction} | {
        "bias": {"bias": torch.randn(shape[1]).to(dtype).requires_grad_()},
        "smoothing": {"label_smoothing": 0.1},
        "stats": {"return_stats": True, "differentiable_stats": True},
        "main_grad": {"main_grad": torch.zeros(w.shape, dtype=torch.promote_types(dtype, torch.float32))},
        "sparsified": {"gradient": "sparsified", "threshold": 0.25, "seed": 3},
        "several": {"target_weight": torch.rand(len(y), 2)},
    }.get(kind, {})
    y = torch.stack([y, y], 1) if kind == "several" else y
    w.requires_grad_(kind != "no weight")

    def call(budget):
        with torch.set_grad_enabled(kind != "no grad"):
            out = logitless.linear_cross_entropy(x, w, y, max_workspace_bytes=budget, **options)
        if kind == "no grad":
            return None
        parts = (out.loss, out.entropy, out.lse, out.nll) if kind == "stats" else (out,)
        return sum(part.sum() for part in parts).backward

    check(call)


@given(SHAPES, DTYPES, st.integers(1, 3), st.booleans())
def test_of_log_probs(shape, dtype, count, trains):
    x, w, y = tensors(shape, dtype)

    def call(budget):
        with torch.set_grad_enabled(trains):
            log_probs = logitless.linear_log_probs(x, w, y[:, None].expand(-1, count), max_workspace_bytes=budget)
        return log_probs.sum().backward if trains else None

    check(call)


@given(SHAPES, DTYPES)
def test_of_top_k(shape, dtype):
    x, w, _ = tensors(shape, dtype)
    check(lambda budget: logitless.linear_top_k(x, w, min(shape[1], 5), max_workspace_bytes=budget) and None)


@pytest.mark.parametrize("reduction", ["none", "sum"])
@given(
    SHAPES,
    st.integers(1, 90),
    DTYPES,
    st.sampled_from([(True, True, True), (True, False, False), (False, True, False), (False, False, False)]),
    st.sampled_from([None, 0.0, 0.5, 1.0]),
)
def test_of_a_divergence(reduction, shape, width, dtype, wants, counted_rows):
    n, v, d = shape
    x, w, b = torch.randn(n, d).to(dtype), torch.randn(v, d).to(dtype), torch.randn(v).to(dtype)
    for tensor, wanted in zip((x, w, b), wants):
        tensor.requires_grad_(wanted)
    teacher = torch.randn(n, width).to(dtype), torch.randn(v, width).to(dtype)
    mask = None if counted_rows is None else torch.arange(n) < counted_rows * n

    def call(budget):
        divergence = logitless.linear_divergence(
            x, w, *teacher, student_bias=b, mask=mask, reduction=reduction, max_workspace_bytes=budget
        )
        return divergence.sum().backward if any(wants) else None

    check(call)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@given(SHAPES, st.sampled_from([np.float32, np.float16]), st.sampled_from(["exact", "sparsified"]))
def test_of_arrays(reduction, shape, dtype, gradient):
    n, v, d = shape
    random = np.random.default_rng(0)
    x, w = random.normal(size=(n, d)).astype(dtype), random.normal(size=(v, d)).astype(dtype)
    y = random.integers(v, size=n)
    options = {"reduction": reduction, "gradient": gradient, "threshold": 0.25}

    def call(budget):
        logitless.numpy.linear_cross_entropy(
            x, w, y, gradients=("hidden", "weight"), max_workspace_bytes=budget, **options
        )

    check(call)


@pytest.mark.parametrize("device", ["cpu", "h200", "a100"])
@given(
    st.tuples(st.integers(1, 20000), st.integers(1, 300_000), st.integers(1, 6000)),
    st.sampled_from(["f32", "bf16", "f16"]),
)
def test_of_plans(device, shape, dtype):
    check(lambda budget: logitless.plan(*shape, dtype=dtype, device=device, max_workspace_bytes=budget) and None)


@pytest.mark.slow
def test_compiled_code_refuses_before_it_runs():
    x, w, y = tensors((60, 300, 16), torch.float32)

    def losses(budget):
        return logitless.linear_cross_entropy(x, w, y, reduction="none", max_workspace_bytes=budget)

    with pytest.raises(logitless.BudgetTooSmallError) as eager:
        losses(1)
    with pytest.raises(logitless.BudgetTooSmallError) as compiled:
        torch.compile(losses)(1)
    assert compiled.value.required_bytes == eager.value.required_bytes
    torch.compile(losses)(eager.value.required_bytes).sum().backward()


# ---- memory

PEAK = """
import logitless, torch
def status(name):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(name))
def make(rows, width):
    return torch.randn(rows, width, dtype=dtype), torch.randn(20000, width, dtype=dtype)
def call(rows, budget):
    torch.manual_seed(0)
    leaves, teacher = [t.requires_grad_() for t in make(rows, 32)], make(rows, 48)
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak
    options = {"reduction": reduction, "max_workspace_bytes": budget}
    if function == "linear_divergence":
        options["mask"] = torch.arange(rows) % 5 != 0 if mask else None
        loss = logitless.linear_divergence(*leaves, *teacher, **options)
    else:
        loss = logitless.linear_cross_entropy(*leaves, torch.randint(0, 20000, (rows,)), **options)
    loss.sum().backward()
    return status("VmHWM") - before - sum(x.numel() * x.element_size() for x in leaves)
torch.set_num_threads(1)
call(8, None)  # code, and what products keep
print(call(1024, budget))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("function, reduction, dtype, mask", [
    ("linear_cross_entropy", "mean", "float32", False),
    ("linear_cross_entropy", "none", "bfloat16", False),
    ("linear_divergence", "none", "float32", False),
    ("linear_divergence", "mean", "bfloat16", True),
    ("linear_divergence", "none", "bfloat16", False),
])  # fmt: skip
@pytest.mark.parametrize("budget", [4 << 20, 24 << 20])
def test_peak_memory_stays_within_the_budget(function, reduction, dtype, mask, budget):
    """Logits of either head have 82 MB; 3 MiB are allowed for packing by the products' own library."""
    names = f"function, reduction, mask, budget = {(function, reduction, mask, budget)}"
    extra = int(python(f"import torch\n{names}\ndtype = torch.{dtype}\n{PEAK}"))
    assert extra <= budget + (3 << 20)
