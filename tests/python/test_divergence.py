"""logitless.linear_divergence beside float64 over whole logits."""

import ctypes
import math

import divergence_oracle as oracle
import logitless
import pytest
import torch
from logitless import native
from support import DTYPES

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
OPTIONS = {
    "plain": {},
    "softcaps": {"student_softcap": 3.0, "teacher_softcap": 5.0},
    "all": {"student_scale": 0.5, "teacher_scale": -2.0, "student_softcap": 8.0, "temperature": 1.7},
}


def least_budget(case):
    """Returns the smallest budget that both passes run in."""
    budget = 1
    while True:
        try:
            oracle.run(case, max_workspace_bytes=budget)
            return budget
        except logitless.BudgetTooSmallError as error:
            assert error.required_bytes > budget
            budget = error.required_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_against_float64(beta, options, dtype, reduction):
    case = oracle.make(rows=(5, 6), vocab=531, dtype=dtype, beta=beta, reduction=reduction, **options)
    upstream = torch.randn(5, 6) if reduction == "none" else torch.tensor(-1.7)
    got = oracle.run(case, upstream)
    assert got["loss"].shape == ((5, 6) if reduction == "none" else ())
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(got[name].dtype == stats for name in ("loss", "divergence", "entropy"))
    assert all(got[f"d_{name}"].dtype == dtype for name in oracle.STUDENT)
    oracle.compare(case, got, upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_any_budget(beta, reduction, dtype):
    case = oracle.make(rows=(97,), vocab=500, dtype=dtype, beta=beta, reduction=reduction, student_softcap=9.0)
    upstream = torch.randn(97) if reduction == "none" else None
    least = least_budget(case)
    assert least < 97 * 500 * 2
    for budget in (least, 2 * least, 5 * least, 1 << 24):
        oracle.check(case, upstream, max_workspace_bytes=budget)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 30.0])
@pytest.mark.parametrize("beta", BETAS)
def test_flat_and_peaked_distributions(beta, spread):
    case = oracle.make(rows=(40,), vocab=3000, spread=spread, bias=False, beta=beta, reduction="none")
    oracle.check(case)


@pytest.mark.parametrize("beta", BETAS)
def test_of_equal_heads_nothing_is_left(beta):
    """Plain sums would leave the rounding of lse, which is 1e-6 here."""
    case = oracle.make(rows=(30,), vocab=2000, student=16, teacher=16, beta=beta, reduction="none")
    for part in ("hidden", "weight", "bias"):
        case.tensors[f"teacher_{part}"] = case.tensors[f"student_{part}"]
    got = oracle.run(case)
    assert got["divergence"].abs().max() == 0 and all(not got[f"d_{name}"].any() for name in oracle.STUDENT)


@pytest.mark.parametrize("beta", BETAS)
def test_nearly_equal_heads(beta):
    """A small divergence is insensitive to errors of logits: its own error is far below the rounding unit of 1."""
    case = oracle.make(rows=(30,), vocab=2000, student=16, teacher=16, bias=False, beta=beta, reduction="none")
    case.tensors["teacher_hidden"] = case.tensors["student_hidden"] * (1 + 1e-3)
    case.tensors["teacher_weight"] = case.tensors["student_weight"]
    got, truth = oracle.run(case), oracle.evaluate(case, torch.float64)
    naive = oracle.evaluate(case, torch.float32)
    error, naive_error = ((x["divergence"].double() - truth["divergence"]).abs().max() for x in (got, naive))
    assert error <= 1e-8 and error < 0.1 * naive_error


