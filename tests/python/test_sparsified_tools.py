"""Sparsified gradients with PyTorch's tools, its statistics, the numpy interface, plans and errors."""

import logitless
import numpy as np
import pytest
import torch
from sparsified_cases import SPARSIFIED, TAU, check_mean_over_seeds, gradients, head, logits_problem
from support import CUDA, DEVICES, SHORT, lce
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")
on_devices = pytest.mark.parametrize("device", DEVICES)
on_cuda = pytest.mark.parametrize("device", [CUDA])


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_with_a_seed_is_bitwise_eager(device, backend, reduction, dynamic):
    if backend == "inductor" and device == "cpu":
        pytest.skip("aot_eager traces the same; kernels of the rest are compiled on the GPU")

    def eager(input, weight, bias, target, seed):
        return lce(torch.relu(input), weight, target, bias=bias, reduction=reduction, seed=seed, **SPARSIFIED)

    compiled = torch.compile(eager, fullgraph=True, dynamic=dynamic, backend=backend)
    for tokens in (12, 9):
        *tensors, target = head(device, tokens)
        for seed in (5, torch.tensor(5, device=device)):
            a, b = (f(*tensors, target, seed) for f in (compiled, eager))
            assert torch.equal(a, b)
            for x, y in zip(gradients(tensors, a.sum()), gradients(tensors, b.sum())):
                assert torch.equal(x, y)


@pytest.mark.slow
@on_devices
def test_compiled_draws_anew_and_repeats(device):
    *tensors, target = head(device)
    compiled = torch.compile(
        lambda *a: lce(*a[:2], target, bias=a[2], **SPARSIFIED), fullgraph=True, backend="aot_eager"
    )

    def draw():
        return gradients(tensors, compiled(*tensors))

    torch.manual_seed(3)
    first, second = draw(), draw()
    assert not torch.equal(first[0], second[0])
    torch.manual_seed(3)
    assert torch.equal(draw()[0], first[0]) and torch.equal(draw()[0], second[0])


@on_devices
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_checkpoint_draws_the_same_again_and_each_step_anew(device, reentrant, reduction):
    *tensors, target = head(device, 16, 500, 16)

    def loss(input, weight, bias):
        options = SPARSIFIED | {"threshold": 0.05, "reduction": reduction}
        return lce(input, weight, target, bias=bias, **options).sum()

    torch.manual_seed(9)
    expected = torch.autograd.grad(loss(*tensors), tensors)
    torch.manual_seed(9)
    steps = []
    for _ in range(3):
        for tensor in tensors:
            tensor.grad = None
        checkpoint(loss, *tensors, use_reentrant=reentrant).backward()
        steps.append([tensor.grad for tensor in tensors])
    assert all(torch.equal(a, b) for a, b in zip(steps[0], expected))
    assert not torch.equal(steps[0][1], steps[1][1]) and not torch.equal(steps[1][1], steps[2][1])


@pytest.mark.parametrize("later", [False, True])
def test_statistics_of_the_draw(later, device="cpu"):  # a CUDA device draws nothing in its dense columns
    logits, weight, target = logits_problem(device)
    target[2] = -100
    options = SPARSIFIED | {"reduction": "none" if later else "sum"}
    p = torch.softmax(logits.detach().double(), 1)
    dz = p - torch.nn.functional.one_hot(target.clamp_min(0), p.shape[1])
    small = (p < TAU) & (dz == p)
    expected = torch.where(small, p * (TAU - p), 0).sum(1)
    numerator, seeds = torch.zeros_like(expected), 200
    for seed in range(seeds):
        out = lce(logits, weight, target, return_stats=["kept_count", "draw_variance"], seed=seed, **options)
        assert out.kept_count.dtype == torch.int32 and out.kept_count.shape == target.shape
        assert out.kept_count[2] == 0 and out.draw_variance[2] == 0 and not out.draw_variance.requires_grad
        drawn = torch.autograd.grad(out.loss.sum(), logits)[0]
        assert torch.equal((drawn != 0).sum(1).int(), out.kept_count)
        certain = torch.where(small, 0.0, dz).square().sum(1)
        square = certain + torch.where(small & (drawn != 0), TAU * p, 0).sum(1)
        numerator += torch.nan_to_num(out.draw_variance) * square / seeds
    valid = target >= 0
    error = (torch.where(small, TAU * p * (TAU - p) ** 2, 0).sum(1) / seeds).sqrt()
    assert ((numerator - expected).abs() <= 6 * error + 1e-6)[valid].all()


@on_devices
def test_statistics_without_gradients(device):
    *tensors, target = head(device)
    input, weight, bias = (t.detach() for t in tensors)
    names = ["kept_count", "draw_variance", "nll"]
    with torch.no_grad():
        out = lce(input, weight, target, bias=bias, return_stats=names, seed=3, **SPARSIFIED)
    trained = lce(tensors[0], weight, target, bias=bias, return_stats=names[:2], seed=3, **SPARSIFIED)
    assert torch.equal(out.kept_count, trained.kept_count)
    torch.testing.assert_close(out.draw_variance, trained.draw_variance)
    assert lce(input, weight, target, return_stats=True, **SPARSIFIED).kept_count is None


@on_cuda
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_waits_for_the_device(device, reduction):
    *tensors, target = head(device)
    generator = torch.Generator(device).manual_seed(1)
    scalar = torch.tensor(3, device=device)
    for seed in (None, 3, scalar, generator):
        lce(*tensors[:2], target, reduction=reduction, seed=seed, **SPARSIFIED).sum().backward()  # warms up
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            lce(*tensors[:2], target, reduction=reduction, seed=seed, **SPARSIFIED).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode(before)


