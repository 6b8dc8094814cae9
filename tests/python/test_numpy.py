"""logitless.numpy gives the same bits as logitless for PyTorch, because the library is the same."""

import logitless
import logitless.numpy
import pytest
import torch

np = pytest.importorskip("numpy")


def arrays(dtype=np.float32, shape=(3, 5), vocab=11, hidden=6):
    rng = np.random.default_rng(0)
    input = rng.standard_normal((*shape, hidden)).astype(dtype)
    weight = rng.standard_normal((vocab, hidden)).astype(dtype)
    bias = rng.standard_normal(vocab).astype(dtype)
    target = rng.integers(0, vocab, shape)
    target[0, 0] = -100
    return input, weight, bias, target


OPTIONS = [
    {},
    {"reduction": "sum", "softcap": 3.0, "label_smoothing": 0.1},
    {"reduction": "none", "shift": 1, "scale": 0.5},
    {"num_items": 3.5, "z_loss": 0.1, "ignore_index": None},
    {"temperature": np.linspace(0.5, 2, 15).reshape(3, 5)},
    {"temperature": np.float32(0.5)},
]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=[" ".join(o) or "plain" for o in OPTIONS])
def test_equals_torch(options, dtype):
    input, weight, bias, target = arrays(dtype)
    rng = np.random.default_rng(1)
    weights = {"class_weight": rng.random(11), "token_weight": rng.random((3, 5))}
    got = logitless.numpy.linear_cross_entropy(
        input, weight, target, bias=bias, return_stats=True, gradients=True, **weights, **options
    )
    leaves = [torch.tensor(a).requires_grad_() for a in (input, weight, bias)]
    options = {
        name: torch.as_tensor(v) if isinstance(v, (np.ndarray, np.generic)) else v for name, v in options.items()
    }
    weights = {name: torch.tensor(value) for name, value in weights.items()}
    expected = logitless.linear_cross_entropy(
        leaves[0], leaves[1], torch.tensor(target), bias=leaves[2], return_stats=True, **weights, **options
    )
    expected.loss.sum().backward()
    for name in ("loss", "nll", "lse", "entropy", "argmax", "correct_count", "valid_count"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name).detach().numpy(), err_msg=name)
    tolerance = 3 * np.finfo(dtype).eps  # float16 gradients are computed by another pass there
    for name, leaf in zip(("d_hidden", "d_weight", "d_bias"), leaves):
        gradient = getattr(got, name)
        assert gradient.dtype == dtype and gradient.shape == leaf.shape
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=tolerance, atol=20 * np.finfo(dtype).eps)


def test_only_what_is_asked_for():
    input, weight, bias, target = arrays()
    got = logitless.numpy.linear_cross_entropy(input, weight, target, gradients=["weight"], return_stats=["nll"])
    assert got.d_hidden is None and got.d_weight is not None and got.lse is None and got.nll is not None
    got = logitless.numpy.linear_cross_entropy(input, weight, target)
    assert isinstance(got.loss, np.float32) and got.d_weight is None


def test_upstream_gradient():
    input, weight, _, target = arrays(np.float64)
    for reduction, upstream in (("mean", 2.0), ("none", np.random.default_rng(2).random((3, 5)))):
        options = {"reduction": reduction, "gradients": ["hidden"]}
        got = logitless.numpy.linear_cross_entropy(input, weight, target, grad_loss=upstream, **options)
        leaf = torch.tensor(input).requires_grad_()
        loss = logitless.linear_cross_entropy(leaf, torch.tensor(weight), torch.tensor(target), reduction=reduction)
        loss.backward(torch.tensor(upstream, dtype=torch.float64))
        np.testing.assert_allclose(got.d_hidden, leaf.grad.numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "view", [lambda a: a[:, ::-1], lambda a: a.T.copy().T, lambda a: a[::-1], lambda a: a.astype(">f4")]
)
def test_any_layout(view):
    _, weight, _, _ = arrays()
    input = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)
    target = np.array([1, 2, 3, 4], np.int32)[::1]
    got = logitless.numpy.linear_cross_entropy(view(input), view(weight), target, gradients=True)
    plain = [np.ascontiguousarray(view(a), np.float32) for a in (input, weight)]
    expected = logitless.numpy.linear_cross_entropy(*plain, target.astype(">i8"), gradients=True)
    assert got.loss == expected.loss
    np.testing.assert_array_equal(got.d_hidden, expected.d_hidden)
    np.testing.assert_array_equal(got.d_weight, expected.d_weight)


BIG_ENDIAN = ("hidden", "weight", "bias", "targets", "class_weight", "token_weight", "temperature", "grad_loss")


@pytest.mark.parametrize("swapped", [(name,) for name in BIG_ENDIAN] + [BIG_ENDIAN], ids="-".join)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_any_byte_order(dtype, swapped):
    rng = np.random.default_rng(4)
    operands = dict(zip(("hidden", "weight", "bias", "targets"), arrays(dtype)))
    given = operands | {name: rng.random((3, 5)) + 0.5 for name in ("token_weight", "temperature", "grad_loss")}
    given["class_weight"] = rng.random(11)
    other = {name: a.astype(a.dtype.newbyteorder(">")) if name in swapped else a for name, a in given.items()}
    options = {"reduction": "none", "gradients": True, "return_stats": True}
    got, expected = (logitless.numpy.linear_cross_entropy(**a, **options) for a in (other, given))
    for name in ("loss", "entropy", "argmax", "d_hidden", "d_weight", "d_bias"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
        assert getattr(got, name).dtype == getattr(expected, name).dtype

    rows = ("hidden", "weight", "bias", "temperature")
    other, given = ({name: a[name] for name in rows} for a in (other, given))
    ids = operands["targets"][..., None]
    ids_of_other = ids.astype(">i4") if "targets" in swapped else ids
    np.testing.assert_array_equal(
        logitless.numpy.linear_log_probs(ids=ids_of_other, **other), logitless.numpy.linear_log_probs(ids=ids, **given)
    )
    np.testing.assert_array_equal(
        logitless.numpy.linear_top_k(k=3, **other).ids, logitless.numpy.linear_top_k(k=3, **given).ids
    )


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    input, weight, _, target = (a.astype(ml_dtypes.bfloat16) if a.dtype.kind == "f" else a for a in arrays())
    got = logitless.numpy.linear_cross_entropy(input, weight, target, gradients=True)
    leaf = torch.tensor(input.astype(np.float32)).bfloat16().requires_grad_()
    other = torch.tensor(weight.astype(np.float32)).bfloat16()
    loss = logitless.linear_cross_entropy(leaf, other, torch.tensor(target))
    loss.backward()
    assert got.loss == loss.item() and got.d_hidden.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got.d_hidden.astype(np.float32), leaf.grad.float().numpy())
