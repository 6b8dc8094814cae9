"""logitless.linear_divergence in compiled code, in its budget and on CUDA."""

import divergence_oracle as oracle
import logitless
import pytest
import torch
from logitless._divergence import passes, problem
from support import DTYPES, SHORT
from torch.utils.flop_counter import FlopCounterMode


def products_as_on_cuda(monkeypatch):
    """Multiplies bfloat16 operands with float32 results or one rounding; PyTorch lacks such products on the CPU."""

    def multiply(a, b, out, *, factor=1.0, add=False):
        product = factor * (a.float() @ b.float())
        out.copy_(out + product if add else product)

    monkeypatch.setattr(passes, "multiply", multiply)
    monkeypatch.setattr(problem, "operand_dtype", lambda hidden, *_: hidden.dtype)


def with_weight_sums(p, *pass_key, plan=problem.Problem.plan):
    """Plans a float32 sum of every weight's gradient."""
    values, gradients = plan(p, *pass_key)
    values.weight_sums, gradients.weight_sums = p.vocab, gradients.window
    return values, gradients


@pytest.mark.parametrize("vocab", [531, 1000])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_of_16_bit_products(reduction, mask, vocab, monkeypatch):
    """A weight's gradient as one product per window equals a float32 sum up to rounding."""
    products_as_on_cuda(monkeypatch)
    case = oracle.make((40,), vocab, dtype=torch.bfloat16, bias=False, reduction=reduction, beta=0.5)
    if mask:
        case.options["mask"] = torch.arange(40) % 3 != 0
    truth = oracle.evaluate(case, torch.float64)
    for budget in (None, 60_000, 30_000):
        results = []
        for at_once in (True, False):
            with monkeypatch.context() as patch:
                if not at_once:
                    patch.setattr(problem.Problem, "plan", with_weight_sums)
                results.append(oracle.run(case, max_workspace_bytes=budget))
        for name in ("d_student_hidden", "d_student_weight"):
            assert torch.equal(results[0][name], results[1][name])
            error = (results[0][name].double() - truth[name].double()).norm() / truth[name].double().norm()
            assert error < 2.0**-7  # dz and the gradient are rounded once each, relative to themselves


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_an_infinite_upstream_gradient_leaves_rows_that_do_not_count(reduction):
    case = oracle.make(reduction=reduction, mask=torch.arange(7) != 3)
    upstream = torch.full((7,) if reduction == "none" else (), torch.inf)
    got = oracle.run(case, upstream)
    assert not got["d_student_hidden"][3].any() and not got["d_student_hidden"][2].isfinite().any()


def test_without_gradients():
    case = oracle.make(beta=0.5)
    result = oracle.run(case)
    with torch.no_grad():
        leaves = case.leaves()
        leaves["teacher_weight"].requires_grad_()
        assert torch.equal(logitless.linear_divergence(**leaves, beta=0.5), result["loss"])


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_threads_makes_the_same_values(threads):
    case = oracle.make((40,), 700, reduction="none", beta=0.5)
    torch.set_num_threads(threads)
    got = oracle.run(case)
    torch.set_num_threads(1)
    torch.testing.assert_close(got["divergence"], oracle.run(case)["divergence"])


@pytest.mark.parametrize(("reduction", "budget", "products"), [("mean", None, (3, 1)), ("none", None, (4, 2))])
def test_products_are_counted(reduction, budget, products):
    case = oracle.make((16,), 64, 8, 24, reduction=reduction)
    with FlopCounterMode(display=False) as counter:
        oracle.run(case, max_workspace_bytes=budget)
    assert counter.get_total_flops() == 2 * 16 * 64 * (products[0] * 8 + products[1] * 24)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("budget", [None, 4 << 20])
def test_on_cuda(dtype, beta, reduction, budget):
    case = oracle.make((300,), 5003, 64, 96, dtype=dtype, beta=beta, reduction=reduction, student_softcap=9.0)
    given = oracle.Case({n: t.cuda() for n, t in case.tensors.items()}, case.options)
    got = oracle.run(given, max_workspace_bytes=budget)
    got = {name: value.cpu() for name, value in got.items()}
    if dtype in SHORT:  # gradients of logits are rounded to the operands' dtype
        exact = oracle.evaluate(case, torch.float64)
        for name in ("loss", "divergence", "entropy"):
            torch.testing.assert_close(got[name].double(), exact[name].double(), rtol=1e-4, atol=1e-5)
        for name in (f"d_{n}" for n in oracle.STUDENT):
            want = exact[name].double()
            rounding = want.to(dtype).double() - want  # mostly float16 gradients below its normal numbers
            bound = 2 * torch.finfo(dtype).eps * want.norm() + rounding.norm()
            assert (got[name].double() - want).norm() <= bound, name
    else:
        oracle.compare(case, got)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_autocast_of_16_bit_and_float32_operands(reduction):
    """Operands are rounded as by F.linear; logits are not. test_tools.py tests operands of one dtype."""
    case, rounded = (oracle.make(vocab=300, reduction=reduction, beta=0.5, bias=False) for _ in range(2))
    for name, t in case.tensors.items():
        if t is not None:
            case.tensors[name] = t.to(torch.float32 if name.endswith("weight") else torch.bfloat16)
            rounded.tensors[name] = t.bfloat16().float()
    with torch.autocast("cpu", torch.bfloat16):
        got = oracle.run(case)
    expected = oracle.run(rounded)
    for name in ("loss", "divergence", "entropy"):
        torch.testing.assert_close(got[name], expected[name])
    for name in ("d_student_hidden", "d_student_weight"):
        assert got[name].dtype == case.tensors[name[2:]].dtype
        tolerance = 2.0**-8 if got[name].dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got[name].float(), expected[name], rtol=tolerance, atol=1e-7)
