"""logitless.info_nce and its module beside PyTorch's cross entropy of all similarities."""

import math
import re
from functools import partial

import logitless
import oracle
import pytest
import torch
import torch.nn.functional as F
from logitless.nn import InfoNCELoss
from support import DEVICES, DTYPES, assert_same, lce

EXACT = {"rtol": 1e-12, "atol": 1e-14}  # both sides are float64


def sides(rows=9, more=4, width=64, dtype=torch.float64, device="cpu"):
    """Returns leaves a and b; b has more rows. Similarities have about the size 1."""
    generator = torch.Generator().manual_seed(rows)
    shapes = (rows, width), (rows + more, width)
    drawn = [torch.randn(*shape, generator=generator, dtype=torch.float64) / width**0.25 for shape in shapes]
    return [side.to(device, dtype).requires_grad_() for side in drawn]


def number(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype, requires_grad=True)


def plain(a, b, temperature=1.0, *, symmetric=False, targets=None, scale=1.0, bias=None, token_weight=None,
          reduction="mean", **options):  # fmt: skip
    """Returns the loss by PyTorch over the whole matrix of similarities."""
    z = scale * (a @ b.T) + (0 if bias is None else bias)
    z = z / (temperature[:, None] if torch.is_tensor(temperature) and temperature.dim() == 1 else temperature)
    order = torch.arange(len(a))
    targets = order if targets is None else targets
    weights = torch.ones(len(a), dtype=a.dtype) if token_weight is None else token_weight
    weights = weights * (targets != -100)
    rows = F.cross_entropy(z, targets, reduction="none", **options)
    if symmetric:
        back = F.cross_entropy(z[:, targets.clamp(min=0)].T, order, reduction="none", **options)
        rows = (rows + back) / 2
    rows = torch.where(targets != -100, weights * rows, 0)
    return {"mean": rows.sum() / weights.sum(), "sum": rows.sum(), "none": rows}[reduction]