SHAPES = [(1, 1, 1, 1), (1, 2, 3, 1), (3, 1, 4, 5), (2, 17, 8, 8), (65, 513, 3, 7), (0, 9, 4, 4), (4, 511, 1, 33)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_shapes(shape, reduction, beta):
    rows, vocab, student, teacher = shape
    case = oracle.make((rows,), vocab, student, teacher, beta=beta, reduction=reduction)
    oracle.check(case)


def test_leading_dimensions_and_strides():
    case = oracle.make(rows=(2, 3, 4), reduction="none", beta=0.5)
    expected = oracle.run(case)
    assert expected["loss"].shape == (2, 3, 4)
    for change in (
        lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
        lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    ):
        got = oracle.run(oracle.Case({name: change(t) for name, t in case.tensors.items()}, case.options))
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("budget", [None, 60_000])
def test_rows_that_do_not_count(reduction, dtype, budget):
    case = oracle.make(rows=(4, 8), vocab=300, dtype=dtype, reduction=reduction, beta=0.3)
    mask = torch.rand(4, 8) < 0.6
    case.options["mask"], case.options["token_weight"] = mask, torch.rand(4, 8)
    oracle.check(case, max_workspace_bytes=budget)
    for name in ("student_hidden", "teacher_hidden"):
        case.tensors[name][~mask] = math.nan
    got = oracle.run(case, max_workspace_bytes=budget)
    assert all(value.isfinite().all() for value in got.values())
    assert not got["d_student_hidden"][~mask].any() and not got["divergence"][~mask].any()


def test_no_row_counts():
    case = oracle.make(mask=torch.zeros(7), reduction="sum")
    got = oracle.run(case)
    assert not any(value.any() for value in got.values())
    case.options["reduction"] = "mean"
    assert oracle.run(case)["loss"].isnan()
    case.options["num_items"] = 0
    assert not oracle.run(case)["d_student_hidden"].any()
    none = logitless.linear_divergence(torch.zeros(0, 4), torch.ones(5, 4), torch.zeros(0, 3), torch.ones(5, 3))
    assert none.isnan()


def test_divisors():
    case = oracle.make(beta=0.5)
    mean = oracle.run(case)
    for items in (21, torch.tensor(21), torch.tensor([21.0])):
        case.options["num_items"] = items
        got = oracle.run(case)
        torch.testing.assert_close(got["d_student_weight"] * 3, mean["d_student_weight"])
        torch.testing.assert_close(got["loss"] * 3, mean["loss"])


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_masked_columns(beta):
    """A bias of -inf excludes columns. Columns that both heads exclude count nothing; one head's alone are finite if
    possible."""
    case = oracle.make(vocab=40, beta=beta, reduction="none")
    expected = oracle.make(vocab=40, beta=beta, reduction="none")
    for name in ("student_bias", "teacher_bias"):
        case.tensors[name][30:] = -math.inf
    for name in ("student_weight", "student_bias", "teacher_weight", "teacher_bias"):
        expected.tensors[name] = expected.tensors[name][:30]
    got, less = (oracle.run(c) for c in (case, expected))
    torch.testing.assert_close(got["divergence"], less["divergence"])
    torch.testing.assert_close(got["entropy"], less["entropy"])
    torch.testing.assert_close(got["d_student_hidden"], less["d_student_hidden"])
    assert not got["d_student_weight"][30:].any() and not got["d_student_bias"][30:].any()
    masked = case.tensors["student_bias"]
    for student, teacher, infinite_at in ((masked, torch.zeros(40), 0), (torch.zeros(40), masked, 1)):
        case.tensors |= {"student_bias": student, "teacher_bias": teacher}
        got = oracle.run(case)
        assert got["divergence"].isinf().all() if beta == infinite_at else got["divergence"].isfinite().all()
        assert got["d_student_hidden"].isfinite().all() or beta == infinite_at == 1


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["student_hidden", "teacher_hidden"])
def test_a_nan_is_told_of_its_row(beta, name):
    case = oracle.make(vocab=600, beta=beta, reduction="none")
    case.tensors[name][2, 1] = math.nan
    got = oracle.run(case)
    assert got["divergence"].isnan().tolist() == [row == 2 for row in range(7)]
    assert got["d_student_hidden"].isnan().any(-1).tolist() == [row == 2 for row in range(7)]


@pytest.mark.parametrize("beta", BETAS)
def test_huge_logits(beta):
    case = oracle.make(vocab=600, beta=beta, bias=False, spread=1e4, reduction="none")
    got = oracle.run(case)
    assert all(value is None or value.isfinite().all() for value in got.values())
    oracle.compare(case, got)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_mixed_dtypes(dtypes):
    case = oracle.make(beta=0.5)
    for name, t in case.tensors.items():
        case.tensors[name] = t.to(dtypes[name.endswith("hidden")])
    oracle.check(case)


def test_the_reference_backend_agrees():
    """The C ABI computes the library's own float64 on float32 numbers."""
    rows, columns = 5, 700
    student, teacher, grad = torch.randn(rows, columns), torch.randn(rows, columns), torch.randn(rows)
    results = []
    for backend in ("cpu", "reference"):
        numbers = torch.empty(5, rows)
        out = torch.empty(rows, columns)
        given = native.Divergence(temperature=1, student_scale=1, teacher_scale=1)
        given.rows, given.columns, given.beta, given.student_softcap, given.temperature = rows, columns, 0.25, 2.0, 0.8
        given.student, given.teacher, given.grad = student.data_ptr(), teacher.data_ptr(), grad.data_ptr()
        names = ("student_lse", "teacher_lse", "student_kl", "divergence", "entropy")
        for name, tensor in zip(names, numbers):
            setattr(given, name, tensor.data_ptr())
        given.d_logits = out.data_ptr()
        context = native._context(1, backend, native.HOST)
        for given.stage in (native.DIVERGENCE_VALUES, native.DIVERGENCE_GRADIENT):
            native.check(native.library().logitless_divergence_run(context.pointer, ctypes.byref(given), None))
        results.append((numbers, out))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=2e-5, atol=1e-7)
