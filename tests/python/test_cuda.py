"""CUDA tensors: the same answers as the plain computation on the CPU; streams, graphs, compilation, memory."""

import functools

import logitless
import oracle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from oracle import DIFFERENTIABLE, NAMES
from test_options import SINGLE, make, problems, upstream_like
from torch.utils.checkpoint import checkpoint

lce = logitless.linear_cross_entropy
compare = functools.partial(oracle.compare, keeps_16_bits=True)
SHORT = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float64, *SHORT)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(params=["automatic", "portable"])
def implementation(request, monkeypatch):
    monkeypatch.delenv("LOGITLESS_CUDA_IMPLEMENTATION", raising=False)
    if request.param != "automatic":
        monkeypatch.setenv("LOGITLESS_CUDA_IMPLEMENTATION", request.param)
    return request.param


def to_cuda(value):
    return value.cuda() if torch.is_tensor(value) else value


def run(problem, upstream_names=("loss",), layout=lambda t: t, **options):
    """As test_options.run, computed on the device; results come back to the CPU, where the oracle is."""
    leaves = [None if t is None else layout(t.detach().cuda()).requires_grad_() for t in problem.leaves()]
    given = {name: to_cuda(value) for name, value in problem.options.items()}
    out = lce(leaves[0], leaves[1], problem.target.cuda(), linear_bias=leaves[2], return_stats=True, **given, **options)
    problem.upstream = upstream_like(out, upstream_names)
    tensors = [getattr(out, name) for name in upstream_names]
    torch.autograd.backward(tensors, [problem.upstream[n].to(t) for n, t in zip(upstream_names, tensors)])
    got = {name: value.detach().cpu() for name, value in out._asdict().items() if value is not None}
    return got | {n: None if leaf is None else leaf.grad.cpu() for n, leaf in zip(NAMES[4:], leaves)}


