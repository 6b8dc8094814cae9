"""logitless.linear_divergence under PyTorch's tools, in its budget, and with bad arguments."""

import os
import subprocess
import sys
from pathlib import Path

import divergence_oracle as oracle
import logitless
import pytest
import torch
from logitless import autograd, options
from logitless._divergence import _PLAIN, passes, problem, sizes
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradcheck(beta, reduction):
    case = oracle.make((2, 3), 11, 4, 6, dtype=torch.float64, student_softcap=3.0, teacher_scale=0.5, temperature=1.2)
    leaves = case.leaves()
    trained = [leaves.pop(name) for name in oracle.STUDENT]

    def loss(*tensors):
        given = dict(zip(oracle.STUDENT, tensors))
        return logitless.linear_divergence(**given, **leaves, **case.options, beta=beta, reduction=reduction)

    assert torch.autograd.gradcheck(loss, trained)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_compiled_in_one_graph(beta, reduction):
    case = oracle.make(beta=beta, reduction=reduction, student_scale=0.5)
    case.options["mask"] = torch.arange(7) != 3
    compiled = torch.compile(logitless.linear_divergence, backend="aot_eager", fullgraph=True)
    eager, got = (oracle.run(function, case) for function in (logitless.linear_divergence, compiled))
    for name, value in eager.items():
        assert torch.equal(got[name], value), name


def test_compiled_for_all_sizes_and_numbers():
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    compiled = torch.compile(logitless.linear_divergence, backend=backend, fullgraph=True, dynamic=True)
    for rows in (5, 9, 17):
        leaves = oracle.make((rows,)).leaves()
        torch.testing.assert_close(compiled(**leaves), logitless.linear_divergence(**leaves))
    assert len(seen) == 1


@pytest.mark.parametrize("kind", [options.FORWARD, options.FORWARD_BACKWARD])
def test_opcheck(kind):
    given = dict(zip(problem.Heads._fields, (*oracle.make().leaves().values(), torch.arange(7) != 3)))
    given = {name: tensor.detach() for name, tensor in given.items()} | {"row_weight": torch.rand(7)}
    flags = options.Flags(want_d_hidden=True, want_d_weight=True, want_d_bias=True)
    text = autograd._text(autograd.Pass(kind, flags, "linear_divergence"), _PLAIN, given)
    numbers = [[0.5, 1.0, 1.0, 0.0, 1.0, 0.0], [_PLAIN[name] for name in options.INTEGERS] + [-1, -1]]
    torch.library.opcheck(autograd.run, (list(given.values()), *numbers, text))


def products_as_on_cuda(monkeypatch):
    """Of bfloat16 operands, with float32 results or rounded once; without, PyTorch has none on the CPU."""

    def multiply(a, b, out, *, factor=1.0, add=False):
        found = factor * (a.float() @ b.float())
        out.copy_(out + found if add else found)

    monkeypatch.setattr(passes, "multiply", multiply)
    monkeypatch.setattr(problem, "operand_dtype", lambda hidden, *_: hidden.dtype)


@pytest.mark.parametrize("vocab", [531, 1000])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_of_16_bit_products(reduction, mask, vocab, monkeypatch):
    """A weight's gradient that is one product for each window is what a sum in float32 rounds to."""
    products_as_on_cuda(monkeypatch)
    case = oracle.make((40,), vocab, dtype=torch.bfloat16, bias=False, reduction=reduction, beta=0.5)
    if mask:
        case.options["mask"] = torch.arange(40) % 3 != 0
    truth = oracle.evaluate(case, torch.float64)
    for budget in (None, 60_000, 30_000):
        found = []
        for at_once in (True, False):
            with monkeypatch.context() as patch:
                if not at_once:
                    patch.setattr(problem.Problem, "rounds_weight_once", False)
                found.append(oracle.run(logitless.linear_divergence, case, max_workspace_bytes=budget))
        for name in ("d_student_input", "d_student_weight"):
            assert torch.equal(found[0][name], found[1][name])
            error = (found[0][name].double() - truth[name].double()).norm() / truth[name].double().norm()
            assert error < 2.0**-7  # dz and the gradient are rounded once each, relative to themselves


