"""Every statistic of a row, alone and all at once, against PyTorch on whole logits, and the gradients of some."""

import logitless
import logitless.numpy
import pytest
import torch
from logitless import options as _options
from oracle import shifted
from support import lce

OF_ROWS = tuple(name for name in _options.OF_ROWS if name not in _options.SCREEN_STATS)
OPTIONS = {
    "plain": {},
    "shift": {"shift": 1},
    "scale, softcap and temperature": {"scale": 1.5, "softcap": 4.0, "temperature": 0.7},
    "rows' temperatures": {"temperature": torch.linspace(0.5, 2, 12).reshape(3, 4)},
    "sparsified": {"gradient": "sparsified", "threshold": 1e-30, "seed": 1},
    "none": {"reduction": "none"},
}


def head(dtype=torch.float32, vocab=37, size=8):
    g = torch.Generator().manual_seed(0)
    input = torch.randn(3, 4, size, generator=g).to(dtype)
    weight = torch.randn(vocab, size, generator=g).to(dtype)
    bias = torch.randn(vocab, generator=g).to(dtype)
    target = torch.randint(vocab, (3, 4), generator=g)
    target[1, 2] = -100
    return input, weight, bias, target


def naive(input, weight, bias, target, dtype, scale=1.0, softcap=None, temperature=1.0, shift=0, **_):
    """Returns differentiable statistics by name, and the largest logit, whose rounding they all have."""
    z = scale * (input.to(dtype) @ weight.to(dtype).T) + bias.to(dtype)
    z = softcap * torch.tanh(z / softcap) if softcap else z
    z = z / (temperature.to(dtype)[..., None] if torch.is_tensor(temperature) else temperature)
    target = shifted(target, shift, -100)
    valid = target != -100
    y = torch.where(valid, target, 0)
    log_p = torch.log_softmax(z, -1)
    lse, argmax = torch.logsumexp(z, -1), z.argmax(-1)
    z_y = z.gather(-1, y[..., None])[..., 0]
    values = {
        "nll": lse - z_y,
        "lse": lse,
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "target_logit": z_y,
        "mean_logit": z.mean(-1),
        "log_sum_sq_probs": torch.logsumexp(2 * log_p, -1),
        "max_logit": z.max(-1).values,
        "is_top1": argmax == y,
    }
    values = {name: torch.where(valid, value, torch.zeros_like(value)) for name, value in values.items()}
    return values | {"argmax": torch.where(valid, argmax, -1)}, z.detach().abs().max()


def expect_close(name, got, truth, plain, size, dtype):
    """Asserts an error of at most twice the plain computation's, plus a rounding of the largest logit for each of four
    uses."""
    if not truth.is_floating_point():
        assert torch.equal(got, truth), name
        return
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    bound = 2 * (plain.double() - truth).abs().max() + unit * (4 + 4 * size)
    assert got.shape == truth.shape and (got.double() - truth).abs().max() <= bound, name


def check(got, names, tensors, options):
    """Asserts that the result has the requested statistics, and nothing else."""
    dtype = tensors[0].dtype
    truth, size = naive(*tensors, torch.float64, **options)
    plain, _ = naive(*tensors, torch.promote_types(dtype, torch.float32), **options)
    for name in OF_ROWS:
        value = getattr(got, name)
        assert (value is not None) == (name in names), name
        if value is not None:
            expect_close(name, torch.as_tensor(value).detach(), truth[name], plain[name], size, dtype)


each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@each_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all(options, dtype):
    tensors = head(dtype)
    input, weight, bias, target = tensors
    for names in (OF_ROWS, *((name,) for name in OF_ROWS)):
        got = lce(input, weight, target, bias=bias, return_stats=names, **options)
        check(got, names, tensors, options)


@pytest.mark.parametrize("together", [True, False])
@each_option
def test_with_gradients(options, together):
    """The statistics come in the pass that makes gradients, and in one before it."""
    input, weight, bias, target = tensors = head()
    leaves = [tensor.clone().requires_grad_() for tensor in (input, weight)]
    got = lce(*leaves, target, bias=bias, return_stats=OF_ROWS, differentiable_stats=not together, **options)
    check(got, OF_ROWS, tensors, options)
    for name in OF_ROWS:
        assert getattr(got, name).requires_grad == (not together and name in _options.DIFFERENTIABLE), name


@pytest.mark.parametrize("name", _options.DIFFERENTIABLE)
@each_option
def test_gradient(name, options):
    upstream = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)

    def fused(input, weight, bias, target, dtype):
        return lce(input, weight, target, bias=bias, return_stats=(name,), **options)._asdict()

    def plainly(*tensors):
        return naive(*tensors, **options)[0]

    def gradients(call, dtype):
        *tensors, target = head()
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        value = call(*leaves, target, dtype)[name]
        return torch.autograd.grad((value * upstream.to(value.dtype)).sum(), leaves)

    got, plain = gradients(fused, torch.float32), gradients(plainly, torch.float32)
    truth = gradients(plainly, torch.float64)
    for g, t, p in zip(got, truth, plain):
        # These are sums of at most 37 x 12 terms of about t's size, each with the rounding of logits of about 10.
        bound = 2 * (p.double() - t).abs().max() + 16 * torch.finfo(torch.float32).eps * (1 + t.abs().max())
        assert (g.double() - t).abs().max() <= bound


def test_learned_numbers():
    """The gradients of scale and temperature come from a sum of targets' logits, which are products of both."""
    input, weight, _, target = head()
    scale, temperature = torch.tensor(1.5, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    out = lce(input, weight, target, scale=scale, temperature=temperature, return_stats=("target_logit",))
    total = out.target_logit.sum()
    total.backward()
    assert scale.grad.item() == pytest.approx(total.item() / 1.5, rel=1e-5, abs=1e-5)
    assert temperature.grad.item() == pytest.approx(-total.item() / 0.5, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numpy(dtype):
    tensors = head(dtype)
    input, weight, bias, target = (tensor.numpy() for tensor in tensors)
    for gradients in (False, True):
        options = {"bias": bias, "return_stats": OF_ROWS, "gradients": gradients}
        got = logitless.numpy.linear_cross_entropy(input, weight, target, **options)
        check(got, OF_ROWS, tensors, {})


def test_top1_is_the_first_of_equals():
    input, weight = torch.ones(3, 2), torch.ones(5, 2)
    out = lce(input, weight, torch.tensor([0, 1, 4]), return_stats=("is_top1", "argmax"))
    assert out.is_top1.tolist() == [True, False, False] and out.argmax.tolist() == [0, 0, 0]


def test_the_interfaces_have_the_list():
    names = {"loss", *_options.STAT_NAMES}
    assert set(logitless.LinearCrossEntropyOutput._fields) == names
    fields = set(logitless.numpy.LinearCrossEntropyResult.__dataclass_fields__)
    assert fields - {"d_hidden", "d_weight", "d_bias"} == names


def test_true_is_the_default_ones():
    input, weight, _, target = head()
    out = lce(input, weight, target, return_stats=True)
    assert {name for name, value in out._asdict().items() if value is not None} == {"loss", *_options.DEFAULT_STATS}