def head(tokens=260, vocab=515, hidden=72, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    input = torch.randn(tokens, hidden, generator=g)
    weight = torch.randn(vocab, hidden, generator=g) / hidden**0.5
    target = torch.randint(0, vocab, (tokens,), generator=g)
    target[::5] = -100
    return input.to(dtype).cuda().requires_grad_(), weight.to(dtype).cuda().requires_grad_(), target.cuda()


def results(f, *tensors):
    loss = f()
    return [loss.detach(), *torch.autograd.grad(loss.sum(), tensors)]


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("later", [False, True], ids=["3F", "4F"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SINGLE)
def test_one_option(name, dtype, later, implementation):
    problem = make((3, 5), 23, 9, (dtype,) * 3, bias=True, **SINGLE[name])
    compare(problem, run(problem, differentiable_stats=later))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["nll", "lse", "entropy"])
def test_gradient_of_one_statistic(name, dtype, implementation):
    problem = make((11,), 23, 9, (dtype,) * 3, bias=True, softcap=3.0)
    compare(problem, run(problem, (name,)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(257, 259, 67), (300, 601, 136), (5, 2053, 40), (130, 129, 8)], ids=str)
def test_shapes_across_tiles(shape, dtype, implementation):
    tokens, vocab, hidden = shape
    problem = make((tokens,), vocab, hidden, (dtype,) * 3, bias=True, spread=3.0)
    compare(problem, run(problem, differentiable_stats=False))


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(problems())
def test_random_combinations(problem):
    compare(problem, run(problem, DIFFERENTIABLE))
    compare(problem, run(problem, differentiable_stats=False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equals_cross_entropy(reduction, weighted, dtype):
    input, weight, target = head(dtype=dtype)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    if weighted:
        options["weight"] = torch.rand(weight.shape[0], device="cuda")
    got = lce(input, weight, target, **options)
    expected = F.cross_entropy(F.linear(input.double(), weight.double()), target, **{
        name: value.double() if torch.is_tensor(value) else value for name, value in options.items()
    })  # fmt: skip
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


LAYOUTS = {
    "rows": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every_second_row": lambda t: t.repeat_interleave(2, 0)[::2],
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "columns": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "misaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "misaligned_rows": lambda t: torch.cat([t, t[..., :1]], -1)[..., : t.shape[-1]] if t.dim() > 1 else t,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype, implementation):
    problem = make((37,), 131, 16, (dtype,) * 3, bias=True)
    compare(problem, run(problem, layout=LAYOUTS[layout], differentiable_stats=False))
    compare(problem, run(problem, ("nll",), layout=LAYOUTS[layout]))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeats_bitwise(dtype, reduction):
    input, weight, target = head(dtype=dtype)
    first = results(lambda: lce(input, weight, target, reduction=reduction), input, weight)
    for _ in range(5):
        assert_same(results(lambda: lce(input, weight, target, reduction=reduction), input, weight), first)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_is_bitwise_eager(backend, dtype, reduction):
    compiled = torch.compile(lce, fullgraph=True, backend=backend)
    input, weight, target = head(dtype=dtype)

    def scaled(f):
        return lambda: 0.5 * f(input, weight, target, reduction=reduction)

    assert_same(results(scaled(compiled), input, weight), results(scaled(lce), input, weight))


def test_autocast():
    input, weight, target = head(dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = results(lambda: lce(input, weight, target), input, weight)
    assert got[0].dtype == torch.float32 and got[1].dtype == got[2].dtype == torch.float32
    short = [t.detach().bfloat16().requires_grad_() for t in (input, weight)]
    expected = results(lambda: lce(*short, target), *short)
    for wide, narrow in zip(got, expected):  # which is rounded once more
        assert (wide - narrow.float()).norm() <= 2 * 2.0**-8 * wide.norm()


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
    expected = results(lambda: lce(values, weight, target), values, weight)
    input = torch.zeros_like(values, requires_grad=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # what follows on another stream would see zeros
        with torch.no_grad():
            input.copy_(values)
        got = results(lambda: lce(input, weight, target), input, weight)
    stream.synchronize()
    assert_same(got, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    input, weight, target = head()
    body = torch.nn.Linear(72, 72, device="cuda", dtype=torch.bfloat16)

    def loss(x):
        return lce(body(x), weight, target)

    expected = torch.autograd.grad(loss(input), (input, weight))
    checkpoint(loss, input, use_reentrant=reentrant).backward()
    assert_same((input.grad, weight.grad), expected)


def sum_bounds(input, weight, target, reduction):
    """How far two computations of each gradient, sum_k dz_k x_k, may differ.

    A sum of K terms in fp32, in any order, is off by at most (K - 1) u sum_k |dz_k x_k| (u = eps / 2), each product by
    u and each dz by about 4 u more; the other computation as well. dz of 16-bit operands is rounded to their dtype.
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


@pytest.mark.parametrize("budget", [64 << 20, 160 << 20, 400 << 20], ids=lambda b: f"{b >> 20}MiB")
@pytest.mark.parametrize("trained", ["both", "input", "weight"])
def test_memory_stays_within_gradients_and_budget(budget, trained):
    tokens, vocab, hidden = 4096, 32768, 1024
    input = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) / 32
    input.requires_grad_(trained != "weight")
    weight.requires_grad_(trained != "input")
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    gradients = sum(t.numel() * t.element_size() for t in (input, weight) if t.requires_grad)
    for measured in (False, True):  # the first loads kernels
        input.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        lce(input, weight, target, max_workspace_bytes=budget).backward()
        torch.cuda.synchronize()
        grown = torch.cuda.max_memory_allocated() - before
        assert not measured or grown <= gradients + budget + (1 << 20)


def test_loss_alone_needs_little_memory():
    tokens, vocab, hidden = 4096, 32768, 1024
    input = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) / 32
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of the sm90 implementation")
    lce(input, weight, target)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lce(input, weight, target)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= (8 << 20) + 64 * tokens


def test_tensors_of_several_devices_are_refused():
    input, weight, target = head()
    with pytest.raises(ValueError, match="linear_weight: expected a tensor on cuda:0.*got device cpu"):
        lce(input, weight.detach().cpu(), target)
    with pytest.raises(ValueError, match="target: expected a tensor on cuda:0.*got device cpu"):
        lce(input, weight, target.cpu())
    with pytest.raises(ValueError, match="linear_weight: expected a tensor on cpu.*got device cuda:0"):
        lce(input.detach().cpu(), weight, target)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one device")
def test_another_device_than_the_current_one():
    expected = results(lambda: lce(*tensors), *(tensors := head())[:2])
    other = [t.detach().to("cuda:1").requires_grad_(t.requires_grad) for t in tensors]
    got = results(lambda: lce(*other), *other[:2])
    assert torch.cuda.current_device() == 0 and got[0].device.index == 1
    assert_same([t.to("cuda:0") for t in got], expected)


@pytest.mark.parametrize("bad", [515, -1, 2**40])
def test_target_out_of_range(bad):
    input, weight, target = head()
    target[7] = bad
    loss = lce(input, weight, target)
    assert loss.isnan()
    d_input, d_weight = torch.autograd.grad(loss, (input, weight))
    assert (d_input[7] == 0).all() and d_input.isfinite().all() and d_weight.isfinite().all()
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


def test_main_grad():
    input, weight, target = head()
    main_grad = torch.ones(weight.shape, device="cuda")
    expected = torch.autograd.grad(lce(input, weight, target), weight)[0].float()
    lce(input, weight, target, main_grad=main_grad).backward()
    assert weight.grad is None
    torch.testing.assert_close(main_grad - 1, expected, rtol=2**-6, atol=float(expected.abs().max()) * 2**-7)


def test_budget_that_is_too_small_is_refused():
    with pytest.raises(logitless.BudgetTooSmallError):
        lce(*head(), max_workspace_bytes=1)
