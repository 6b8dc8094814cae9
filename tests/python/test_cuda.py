"""CUDA tensors: streams, graphs, memory, later errors of a device. test_options.py compares values."""

import logitless
import pytest
import torch
import torch.nn.functional as F
from support import DTYPES, SHORT, assert_same, lce, peak_of, python, results

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def head(tokens=260, vocab=515, hidden=72, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    input = torch.randn(tokens, hidden, generator=g)
    weight = torch.randn(vocab, hidden, generator=g) / hidden**0.5
    target = torch.randint(0, vocab, (tokens,), generator=g)
    target[::5] = -100
    return input.to(dtype).cuda().requires_grad_(), weight.to(dtype).cuda().requires_grad_(), target.cuda()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeats_bitwise(dtype, reduction):
    tensors = head(dtype=dtype)
    first = results(*tensors, reduction=reduction)
    for _ in range(5):
        assert_same(results(*tensors, reduction=reduction), first)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_graph_capture_and_replay(dtype, reduction):
    input, weight, target = head(dtype=dtype)

    def step():
        loss = lce(input, weight, target, reduction=reduction).sum()
        return [loss.detach(), *torch.autograd.grad(2 * loss, (input, weight))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()
    for seed in (0, 1):
        other = head(dtype=dtype, seed=seed)
        with torch.no_grad():
            for tensor, value in zip((input, weight, target), other):
                tensor.copy_(value)
        graph.replay()
        replayed = [t.clone() for t in static]
        assert_same(replayed, step())


def test_current_stream_is_used():
    values, weight, target = head()
    expected = results(values, weight, target)
    input = torch.zeros_like(values, requires_grad=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # work on another stream would see zeros
        with torch.no_grad():
            input.copy_(values)
        got = results(input, weight, target)
    stream.synchronize()
    assert_same(got, expected)


def sum_bounds(input, weight, target, reduction):
    """Returns the allowed differences of two computations of each gradient, sum_k dz_k x_k.

    A sum of K terms in fp32, in any order, is off by at most (K - 1) u sum_k |dz_k x_k|, with u = eps / 2. Each product
    adds u and each dz about 4 u; the other computation has the same errors. dz of 16-bit operands is rounded to their
    dtype.
    """
    x, w = (t.detach().double() for t in (input, weight))
    valid = target != -100
    dz = torch.softmax(x @ w.T, 1) - F.one_hot(target.clamp(min=0), w.shape[0])
    dz = dz.abs() * valid[:, None] / (valid.sum() if reduction == "mean" else 1)
    eps = torch.finfo(torch.float32).eps
    short = torch.finfo(input.dtype).eps if input.dtype in SHORT else 0
    sizes = dz @ w.abs(), dz.T @ x.abs()
    return [((terms + 4) * eps + short) * size for terms, size in zip((w.shape[0], x.shape[0]), sizes)]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_upstream_factor_and_retained_graph(dtype, reduction):
    input, weight, target = head(dtype=dtype)
    (3 * lce(input, weight, target, reduction=reduction).sum()).backward()
    once = input.grad.clone(), weight.grad.clone()
    plain = torch.autograd.grad(lce(input, weight, target, reduction=reduction).sum(), (input, weight))
    eps = torch.finfo(dtype).eps
    for tripled, single, bound in zip(once, plain, sum_bounds(input, weight, target, reduction)):
        # Both are rounded to dtype, and so is their triple.
        allowed = 3 * bound + 2 * eps * (3 * single.double().abs()) + 3 * torch.finfo(dtype).smallest_normal * eps
        assert ((tripled.double() - 3 * single.double()).abs() <= allowed).all()
    input.grad = weight.grad = None
    loss = lce(input, weight, target, reduction=reduction).sum()
    first = torch.autograd.grad(loss, (input, weight), retain_graph=True)
    assert_same(torch.autograd.grad(loss, (input, weight), retain_graph=True), first)
    assert_same(torch.autograd.grad(loss, (input, weight)), first)


def large_head():
    """Makes 4096 tokens and a vocabulary of 32768."""
    input = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(32768, 1024, device="cuda", dtype=torch.bfloat16) / 32
    return input, weight, torch.randint(0, 32768, (4096,), device="cuda")


@pytest.mark.parametrize("budget", [64 << 20, 160 << 20, 400 << 20], ids=lambda b: f"{b >> 20}MiB")
@pytest.mark.parametrize("trained", ["both", "hidden", "weight"])
def test_memory_stays_within_gradients_and_budget(budget, trained):
    input, weight, target = large_head()
    leaves = {"both": [input, weight], "hidden": [input], "weight": [weight]}[trained]
    gradients = sum(leaf.requires_grad_().nbytes for leaf in leaves)
    grown = peak_of(lambda: torch.autograd.grad(lce(input, weight, target, max_workspace_bytes=budget), leaves))
    assert grown <= gradients + budget + (1 << 20)


def test_loss_alone_needs_little_memory():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the sm90 engine only")
    input, weight, target = large_head()
    assert peak_of(lambda: lce(input, weight, target)) <= (8 << 20) + 64 * len(target)


def test_tensors_of_several_devices_are_refused():
    input, weight, target = head()
    with pytest.raises(ValueError, match="^weight: expected a tensor on cuda:0.*got device cpu"):
        lce(input, weight.detach().cpu(), target)
    with pytest.raises(ValueError, match="targets: expected a tensor on cuda:0.*got device cpu"):
        lce(input, weight, target.cpu())
    with pytest.raises(ValueError, match="^weight: expected a tensor on cpu.*got device cuda:0"):
        lce(input.detach().cpu(), weight, target)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one device")
def test_another_device_than_the_current_one():
    expected = results(*(tensors := head()))
    other = [t.detach().to("cuda:1").requires_grad_(t.requires_grad) for t in tensors]
    got = results(*other)
    assert torch.cuda.current_device() == 0 and got[0].device.index == 1
    assert_same([t.to("cuda:0") for t in got], expected)


@pytest.mark.parametrize("bad", [515, -1, 2**40])
def test_target_out_of_range(bad):
    input, weight, target = head()
    target[7] = bad
    loss = lce(input, weight, target)
    assert loss.isnan()
    d_hidden, d_weight = torch.autograd.grad(loss, (input, weight))
    assert (d_hidden[7] == 0).all() and d_hidden.isfinite().all() and d_weight.isfinite().all()
    rows = lce(input, weight, target, reduction="none")
    assert rows.isnan().nonzero().flatten().tolist() == [7]


def test_no_rows_and_no_valid_row():
    _, weight, target = head()
    empty = torch.zeros(0, 72, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    loss = lce(empty, weight, target[:0])
    assert loss.isnan() and (torch.autograd.grad(loss, weight)[0] == 0).all()
    input, weight, target = head()
    loss = lce(input, weight, torch.full_like(target, -100), reduction="sum")
    assert loss == 0 and all((g == 0).all() for g in torch.autograd.grad(loss, (input, weight)))


def test_budget_that_is_too_small_is_refused():
    with pytest.raises(logitless.BudgetTooSmallError):
        lce(*head(), max_workspace_bytes=1)


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
for got, wanted in zip(static, expected):
    for a, b in zip(got, wanted):
        assert torch.equal(a, b)
"""


@pytest.mark.parametrize("shape", [(260, 515, 72), (1024, 32768, 1024)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_first_run_is_captured_after_warm_up(dtype, shape):
    gradients = ("exact",) if dtype == torch.float64 else ("exact", "always-sparsified")
    python(COLD.replace("SHAPE", str(shape)).replace("DTYPE", str(dtype)).replace("GRADIENTS", str(gradients)))
