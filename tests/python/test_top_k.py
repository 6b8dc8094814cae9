"""logitless.linear_top_k beside torch.topk of whole logits, and logitless.numpy's."""

import logitless
import logitless.numpy
import pytest
import torch
from support import DTYPES, SHORT

np = pytest.importorskip("numpy")


def tensors(shape=(3, 5), vocab=900, hidden=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(*shape, hidden, generator=generator).to(dtype)
    weight = torch.randn(vocab, hidden, generator=generator).to(dtype)
    return input, weight, torch.randn(vocab, generator=generator).to(dtype)


def logits_of(input, weight, bias=None, scale=1.0, softcap=None, temperature=1.0):
    """Returns logits in float64."""
    z = scale * (input.double() @ weight.double().T)
    if bias is not None:
        z = z + bias.double()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    return z / torch.as_tensor(temperature, dtype=torch.float64).expand(z.shape[:-1])[..., None]


def check(top, z, k, unit):
    """Asserts that the r-th result's logit is at least the r-th largest in float64, up to rounding."""
    expected = z.sort(dim=-1, descending=True).values[..., :k]
    assert top.ids.dtype == torch.int64 and top.ids.shape == expected.shape
    error = 64 * unit * z.abs().max()
    assert ((z.gather(-1, top.ids) - expected).abs() <= error).all()
    log_probs = z.log_softmax(-1).gather(-1, top.ids)
    torch.testing.assert_close(top.log_probs.double(), log_probs, rtol=0, atol=float(error))
    assert (top.ids.sort(-1).values.diff(dim=-1) > 0).all() and (top.log_probs.diff(dim=-1) <= 0).all()


OPTIONS = [{}, {"scale": 0.5, "softcap": 3.0}, {"temperature": 0.7}, {"temperature": torch.rand(3, 5) + 0.1}]
each_option = pytest.mark.parametrize("options", OPTIONS, ids=["plain", "softcap", "temperature", "temperatures"])


@pytest.mark.parametrize("dtype", DTYPES)
@each_option
@pytest.mark.parametrize("k", [1, 7, 64])
def test_against_float64(dtype, options, k):
    input, weight, bias = tensors(dtype=dtype)
    top = logitless.linear_top_k(input, weight, k, bias=bias, **options)
    assert top.log_probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    check(top, logits_of(input, weight, bias, **options), k, 2.0**-50 if dtype == torch.float64 else 2.0**-24)


@pytest.mark.parametrize("shape", [(), (4,), (0,), (2, 0, 3), (2, 3, 4)])
def test_any_leading_shape(shape):
    input, weight, _ = tensors(shape)
    top = logitless.linear_top_k(input, weight, 3)
    assert top.ids.shape == top.log_probs.shape == (*shape, 3)
    check(top, logits_of(input, weight), 3, 2.0**-24) if input.numel() else None


def test_numbers_may_be_tensors_and_nothing_has_a_gradient():
    input, weight, bias = (t.requires_grad_() for t in tensors())
    scale = torch.tensor(0.5, requires_grad=True)
    top = logitless.linear_top_k(input, weight, 4, bias=bias, scale=scale, temperature=torch.tensor([2.0]))
    assert not top.ids.requires_grad and not top.log_probs.requires_grad
    expected = logitless.linear_top_k(input, weight, 4, bias=bias, scale=0.5, temperature=2.0)
    assert all(map(torch.equal, top, expected))


def test_of_equals_the_smaller_ids():
    input, weight = torch.zeros(2, 4), torch.randn(700, 4)
    top = logitless.linear_top_k(input, weight, 5)
    assert top.ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    torch.testing.assert_close(top.log_probs, torch.full((2, 5), -torch.tensor(700.0).log().item()))


def test_rows_with_a_stride_and_a_budget():
    input, weight, _ = tensors((40,))
    wide = torch.zeros(40, 2 * input.shape[1])
    wide[:, : input.shape[1]] = input
    expected = logitless.linear_top_k(input, weight, 8)
    with pytest.raises(logitless.BudgetTooSmallError) as error:
        logitless.linear_top_k(input, weight, 8, max_workspace_bytes=1)
    for x in (wide[:, : input.shape[1]], input.T.contiguous().T):
        top = logitless.linear_top_k(x, weight, 8, max_workspace_bytes=error.value.required_bytes)
        assert all(map(torch.equal, top, expected))


def test_autocast():
    input, weight, _ = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        top = logitless.linear_top_k(input, weight, 4)
    check(top, logits_of(input.bfloat16(), weight.bfloat16()), 4, 2.0**-24)


def test_equals_linear_cross_entropy():
    input, weight, bias = tensors()
    top = logitless.linear_top_k(input, weight, 2, bias=bias)
    stats = logitless.linear_cross_entropy(input, weight, top.ids[..., 0], bias=bias, return_stats=["argmax", "nll"])
    assert torch.equal(stats.argmax, top.ids[..., 0]) and torch.equal(-stats.nll, top.log_probs[..., 0])


class Sampler(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.head, self.options = torch.nn.Linear(16, 900), options

    def forward(self, hidden, temperature):
        options = {"bias": self.head.bias, "temperature": temperature, **self.options}
        top = logitless.linear_top_k(hidden, self.head.weight, 4, **options)
        return top.ids, top.log_probs + 0


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "scale": 0.5}, {"temperature": 0.7}], ids=str)
def test_exported(options, autocast, strict):
    """The program takes any number of rows; weights that require grad leave no gradient."""
    model = Sampler(**options)
    batch = torch.export.Dim("batch", min=1, max=100)
    shapes = ({0: batch}, {0: batch})
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        given = (torch.randn(3, 5, 16), torch.rand(3, 5) + 0.5)
        program = torch.export.export(model, given, dynamic_shapes=shapes, strict=strict)
        for rows in (3, 1, 7):
            given = (torch.randn(rows, 5, 16, requires_grad=True), torch.rand(rows, 5) + 0.5)
            got, expected = program.module()(*given), model(*given)
            assert got[0].shape == (rows, 5, 4) and not got[1].requires_grad and not expected[1].requires_grad
            assert all(torch.equal(a, b) for a, b in zip(got, expected))
    assert any(node.target == torch.ops.logitless.run.default for node in program.graph.nodes)


