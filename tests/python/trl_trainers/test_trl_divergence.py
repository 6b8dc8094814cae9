"""The function by which logitless.trl.patch replaces TRL's divergences, beside TRL's and float64."""

import sys

import divergence_oracle as oracle
import logitless.trl
import pytest
import torch
from logitless.errors import UnsupportedError
from logitless.trl._divergence import Divergences
from whole import close

pytestmark = pytest.mark.slow

ROWS, VOCAB = 23, 301


def current():
    import trl.kernels.chunked_divergence

    return trl.kernels.chunked_divergence.ChunkedDivergenceFunction


def run(apply, tensors, options, upstream):
    leaves = [t if t is None else t.detach().clone().requires_grad_(n in oracle.STUDENT) for n, t in tensors.items()]
    divergence, entropy = apply(*leaves, *options)
    assert not entropy.requires_grad
    (divergence * upstream).sum().backward()
    names = [f"d_{name}" for name in oracle.STUDENT]
    gradients = [None if leaf is None else leaf.grad for leaf in leaves[:3]]
    return {"divergence": divergence.detach(), "entropy": entropy} | dict(zip(names, gradients))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(
    ("temperature", "scales", "softcaps", "bias"),
    [
        (1.0, (1.0, 1.0), (None, None), False),
        (0.7, (0.25, 2.0), (5.0, None), True),
        (1.3, (1.0, 0.5), (None, 3.0), True),
    ],
)
def test_returns_and_gradients_are_those_of_trl(dtype, beta, temperature, scales, softcaps, bias):
    case = oracle.make((ROWS,), VOCAB, 24, 40, dtype=dtype, bias=bias)
    options = (beta, temperature, scales[0], softcaps[0], scales[1], softcaps[1])
    upstream = torch.randn(ROWS)
    logitless.trl.patch()
    stock = run(current().original.apply, case.tensors, options, upstream)
    fused = run(current().apply, case.tensors, options, upstream)
    for head, scale in zip(("student", "teacher"), scales):  # TRL's factor also scales its bias
        if bias:
            case.tensors[f"{head}_bias"] = case.tensors[f"{head}_bias"].double() * scale
    case.tensors = {n: None if t is None else t.double() for n, t in case.tensors.items()}
    case.options = dict(beta=beta, temperature=temperature, reduction="none")
    for head, scale, softcap in zip(("student", "teacher"), scales, softcaps):
        case.options |= {f"{head}_scale": scale, f"{head}_softcap": softcap}
    exact = oracle.evaluate(case, torch.float64, upstream)
    if bias:
        exact["d_student_bias"] = exact["d_student_bias"] * scales[0]
    for name, value in fused.items():
        assert (value is None) == (stock[name] is None)
        if value is None:
            continue
        assert value.dtype == stock[name].dtype and value.shape == stock[name].shape
        assert close(value, stock[name], exact[name], torch.finfo(value.dtype).eps), name


def test_a_teacher_that_requires_grad_gets_none():
    logitless.trl.patch()
    tensors = oracle.make((ROWS,), VOCAB).leaves()
    for name in ("teacher_hidden", "teacher_weight", "teacher_bias"):
        tensors[name].requires_grad_()
    current().apply(*tensors.values(), 0.5)[0].sum().backward()
    assert tensors["teacher_weight"].grad is None and tensors["student_weight"].grad is not None


def test_patch_and_unpatch():
    from trl.trainer import distillation_trainer

    original = current()
    logitless.trl.patch(max_workspace_bytes=1)
    assert isinstance(current(), Divergences) and distillation_trainer.ChunkedDivergenceFunction is current()
    assert current().original is original
    with pytest.raises(logitless.BudgetTooSmallError):
        current().apply(*oracle.make((ROWS,), VOCAB).tensors.values(), 0.5)
    logitless.trl.patch()
    assert current().original is original
    logitless.trl.unpatch()
    assert current() is original and distillation_trainer.ChunkedDivergenceFunction is original


def test_another_function_is_refused_by_name_and_nothing_is_replaced(monkeypatch):
    import trl.kernels.chunked_divergence
    import trl.trainer.utils

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx, student, teacher):
            raise NotImplementedError

    original = trl.trainer.utils._ChunkedLogProbFunction
    monkeypatch.setattr(trl.kernels.chunked_divergence, "ChunkedDivergenceFunction", Other)
    with pytest.raises(UnsupportedError, match=r"ChunkedDivergenceFunction\(student, teacher\) of trl"):
        logitless.trl.patch()
    assert trl.trainer.utils._ChunkedLogProbFunction is original


def test_a_trl_without_it_is_patched(monkeypatch):
    import trl.trainer.utils

    monkeypatch.setitem(sys.modules, "trl.kernels.chunked_divergence", None)  # as if the module did not exist
    logitless.trl.patch()
    assert trl.trainer.utils._ChunkedLogProbFunction.original is not None


def test_partitioned_weights_are_refused_where_gradients_are_wanted():
    logitless.trl.patch()
    tensors = oracle.make((ROWS,), VOCAB).leaves()
    tensors["student_weight"].ds_id = 3
    with pytest.raises(UnsupportedError, match="ZeRO-3"):
        current().apply(*tensors.values(), 0.5)