def test_tiles_have_aligned_rows_and_fit():
    for rows in (1, 16, 17, 97, 8192):
        for columns in (1, 63, 65, 513, 50257):
            costs = sizes.Costs(fixed=100, row=7, column=300, element=10)
            least = costs.bytes(min(rows, 16), min(columns, 64), min(columns, 64))
            for budget in (least, least + 1, 2 * least, 50 * least):
                tile = sizes.windows(costs, rows, columns, budget, "cuda")
                assert costs.bytes(tile.rows, tile.window, tile.window) <= budget
                assert tile.window == columns or tile.window % sizes.ALIGNED == 0
                assert 1 <= tile.rows <= rows and 1 <= tile.window <= columns


def test_tiles_below_the_least_bytes_are_refused():
    costs = sizes.Costs(fixed=100, row=7, column=300, element=10)
    for make, least in (
        (sizes.windows, sizes.least_of_windows(costs, 256, 4096)),
        (sizes.whole_rows, sizes.least_of_whole_rows(costs, 4096)),
    ):
        make(costs, 256, 4096, least, "cuda")
        with pytest.raises(logitless.BudgetTooSmallError) as error:
            make(costs, 256, 4096, least - 1, "cuda")
        assert error.value.required_bytes == least


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_autocast(reduction, dtypes):
    """Operands are rounded as by F.linear; logits are not."""
    case = oracle.make(vocab=300, reduction=reduction, beta=0.5, bias=False)
    rounded = oracle.make(vocab=300, reduction=reduction, beta=0.5, bias=False)
    for name, t in case.tensors.items():
        if t is not None:
            case.tensors[name] = t.to(dtypes[name.endswith("weight")])
            rounded.tensors[name] = t.bfloat16().float()
    with torch.autocast("cpu", torch.bfloat16):
        got = oracle.run(logitless.linear_divergence, case)
    expected = oracle.run(logitless.linear_divergence, rounded)
    assert got["loss"].dtype == torch.float32
    for name in ("loss", "divergence", "entropy"):
        torch.testing.assert_close(got[name], expected[name])
    for name in ("d_student_input", "d_student_weight"):
        assert got[name].dtype == case.tensors[name[2:]].dtype
        tolerance = 2.0**-8 if got[name].dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got[name].float(), expected[name], rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reduction, reentrant):
    case = oracle.make(reduction=reduction)

    def checkpointed(student_input, student_weight, student_bias, **others):
        others.pop("return_stats")
        loss = checkpoint(
            lambda *t: logitless.linear_divergence(**dict(zip(oracle.STUDENT, t)), **others),
            student_input,
            student_weight,
            student_bias,
            use_reentrant=reentrant,
        )
        return logitless.LinearDivergenceOutput(loss, loss, loss)

    expected, got = (oracle.run(function, case) for function in (logitless.linear_divergence, checkpointed))
    for name in ("loss", *(f"d_{n}" for n in oracle.STUDENT)):
        assert torch.equal(got[name], expected[name])


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_retained_graphs_and_batches_of_upstream_gradients(reduction):
    leaves = oracle.make(reduction=reduction).leaves()
    loss = logitless.linear_divergence(**leaves, reduction=reduction)
    trained = [leaves[name] for name in oracle.STUDENT]
    upstream = torch.randn(3, *loss.shape)
    one_by_one = [torch.autograd.grad(loss, trained, u, retain_graph=True) for u in upstream]
    together = torch.autograd.grad(loss, trained, upstream, is_grads_batched=True, retain_graph=True)
    for index, gradient in enumerate(together):
        torch.testing.assert_close(gradient, torch.stack([found[index] for found in one_by_one]))
    with pytest.raises(NotImplementedError, match=r"linear_divergence: double backward"):
        torch.autograd.grad(loss.sum(), trained, create_graph=True)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_an_infinite_upstream_gradient_leaves_rows_that_do_not_count(reduction):
    case = oracle.make(reduction=reduction, mask=torch.arange(7) != 3)
    upstream = torch.full((7,) if reduction == "none" else (), torch.inf)
    got = oracle.run(logitless.linear_divergence, case, upstream)
    assert not got["d_student_input"][3].any() and not got["d_student_input"][2].isfinite().any()


