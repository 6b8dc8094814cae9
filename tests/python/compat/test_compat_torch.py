"""logitless.compat.torch beside PyTorch's own function and module, and beside F.cross_entropy over logits."""

import pickle

import logitless
import pytest
import torch
import torch.nn.functional as F
from exactness import check, head
from logitless.compat.torch import LinearCrossEntropyLoss, linear_cross_entropy

UPSTREAM = getattr(F, "linear_cross_entropy", None)
needs_upstream = pytest.mark.skipif(UPSTREAM is None, reason="this PyTorch has no linear_cross_entropy")


def reference(input, linear_weight, bias, target, **options):
    wide = torch.promote_types(input.dtype, torch.float32)
    flat = F.linear(input.to(wide), linear_weight.to(wide).flatten(0, -2), bias.to(wide).flatten())
    logits = flat.reshape(*input.shape[:-1], *linear_weight.shape[:-1])
    return F.cross_entropy(logits, target, **options)


def compare(leaves, target, *dtypes, **options):
    """Compares two results. A mean of nothing is NaN in both, without a gradient."""

    def target_of(input):
        return target.to(input.dtype) if target.is_floating_point() else target

    def ours(input, weight, bias):
        return linear_cross_entropy(input, weight, target_of(input), linear_bias=bias, **options).nan_to_num(5.0)

    def theirs(input, weight, bias):
        return reference(input, weight, bias, target_of(input), **options).nan_to_num(5.0)

    check(ours, theirs, leaves, dtypes or (torch.float64, torch.float32))


def places_head(shape, rows=9, classes=11, hidden=5):
    leaves, _ = head(rows, classes, hidden)
    leaves["weight"] = torch.randn(classes, *shape, hidden).double()
    leaves["bias"] = torch.randn(classes, *shape).double()
    target = torch.randint(0, classes, (rows, *shape))
    target.view(-1)[::4] = -100
    return leaves, target


@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
def test_bfloat16(shape):
    compare(*places_head(shape), torch.bfloat16)


@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_valid_row_and_no_row(shape, reduction):
    leaves, target = places_head(shape)
    for rows in (9, 0):
        given = {**leaves, "input": leaves["input"][:rows]}
        compare(given, torch.full_like(target[:rows], 7), reduction=reduction, ignore_index=7)


def test_unbatched():
    leaves, _ = head(1)
    leaves["input"] = leaves["input"][0]
    for target in (torch.tensor(3), torch.tensor(-100)):
        compare(leaves, target, reduction="sum")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(), (4,)], ids=str)
def test_class_probabilities(shape, reduction):
    leaves, _ = places_head(shape)
    compare(leaves, torch.rand(9, 11, *shape).softmax(1), reduction=reduction, label_smoothing=0.1)


def test_logits_of_class_probabilities_are_not_rounded():
    """Probabilities of one class act like class indices. Their logits are float32 even for 16-bit operands."""
    input, weight = torch.randn(9, 64).bfloat16() * 3, torch.randn(11, 64).bfloat16()
    target = torch.randint(0, 11, (9,))
    one_hot = F.one_hot(target, 11).float()
    by_index = linear_cross_entropy(input, weight, target, reduction="none")
    by_probability = linear_cross_entropy(input, weight, one_hot, reduction="none")
    exact = F.cross_entropy(input.double() @ weight.double().T, target, reduction="none")
    naive = F.cross_entropy(input.float() @ weight.float().T, target, reduction="none")
    allowed = 2 * (naive - exact).abs().max() + 2**-23 * exact.abs().max()
    assert (by_index - exact).abs().max() <= allowed
    assert (by_probability - exact).abs().max() <= allowed


def test_places_without_any():
    input, weight = torch.randn(3, 5), torch.randn(11, 0, 5)
    target = torch.zeros(3, 0, dtype=torch.long)
    assert linear_cross_entropy(input, weight, target, reduction="none").shape == (3, 0)
    assert linear_cross_entropy(input, weight, target, reduction="sum") == 0
    assert linear_cross_entropy(input, weight, target).isnan()


def refused(function, *arguments, **options):
    with pytest.raises(Exception) as error:
        function(*arguments, **options)
    return error.type


@needs_upstream
@pytest.mark.parametrize(
    "change",
    [
        {"input": torch.randn(2, 3, 5)},
        {"input": torch.randn(4, 6)},
        {"input": torch.randn(5), "linear_weight": torch.randn(7, 2, 5), "target": torch.zeros(2, dtype=torch.long)},
        {"linear_weight": torch.randn(7)},
        {"linear_bias": torch.randn(6)},
        {"weight": torch.rand(6)},
        {"label_smoothing": 1.5},
        {"reduction": "avg"},
        {"target": torch.rand(4, 7), "ignore_index": 1},
        {"target": torch.tensor([0, 1, 7, 2])},
        {"target": torch.tensor([0, 1, -3, 2])},
    ],
    ids=lambda change: "-".join(change),
)
def test_refusals_are_of_upstream_types(change):
    """test_compat_targets.py covers targets by shape and dtype."""
    arguments = {
        "input": torch.randn(4, 5),
        "linear_weight": torch.randn(7, 5),
        "target": torch.zeros(4, dtype=torch.long),
    } | change
    theirs, ours = refused(UPSTREAM, **arguments), refused(linear_cross_entropy, **arguments)
    assert issubclass(ours, theirs), (ours, theirs)


@needs_upstream
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [None, (), (3,), (2, 2)], ids=str)
def test_module_equals_upstream_and_shares_its_state(shape, reduction, bias):
    """None stands for the module by logitless's own name, which calls class weights differently."""
    from torch.nn import LinearCrossEntropyLoss as Upstream
    from torch.nn import LinearCrossEntropyOptions

    arguments = dict(bias=bias, weight=torch.rand(11), label_smoothing=0.1, ignore_index=2, reduction=reduction)
    if shape is None:
        own = {"class_weight" if name == "weight" else name: value for name, value in arguments.items()}
        theirs, ours, shape = Upstream(5, 11, **arguments), logitless.LinearCrossEntropyLoss(5, 11, **own), ()
    else:
        theirs, options = Upstream(5, 11, out_features=shape, **arguments), LinearCrossEntropyOptions()
        ours = LinearCrossEntropyLoss(5, 11, out_features=shape, options=options, **arguments)
        assert "out_features" in repr(ours)
    state = {
        "class_weight" if name == "weight" and name not in ours.state_dict() else name: value
        for name, value in theirs.state_dict().items()
    }
    assert list(ours.state_dict()) == list(state)
    ours.load_state_dict(state)
    assert ours.linear.weight.shape == theirs.linear.weight.shape
    ours = pickle.loads(pickle.dumps(ours))
    input, target = torch.randn(7, 5), torch.randint(0, 11, (7, *shape))
    got, expected = ours(input, target), theirs(input, target)
    torch.testing.assert_close(got, expected)
    got.backward(), expected.backward()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a.grad, b.grad)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values())))


@needs_upstream
@pytest.mark.parametrize("arguments", [{"weight": torch.rand(3)}, {"label_smoothing": -0.1}], ids=list)
def test_module_refuses_with_upstream_types(arguments):
    from torch.nn import LinearCrossEntropyLoss as Upstream

    assert refused(LinearCrossEntropyLoss, 5, 11, **arguments) is refused(Upstream, 5, 11, **arguments)