def test_fake_tensors():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        top = logitless.linear_top_k(torch.empty(2, 3, 16, dtype=torch.bfloat16), torch.empty(900, 16), 5)
    assert top.ids.shape == top.log_probs.shape == (2, 3, 5) and top.log_probs.dtype == torch.float32


@each_option
def test_numpy_equals_torch(options):
    input, weight, bias = tensors()
    expected = logitless.linear_top_k(input, weight, 6, bias=bias, **options)
    given = {n: v.numpy() if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    got = logitless.numpy.linear_top_k(input.numpy(), weight.numpy(), 6, bias=bias.numpy(), **given)
    for name in ("ids", "log_probs"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name).numpy())
    reference = logitless.numpy.linear_top_k(input.numpy(), weight.numpy(), 6, backend="reference")
    assert reference.ids.shape == (3, 5, 6) and reference.log_probs.dtype == np.float32


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["", "mma", "portable"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_cuda(dtype, engine, monkeypatch):
    if engine == "mma" and dtype not in SHORT:
        pytest.skip("mma takes 16-bit operands")
    monkeypatch.setenv("LOGITLESS_CUDA_ENGINE", engine)
    input, weight, bias = tensors((300,), vocab=30_000, hidden=64, dtype=dtype)
    z = logits_of(input, weight, bias, softcap=20.0)
    *given, bias = (t.cuda() for t in (input, weight, bias))
    for k in (1, 8, 64):
        top, again = (logitless.linear_top_k(*given, k, bias=bias, softcap=20.0) for _ in range(2))
        assert top.ids.is_cuda and all(map(torch.equal, top, again))
        on_host = logitless.LinearTopK(top.ids.cpu(), top.log_probs.cpu())
        check(on_host, z, k, 2.0**-46 if dtype == torch.float64 else 2.0**-20)