@on_cuda
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_graph_draws_anew_at_each_replay(device, reduction):
    *tensors, target = head(device)
    input, weight, bias = tensors
    seed = torch.tensor(0, device=device)

    def step(seed):
        loss = lce(input, weight, target, bias=bias, reduction=reduction, seed=seed, **SPARSIFIED)
        return torch.autograd.grad(loss.sum(), tensors)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(seed), step(None)
    torch.cuda.current_stream().wait_stream(stream)
    by_tensor, by_generator = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(by_tensor):
        out = step(seed)
    for value in (1, 2, 1 << 40):
        seed.fill_(value)
        by_tensor.replay()
        for a, b in zip(out, step(value)):
            assert torch.equal(a, b)
    with torch.cuda.graph(by_generator):
        out = step(None)
    seen = []
    for _ in range(3):
        by_generator.replay()
        seen.append(out[0].clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


@on_cuda
@pytest.mark.parametrize("engine", ["", "mma", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(257, 1031, 72), (130, 4099, 64)], ids=str)
def test_mean_over_seeds_across_tiles(device, shape, dtype, engine, monkeypatch):
    if engine == "mma" and dtype not in SHORT:
        pytest.skip("mma takes 16-bit operands")
    if engine:
        monkeypatch.setenv("LOGITLESS_CUDA_ENGINE", engine)
    tokens, vocab, hidden = shape
    *tensors, target = head(device, tokens, vocab, hidden, dtype, spread=0.3)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    logits = torch.nn.functional.linear(wide[0], wide[1], wide[2])
    exact = gradients(wide, 64 * torch.nn.functional.cross_entropy(logits, target))

    def draw(seed):
        options = SPARSIFIED | {"threshold": 2**-6, "seed": seed, "bias": tensors[2]}
        return gradients(tensors, 64 * lce(*tensors[:2], target, **options))

    # In 16 bits, dz of the dense columns, d_hidden twice and d_weight are rounded alike for all seeds.
    check_mean_over_seeds(draw, exact, seeds=300, unit=1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)


def arrays():
    rng = np.random.default_rng(0)
    input = rng.standard_normal((2, 5, 6)).astype(np.float32)
    weight = rng.standard_normal((30, 6)).astype(np.float32)
    return input, weight, rng.integers(0, 30, (2, 5))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_numpy(reduction):
    given = arrays()
    options = SPARSIFIED | {"gradients": True, "reduction": reduction}

    def draw(seed, **more):
        out = logitless.numpy.linear_cross_entropy(*given, seed=seed, **options | more)
        return [torch.from_numpy(out.d_hidden).double(), torch.from_numpy(out.d_weight).double()]

    check_mean_over_seeds(draw, draw(None, gradient="exact"), seeds=200)
    for make in (lambda: np.random.seed(4), lambda: np.random.default_rng(4)):
        first, second = (draw(make())[0] for _ in range(2))
        assert torch.equal(first, second)
    tensors = [torch.from_numpy(a).requires_grad_() for a in given[:2]]
    loss = lce(*tensors, torch.from_numpy(given[2]), reduction=reduction, seed=11, **SPARSIFIED)
    for a, b in zip(gradients(tensors, loss.sum()), draw(11)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_numpy_statistics():
    options = SPARSIFIED | {"seed": 2, "return_stats": ["kept_count", "draw_variance"]}
    out = logitless.numpy.linear_cross_entropy(*arrays(), gradients=["hidden"], **options)
    assert out.kept_count.shape == (2, 5) and out.kept_count.min() >= 1 and (out.draw_variance >= 0).all()
    with pytest.raises(ValueError, match="return_stats: expected kept_count only with gradients"):
        logitless.numpy.linear_cross_entropy(*arrays(), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_small_vocabulary_is_sparsified_on_demand_only(reduction, dtype):
    input, weight = (torch.randn(rows, 64, device="cuda").to(dtype) for rows in (300, 1000))
    target = torch.randint(0, 1000, (300,), device="cuda")
    target[::7] = -100

    def gradients_by(gradient):
        tensors = input.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = lce(*tensors, target, reduction=reduction, gradient=gradient, seed=None if gradient == "exact" else 1)
        return torch.autograd.grad(loss.sum(), tensors)

    exact = gradients_by("exact")
    assert all(torch.equal(a, b) for a, b in zip(gradients_by("sparsified"), exact))
    assert not any(torch.equal(a, b) for a, b in zip(gradients_by("always-sparsified"), exact))
    stats = ["kept_count", "draw_variance"]
    tensors = input.clone().requires_grad_(), weight
    out = lce(*tensors, target, reduction=reduction, gradient="sparsified", seed=1, return_stats=stats)
    assert torch.equal(out.kept_count, torch.where(target >= 0, 1000, 0).int()) and not out.draw_variance.any()


def test_plan():
    info = logitless.plan(256, 3000, 64, gradient="always-sparsified")
    assert info.kind == "sparsified" and info.saved_bytes == 0
    assert {p.kind for p in logitless.plans(256, 3000, 64, gradient="always-sparsified")} == {"sparsified"}


@on_cuda
def test_seeds_are_on_the_device_of_input(device):
    input, weight, _, target = head(device)
    with pytest.raises(ValueError, match="seed: expected a generator on cuda"):
        lce(input, weight, target, seed=torch.Generator(), **SPARSIFIED)
    with pytest.raises(ValueError, match="seed: expected a tensor on cuda"):
        lce(input, weight, target, seed=torch.tensor(1), **SPARSIFIED)