def test_without_gradients():
    case = oracle.make(beta=0.5)
    found = oracle.run(logitless.linear_divergence, case)
    with torch.no_grad():
        leaves = case.leaves()
        leaves["teacher_weight"].requires_grad_()
        assert torch.equal(logitless.linear_divergence(**leaves, beta=0.5), found["loss"])


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_threads_makes_the_same_values(threads):
    case = oracle.make((40,), 700, reduction="none", beta=0.5)
    torch.set_num_threads(threads)
    got = oracle.run(logitless.linear_divergence, case)
    torch.set_num_threads(1)
    torch.testing.assert_close(got["divergence"], oracle.run(logitless.linear_divergence, case)["divergence"])


@pytest.mark.parametrize(("reduction", "budget", "products"), [("mean", None, (3, 1)), ("none", None, (4, 2))])
def test_products_are_counted(reduction, budget, products):
    case = oracle.make((16,), 64, 8, 24, reduction=reduction)
    with FlopCounterMode(display=False) as counter:
        oracle.run(logitless.linear_divergence, case, max_workspace_bytes=budget)
    assert counter.get_total_flops() == 2 * 16 * 64 * (products[0] * 8 + products[1] * 24)


# ---- memory

PEAK = """
import logitless, sys, torch
def status(name):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(name))
def call(rows, reduction, budget, dtype, mask):
    torch.manual_seed(0)
    s, t = torch.randn(rows, 32, dtype=dtype), torch.randn(rows, 48, dtype=dtype)
    sw, tw = torch.randn(20000, 32, dtype=dtype), torch.randn(20000, 48, dtype=dtype)
    s.requires_grad_(), sw.requires_grad_()
    mask = torch.arange(rows) % 5 != 0 if mask else None
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak
    loss = logitless.linear_divergence(s, sw, t, tw, mask=mask, reduction=reduction, max_workspace_bytes=budget)
    loss.sum().backward()
    return status("VmHWM") - before, sum(x.numel() * x.element_size() for x in (s, sw))
reduction, budget, dtype, mask = sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3]), sys.argv[4] == "mask"
torch.set_num_threads(1)
call(8, reduction, None, dtype, mask)  # code, and what products keep
extra, gradients = call(1024, reduction, budget, dtype, mask)
print(extra - gradients)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(("dtype", "mask"), [("float32", ""), ("bfloat16", ""), ("bfloat16", "mask")])
@pytest.mark.parametrize("budget", [4 << 20, 24 << 20])
def test_peak_memory_stays_within_the_budget(reduction, dtype, mask, budget):
    """Beside logits of 82 MB of either head; 3 MiB are allowed for what the products' own library packs."""
    command = [sys.executable, "-c", PEAK, reduction, str(budget), dtype, mask]
    path = str(Path(logitless.__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": path}
    extra = int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
    print(f"{reduction} {dtype} {mask} {budget}: {extra / budget:.2f}")
    assert extra <= budget + (3 << 20)


# ---- bad arguments


def weights(vocab=50, width=12, **more):
    return torch.zeros(vocab, width, **more)


BAD = [
    ({"student_weight": weights(width=9)}, ValueError, r"student_input: expected shape \[..., D\] with D = 9"),
    ({"teacher_weight": weights(width=9)}, ValueError, r"teacher_input: expected shape \[..., D\] with D = 9"),
    (
        {"teacher_weight": weights(49, 20), "teacher_bias": None},
        ValueError,
        "teacher_weight: expected V = 50 rows, as student_weight has, got 49",
    ),
    ({"teacher_input": torch.zeros(6, 20)}, ValueError, r"teacher_input: expected shape \[7\]"),
    ({"student_bias": torch.zeros(3)}, ValueError, r"student_bias: expected shape \[50\]"),
    ({"teacher_bias": [1.0]}, TypeError, "teacher_bias: expected a torch.Tensor, got list"),
    ({"teacher_input": torch.zeros(7, 20).double()}, TypeError, "teacher_input: expected float64 for all tensors"),
    ({"student_input": torch.zeros(7, 12).long()}, TypeError, "student_input: expected float32"),
    ({"teacher_weight": weights(width=20).requires_grad_()}, ValueError, r"teacher_weight.*pass teacher_weight.detach"),
    (
        {"teacher_input": torch.zeros(7, 20, requires_grad=True)},
        ValueError,
        "teacher_input: expected a tensor that does",
    ),
    ({"student_weight": torch.zeros(0, 12)}, ValueError, r"student_weight: expected shape \[V, D\] with V >= 1"),
    ({"student_weight": weights(device="meta")}, ValueError, "student_weight: .*device meta"),
    ({"beta": -0.1}, ValueError, r"beta: expected 0, or a number in \[2\^-100, 1\], got -0.1"),
    ({"beta": 1.5}, ValueError, "beta: expected 0"),
    ({"beta": float("nan")}, ValueError, "beta: expected 0"),
    ({"beta": "jsd"}, TypeError, "beta: expected a number, got str"),
    ({"temperature": 0}, ValueError, "temperature: expected a finite number > 0"),
    ({"student_softcap": -1.0}, ValueError, "student_softcap: expected 0, or a positive number"),
    ({"teacher_scale": float("inf")}, ValueError, "teacher_scale: expected a finite number"),
    ({"mask": torch.ones(6)}, ValueError, r"mask: expected shape \[7\]"),
    ({"token_weight": torch.ones(7, requires_grad=True)}, ValueError, "token_weight: expected a tensor that does not"),
    ({"reduction": "batchmean"}, ValueError, "reduction: expected one of"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, "num_items: expected None unless"),
    ({"max_workspace_bytes": 0}, ValueError, "max_workspace_bytes: expected a positive number"),
    ({"max_workspace_bytes": 1}, logitless.BudgetTooSmallError, "max_workspace_bytes: expected at least"),
    ({"return_stats": ("entropy",)}, TypeError, "return_stats: expected a bool"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD)
def test_refused(changed, error, message):
    with pytest.raises(error, match=message):
        logitless.linear_divergence(**oracle.make().leaves() | changed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("budget", [None, 4 << 20])
def test_on_cuda(dtype, beta, reduction, budget):
    case = oracle.make((300,), 5003, 64, 96, dtype=dtype, beta=beta, reduction=reduction, student_softcap=9.0)
    given = oracle.Case({n: t.cuda() for n, t in case.tensors.items()}, case.options)
    got = oracle.run(logitless.linear_divergence, given, max_workspace_bytes=budget)
    got = {name: value.cpu() for name, value in got.items()}
    if dtype in (torch.bfloat16, torch.float16):  # gradients of logits are rounded to the operands' dtype
        exact = oracle.evaluate(case, torch.float64)
        for name in ("loss", "divergence", "entropy"):
            torch.testing.assert_close(got[name].double(), exact[name].double(), rtol=1e-4, atol=1e-5)
        for name in (f"d_{n}" for n in oracle.STUDENT):
            want = exact[name].double()
            rounding = want.to(dtype).double() - want  # of float16 gradients below its normal numbers, above all
            bound = 2 * torch.finfo(dtype).eps * want.norm() + rounding.norm()
            assert (got[name].double() - want).norm() <= bound, name
    else:
        oracle.compare(case, got)