CASES = {
    "plain": {},
    "temperature": {"temperature": number(0.3)},
    "scale": {"scale": number(-2.5), "temperature": 0.7},
    "targets": {"targets": torch.tensor([3, -100, 12, 0, 3, 5, 12, -100, 1])},
    "smoothing": {"label_smoothing": 0.1, "reduction": "sum"},
    "weights": {"token_weight": torch.linspace(0.5, 2, 9, dtype=torch.float64)},
    "rows": {"reduction": "none", "targets": torch.arange(4, 13)},
}
ONE_DIRECTION = {
    "bias": {"bias": torch.linspace(-1, 1, 13, dtype=torch.float64, requires_grad=True)},
    "temperatures": {"temperature": torch.linspace(0.5, 2, 9, dtype=torch.float64)},
}
BOTH = [(name, symmetric) for name in CASES for symmetric in (False, True)] + [(name, False) for name in ONE_DIRECTION]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, symmetric", BOTH)
def test_against_pytorch(name, symmetric, device):
    a, b = sides()
    options = (CASES | ONE_DIRECTION)[name]
    leaves = [a, b, *(value for value in options.values() if torch.is_tensor(value) and value.requires_grad)]
    given = {name: value.to(device) if torch.is_tensor(value) else value for name, value in options.items()}
    got = logitless.info_nce(a.to(device), b.to(device), symmetric=symmetric, **given).cpu()
    expected = plain(a, b, symmetric=symmetric, **options)
    torch.testing.assert_close(got, expected, **EXACT)
    upstream = torch.linspace(0.5, 2, got.numel(), dtype=got.dtype).reshape(got.shape)
    for one, other in zip(*(torch.autograd.grad(loss, leaves, upstream) for loss in (got, expected))):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("rows, more, width", [(1, 0, 64), (1, 5, 63), (2, 0, 1), (33, 0, 128), (37, 64, 65)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_shapes(rows, more, width, symmetric):
    a, b = sides(rows, more, width)
    a = torch.cat([a, a], -1)[:, :width]  # rows at another stride
    got, expected = (loss(a, b, 0.5, symmetric=symmetric) for loss in (logitless.info_nce, plain))
    torch.testing.assert_close(got, expected, **EXACT)
    for one, other in zip(*(torch.autograd.grad(loss, (a, b)) for loss in (got, expected))):
        torch.testing.assert_close(one, other, **EXACT)


def directions(a, b, temperature):
    """Returns both directions of pairs as problems of heads, with half of the loss each."""
    targets = torch.arange(len(a))
    made = [oracle.Problem(one.detach(), other.detach(), targets, options={"temperature": temperature},
                           learned=("temperature",), upstream={"loss": torch.tensor(0.5, dtype=torch.float64)})
            for one, other in ((a, b), (b[: len(a)], a))]  # fmt: skip
    return made


def joined(row, column):
    """Returns results of both directions by the names of info_nce."""
    d_b = row["d_weight"].clone()
    d_b[: len(column["d_hidden"])] += column["d_hidden"]
    numbers = {name: row[name] + column[name] for name in ("loss", "d_temperature")}
    return {"loss": numbers["loss"] / 2, "d_a": row["d_hidden"] + column["d_weight"], "d_b": d_b,
            "d_temperature": numbers["d_temperature"]}  # fmt: skip


@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_rounding_of_both_directions(dtype, device, width):
    """An error is at most the sum of both directions' bounds; adding rounded gradients rounds once more."""
    rows = 37
    a, b = sides(rows, 20, width, dtype)
    computed = torch.promote_types(dtype, torch.float32)
    temperature = number(0.25, computed)
    loss = logitless.info_nce(a.to(device), b.to(device), temperature, symmetric=True)
    loss.backward()
    assert loss.dtype == computed and a.grad.dtype == dtype
    got = {"loss": loss.detach().cpu(), "d_a": a.grad, "d_b": b.grad, "d_temperature": temperature.grad}
    problems = directions(a, b, 0.25)
    exact, naive = ([oracle.evaluate(p, precision) for p in problems] for precision in (torch.float64, dtype))
    unit = torch.finfo(dtype).eps / 2 if dtype.itemsize == 2 else 0.0  # exp logits in 16 bits
    units = joined(*(oracle.units(p, truth, computed, unit) for p, truth in zip(problems, exact)))
    truth, near = joined(*exact), joined(*naive)
    for name, value in got.items():
        error = (value.double() - truth[name].double()).abs()
        naive_error = (near[name].double() - truth[name].double()).abs().max()
        bound = 2 * naive_error + units[name] + torch.finfo(value.dtype).eps * truth[name].double().abs()
        assert (error <= bound).all(), (name, error.max().item(), bound.min().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_row_of_many_pairs_is_summed_in_float32(dtype):
    a, b = torch.randn(2000, 16).to(dtype), (torch.randn(8, 16) / 4).to(dtype)
    targets = torch.zeros(2000, dtype=torch.int64)
    exact, got = b.double().requires_grad_(), b.clone().requires_grad_()
    plain(a.double(), exact, targets=targets, symmetric=True, reduction="sum").backward()
    logitless.info_nce(a, got, targets=targets, symmetric=True, reduction="sum").backward()
    # In the way back an exp logit, dz and a pair's row are rounded, each by half a unit; then the sum is.
    dz = (exact.detach()[targets] @ a.double().T).softmax(-1) - torch.eye(2000)
    unit = torch.finfo(dtype).eps
    bound = 1.5 * unit * (dz.abs() @ a.double().abs()).sum(0).max() / 2 + unit * exact.grad.abs().max()
    assert (got.grad.double() - exact.grad).abs().max() <= bound


def test_a_side_may_be_its_own_other_side():
    a = torch.randn(6, 8, requires_grad=True)
    for symmetric in (False, True):
        compiled = torch.compile(partial(logitless.info_nce, symmetric=symmetric), fullgraph=True, backend="aot_eager")
        same = [torch.autograd.grad(f(a, a, symmetric=symmetric), a) for f in (logitless.info_nce, compiled)]
        assert_same(*same)
        copies = [a.detach().clone().requires_grad_() for _ in "ab"]
        of_copies = torch.autograd.grad(logitless.info_nce(*copies, symmetric=symmetric), copies)
        torch.testing.assert_close(same[0][0], sum(of_copies))


def test_one_direction_is_the_loss_of_a_head():
    a, b = sides(dtype=torch.float32)
    targets = torch.randint(0, 13, (9,))
    got, expected = logitless.info_nce(a, b, 0.5, targets=targets), lce(a, b, targets, temperature=0.5)
    assert torch.equal(got, expected)
    assert_same(*(torch.autograd.grad(loss, (a, b)) for loss in (got, expected)))


def test_exchanged_sides_have_the_same_bits():
    a, b = sides(more=0, dtype=torch.float32)
    one, other = (logitless.info_nce(*given, 0.5, symmetric=True) for given in ((a, b), (b, a)))
    assert torch.equal(one, other)
    assert_same(*(torch.autograd.grad(loss, (a, b)) for loss in (one, other)))


@pytest.mark.parametrize("symmetric", [False, True])
def test_properties(symmetric):
    a, b = sides(more=0)

    def loss(a, b, **options):
        return logitless.info_nce(a, b, symmetric=symmetric, reduction="none", **options)

    expected, order = loss(a, b, temperature=0.5), torch.randperm(9)
    torch.testing.assert_close(loss(a[order], b[order], temperature=0.5), expected[order], **EXACT)
    torch.testing.assert_close(loss(a, b, scale=2.0), expected, **EXACT)
    torch.testing.assert_close(loss(a, b[order], temperature=0.5, targets=order.argsort()), expected, **EXACT)
    rotation = torch.linalg.qr(torch.randn(64, 64, dtype=a.dtype)).Q
    torch.testing.assert_close(loss(a @ rotation, b @ rotation, temperature=0.5), expected, **EXACT)
    # A constant row added to b adds a number to all similarities of a row of a; of those of b only if it is across a.
    shift = torch.randn(64, dtype=a.dtype)
    if symmetric:
        shift = shift - torch.linalg.pinv(a.detach()) @ (a.detach() @ shift)
    torch.testing.assert_close(loss(a, b + shift, temperature=0.5), expected, **EXACT)


def test_impossible_rows_are_no_negatives():
    a, b = sides()
    bias = torch.zeros(13, dtype=a.dtype)
    bias[9:] = -math.inf
    torch.testing.assert_close(logitless.info_nce(a, b, bias=bias), logitless.info_nce(a, b[:9]), **EXACT)


@pytest.mark.parametrize("symmetric", [False, True])
def test_no_pairs(symmetric):
    a, b = sides()
    given = {"targets": torch.full((9,), 3), "ignore_index": 3, "symmetric": symmetric}
    assert logitless.info_nce(a, b, **given).isnan()
    loss = logitless.info_nce(a, b, **given, reduction="sum")
    assert loss == 0 and all((grad == 0).all() for grad in torch.autograd.grad(loss, (a, b)))
    assert logitless.info_nce(a[:0], b).isnan() and logitless.info_nce(a[:0], b, reduction="sum") == 0
    # Without targets no row is ignored, whatever ignore_index is.
    assert torch.equal(logitless.info_nce(a, b, ignore_index=3), logitless.info_nce(a, b))


def test_sparsified_gradients_leave_the_loss_as_it_is():
    a, b = sides(dtype=torch.float32)
    loss = logitless.info_nce(a, b, symmetric=True, gradient="always-sparsified", threshold=0.5, seed=1)
    torch.testing.assert_close(loss, logitless.info_nce(a, b, symmetric=True))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, (a, b)))


A, B = torch.randn(4, 6), torch.randn(7, 6)
TARGETS = torch.tensor([0, 1, 6, 2])
BAD = {
    "b: expected at least 4 rows, one for each of a, or targets, got 3": {"b": B[:3]},
    "a: expected shape [N, D], got [4]": {"a": A[:, 0]},
    "b: expected shape [M, D], got [1, 7, 6]": {"b": B[None]},
    "a: expected shape [..., D] with D = 5 of b, got [4, 6]": {"b": B[:, :5]},
    "a: expected a torch.Tensor, got list": {"a": [1.0]},
    "a: expected float32, bfloat16, float16 or float64, got torch.int64": {"a": A.long()},
    "b: expected float64 for all of a, b and bias or for none, got torch.float32 with a torch.float64": {
        "a": A.double()
    },
    "targets: expected shape [4] (one for each row of a), got [3]": {"targets": TARGETS[:3]},
    "targets: expected a torch.Tensor, got list": {"targets": [0, 1, 2, 3]},
    "targets: expected int64 or int32 class indices, got torch.float32": {"targets": TARGETS.float()},
    "targets: expected 0 <= target < 7 or ignore_index -100, got 7 at targets[1]": {"targets": TARGETS + 6},
    "symmetric: expected a bool, got int": {"symmetric": 1},
    "bias: expected None with symmetric (it belongs to rows of b alone), got a tensor": {
        "symmetric": True, "bias": torch.zeros(7)},
    "temperature: expected one element with symmetric, got shape [4]": {
        "symmetric": True, "temperature": torch.ones(4)},
    "temperature: expected": {"temperature": 0.0},
    "a: expected rows with symmetric, got shape [0, 6]": {"symmetric": True, "a": A[:0]},
    "info_nce() got an unexpected keyword argument 'shift'": {"shift": 1},
    "a: expected a dense tensor, got layout torch.sparse_coo": {"a": A.to_sparse()},
    "b: expected a tensor on the CPU or a CUDA device, got device meta": {"b": B.to("meta")},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        logitless.info_nce(**{"a": A, "b": B} | BAD[message])


def test_a_quantized_side_is_refused():
    quantization = pytest.importorskip("torchao.quantization")
    linear = torch.nn.Linear(64, 64, bias=False)
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    for b, got in ((logitless.QuantizedWeight(linear), "QuantizedWeight"), (linear.weight, "Int8Tensor")):
        with pytest.raises(TypeError, match=f"b: expected a .*torch.Tensor, got {got}"):
            logitless.info_nce(torch.randn(4, 64), b)


def test_the_module():
    a, b = sides(dtype=torch.float32)
    module = InfoNCELoss(torch.nn.Parameter(torch.tensor(0.5)), symmetric=True, label_smoothing=0.1)
    loss = module(a, b)
    options = {"symmetric": True, "label_smoothing": 0.1}
    assert torch.equal(loss, logitless.info_nce(a, b, module.temperature, **options))
    loss.backward()
    assert module.temperature.grad != 0 and list(module.state_dict()) == ["temperature"]
    log_scale = torch.tensor(1.5, requires_grad=True)
    loss = module(a, b, scale=log_scale.exp(), temperature=1.0)
    assert torch.equal(loss, logitless.info_nce(a, b, scale=log_scale.exp(), **options)) and loss.requires_grad
    assert repr(InfoNCELoss(0.5, **options)) == "InfoNCELoss(temperature=0.5, symmetric=True, label_smoothing=0.1)"
    with pytest.raises(TypeError, match="unexpected keyword argument 'shift'"):
        InfoNCELoss(shift=1)
    with pytest.raises(TypeError, match="forward.* unexpected keyword argument 'reduction'"):
        module(a, b, reduction="sum")
    with pytest.raises(ValueError, match="label_smoothing: expected a number in"):
        InfoNCELoss(label_smoothing=2)
