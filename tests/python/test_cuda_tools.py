"""CUDA tensors: a cold capture, a learned scale, numbers of compiled code, batches of upstream gradients."""

import logitless
import pytest
import torch
from test_cuda import DTYPES, assert_same, head
from test_options import make
from test_package import python
from test_scale import check
from test_temperature import check_gradient
from torch._dynamo.testing import CompileCounterWithBackend

lce = logitless.linear_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

COLD = """
import torch, logitless
logitless.warm_up()
tokens, vocab, hidden = SHAPE
g = torch.Generator("cuda").manual_seed(0)
input = torch.randn(tokens, hidden, device="cuda", generator=g).to(DTYPE).requires_grad_()
weight = (torch.randn(vocab, hidden, device="cuda", generator=g) / hidden**0.5).to(DTYPE).requires_grad_()
target = torch.randint(0, vocab, (tokens,), device="cuda", generator=g)
seed = torch.tensor(3, device="cuda")
def step(reduction, gradient):
    options = {"gradient": gradient, "seed": seed if gradient != "exact" else None}
    loss = logitless.linear_cross_entropy(input, weight, target, reduction=reduction, **options).sum()
    return [loss.detach(), *torch.autograd.grad(2 * loss, (input, weight))]
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # of the first call with these sizes
    static = [step(r, g) for r in ("mean", "none") for g in GRADIENTS]
graph.replay()
torch.cuda.synchronize()
expected = [step(r, g) for r in ("mean", "none") for g in GRADIENTS]
for found, wanted in zip(static, expected):
    for a, b in zip(found, wanted):
        assert torch.equal(a, b)
"""


@pytest.mark.parametrize("shape", [(260, 515, 72), (1024, 32768, 1024)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_first_run_is_captured_after_warm_up(dtype, shape):
    gradients = ("exact",) if dtype == torch.float64 else ("exact", "always-thinned")
    python(COLD.replace("SHAPE", str(shape)).replace("DTYPE", str(dtype)).replace("GRADIENTS", str(gradients)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", ["cuda", "cpu"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("implementation", ["", "mma", "portable"])
def test_learned_scale(implementation, reduction, place, dtype, monkeypatch):
    """On the device or on the CPU, where reading it does not wait."""
    if implementation == "mma" and dtype not in (torch.bfloat16, torch.float16):
        pytest.skip("mma takes 16-bit operands")
    monkeypatch.setenv("LOGITLESS_CUDA_IMPLEMENTATION", implementation)
    problem = make((11,), 23, 9, (dtype,) * 3, bias=True, reduction=reduction)
    leaves = [t.detach().cuda().requires_grad_() for t in (problem.input, problem.linear_weight, problem.linear_bias)]
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    scale = torch.tensor(0.5, dtype=kind, device=place, requires_grad=True)
    loss = lce(*leaves[:2], problem.target.cuda(), linear_bias=leaves[2], scale=scale, reduction=reduction)
    problem.upstream = {"loss": torch.linspace(0.5, 2, loss.numel(), dtype=torch.float64).reshape(loss.shape)}
    loss.backward(problem.upstream["loss"].to(loss))
    assert scale.grad.device == scale.device
    check(problem, 0.5, scale.grad.cpu(), ("loss",))
    constant = [t.detach().requires_grad_() for t in leaves]
    loss = lce(*constant[:2], problem.target.cuda(), linear_bias=constant[2], scale=0.5, reduction=reduction)
    loss.backward(problem.upstream["loss"].to(loss))
    for leaf, other in zip(leaves, constant):
        unit = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(leaf.grad, other.grad, rtol=unit, atol=unit * other.grad.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", ["cuda", "cpu"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("implementation", ["", "mma", "portable"])
def test_learned_temperature(implementation, reduction, place, dtype, monkeypatch):
    if implementation == "mma" and dtype not in (torch.bfloat16, torch.float16):
        pytest.skip("mma takes 16-bit operands")
    monkeypatch.setenv("LOGITLESS_CUDA_IMPLEMENTATION", implementation)
    problem = make((11,), 23, 9, (dtype,) * 3, bias=True, reduction=reduction, temperature=0.5)
    leaves = [t.detach().cuda().requires_grad_() for t in (problem.input, problem.linear_weight, problem.linear_bias)]
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    temperature = torch.tensor(0.5, dtype=kind, device=place, requires_grad=True)
    given = {"linear_bias": leaves[2], "temperature": temperature, "reduction": reduction}
    loss = lce(*leaves[:2], problem.target.cuda(), **given)
    problem.upstream = {"loss": torch.linspace(0.5, 2, loss.numel(), dtype=torch.float64).reshape(loss.shape)}
    loss.backward(problem.upstream["loss"].to(loss))
    assert temperature.grad.device == temperature.device
    check_gradient(problem, temperature.grad.cpu(), ("loss",))


@pytest.mark.parametrize("name, values", [("num_items", range(3, 23)), ("z_loss", [0.05 * k for k in range(1, 21)])])
def test_a_schedule_compiles_twice(name, values):
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda i, w, t, v: lce(i, w, t, **{name: v}), fullgraph=True, backend=counter)
    input, weight, target = head()
    for value in values:
        found = compiled(input, weight, target, value)
        expected = lce(input, weight, target, **{name: value})
        assert torch.equal(found, expected)
        assert_same(torch.autograd.grad(found, (input, weight)), torch.autograd.grad(expected, (input, weight)))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=str)
def test_batch_of_upstream_gradients(options):
    input, weight, target = head()
    loss = lce(input, weight, target, **options)
    batch = torch.randn(3, *loss.shape, device="cuda")
    found = torch.autograd.grad(loss, (input, weight), batch, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(loss, (input, weight), upstream, retain_graph=True) for upstream in batch]
    for f, e in zip(found, zip(*single)):
        torch.testing.assert_close(f, torch.stack(e))


def test_num_items_of_nothing_divides_by_zero():
    input, weight, target = head()
    for zero in (0, torch.tensor(0), torch.tensor(0, device="cuda")):
        for gradient in ("exact", "always-thinned"):
            loss = lce(input, weight, target, num_items=zero, gradient=gradient)
            loss.backward()
            assert loss.item() == float("inf")
            assert lce(input, weight, torch.full_like(target, -100), num_items=zero, gradient=gradient).isnan()
