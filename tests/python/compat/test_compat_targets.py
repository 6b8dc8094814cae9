"""Targets that the names of other libraries take, and the errors for all others.

PyTorch runs beside its name here. The others need a GPU or are not installed. Their behavior comes from their source,
and a table has it with the place in each package.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from logitless.compat import _targets, cut_cross_entropy, fla, liger_kernel, openrlhf, prime_rl, quack, verl
from logitless.compat import torch as names

UPSTREAM = getattr(F, "linear_cross_entropy", None)
N, D, V = 4, 5, 7
INDICES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*INDICES, torch.bool, torch.float32, torch.float64, torch.bfloat16)
PLACES = [(), (2,), (V,), (2, 3), (2, 1, 3), (0,)]
INPUTS = [(N, D), (D,), (0, D), (1, D)]


def shapes(rows, places):
    """Returns the right shapes, those with one dimension or size more or less, and unrelated ones."""
    right = [(*rows, *places), (*rows, V, *places)]
    near = [shape[:i] + (size,) + shape[i + 1 :] for shape in right for i in range(len(shape)) for size in (0, 1, 2, 9)]
    near += [shape[:i] + (size,) + shape[i:] for shape in right for i in range(len(shape) + 1) for size in (1, 2, V)]
    near += [shape[:i] + shape[i + 1 :] for shape in right for i in range(len(shape))]
    near += [(), (1,), (N,), (V,), (N, 2), (N, V), (2, N), (N * V,), right[0][::-1]]
    return right, sorted(set(near) - set(right))


def cases(rows, places=()):
    """Returns shapes and dtypes: right shapes with all dtypes, others with some."""
    right, others = shapes(rows, places)
    some = [
        (shape, dtype) for i, shape in enumerate(others) for dtype in (DTYPES[0], DTYPES[1 + i % (len(DTYPES) - 1)])
    ]
    return [*itertools.product(right, DTYPES), *some]


def made(shape, dtype):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.rand(shape, generator=generator).mul(1 if dtype.is_floating_point else V - 1e-3).to(dtype)


def outcome(call):
    try:
        return call()
    except Exception as error:
        return error


@pytest.mark.skipif(UPSTREAM is None, reason="this PyTorch has no linear_cross_entropy")
@pytest.mark.parametrize("reduction, smoothing", [("mean", 0.0), ("sum", 0.1), ("none", 0.0), ("none", 0.1)])
@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("input_shape", INPUTS, ids=str)
def test_torch_does_as_upstream(input_shape, places, reduction, smoothing):
    input, weight = torch.randn(input_shape, dtype=torch.float64), torch.randn(V, *places, D, dtype=torch.float64)
    taken = 0
    for shape, dtype in cases(input_shape[:-1], places):
        if dtype == torch.uint8 and places and 0 in shape:  # without elements PyTorch takes it with some reductions
            continue
        target = made(shape, dtype)
        options = {"reduction": reduction, "label_smoothing": smoothing}
        theirs = outcome(lambda: UPSTREAM(input, weight, target, **options))
        ours = outcome(lambda: names.linear_cross_entropy(input, weight, target, **options))
        case = (shape, dtype, theirs, ours)
        if isinstance(theirs, Exception):
            assert type(ours) is type(theirs), case
        else:
            taken += 1
            assert isinstance(ours, torch.Tensor) and ours.shape == theirs.shape, case
            torch.testing.assert_close(ours, theirs, rtol=2**-45, atol=2**-45, equal_nan=True, check_dtype=False)
    assert taken > 0 or not input_shape[:-1]


def test_torch_takes_uint8_with_gradients():
    input = torch.randn(N, D, requires_grad=True)
    weight, target = torch.randn(V, D, requires_grad=True), torch.tensor([3, 0, 6, 6], dtype=torch.uint8)
    got = torch.autograd.grad(names.linear_cross_entropy(input, weight, target), (input, weight))
    expected = torch.autograd.grad(F.cross_entropy(input @ weight.T, target), (input, weight))
    torch.testing.assert_close(got, expected)
    module = names.LinearCrossEntropyLoss(D, V)
    torch.testing.assert_close(module(input, target), F.cross_entropy(module.linear(input), target))


def test_torch_takes_no_uint8_for_ignored():
    """256 - 100 is a class, although PyTorch's label smoothing leaves it out."""
    input, weight = torch.randn(2, D), torch.randn(200, D)
    target = torch.tensor([156, 3], dtype=torch.uint8)
    for smoothing in (0.0, 0.1):
        got = names.linear_cross_entropy(input, weight, target, label_smoothing=smoothing)
        torch.testing.assert_close(got, F.cross_entropy(input @ weight.T, target.long(), label_smoothing=smoothing))


def holding(weight, module):
    module.weight.data = weight
    return module


WIDE = (torch.int64, torch.int32)
# Columns: our call, dimensions of hidden states, whether only the number of targets counts, the errors for another
# number or shape and for a target without a dimension, accepted dtypes, the error for others.
#
# liger: ops/fused_linear_cross_entropy.py unpacks input.shape (ValueError) and slices target (IndexError without a
#   dimension). It compares no sizes: its kernel reads the first N of the targets' memory, which is no contract, and
#   ValueError here. Its kernel loads any integers.
# fla: modules/fused_cross_entropy/ops.py asserts target.shape == (N,), after fused_linear_cross_entropy/ops.py has
#   sliced it; the module flattens both. The kernel casts to int64.
# cce: linear_cross_entropy.py wants shift < targets.size(-1) (ValueError, IndexError without a dimension), cce.py
#   asserts e.size()[0:-1] == targets.size(). Its kernels load any integers.
# quack: cross_entropy.py asserts one dimension, int32 or int64; linear_cross_entropy.py flattens in its chunked path.
# verl: utils/kernel/linear_cross_entropy.py flattens labels, kernels.py asserts as many as rows. Any integers.
# openrlhf: models/utils.py gathers from the logits, which is a RuntimeError of shapes and of dtypes.
# prime-rl: layers/lm_head.py unpacks hidden_states.shape and reshapes labels to b * s (RuntimeError). Any integers.
INTEGERS = (INDICES, TypeError)
LIGER = (ValueError, IndexError, *INTEGERS)
FLA = CCE = (AssertionError, IndexError, *INTEGERS)
QUACK = (AssertionError, AssertionError, WIDE, AssertionError)
VERL = (AssertionError, AssertionError, *INTEGERS)
OPENRLHF = (RuntimeError, RuntimeError, WIDE, RuntimeError)
PRIME_RL = (RuntimeError, RuntimeError, *INTEGERS)
TABLE = {
    "liger module": (lambda x, w, t: liger_kernel.LigerFusedLinearCrossEntropyLoss()(w, x, t), 2, False, *LIGER),
    "liger apply": (
        lambda x, w, t: liger_kernel.LigerFusedLinearCrossEntropyFunction.apply(x, w, t)[0], 2, False, *LIGER),
    "liger function": (liger_kernel.liger_fused_linear_cross_entropy, 2, False, *LIGER),
    "fla function": (lambda x, w, t: fla.fused_linear_cross_entropy_loss(x, t, w), 2, False, *FLA),
    "fla l2warp": (lambda x, w, t: fla.fused_linear_cross_entropy_loss(x, t, w, use_l2warp=True), 2, False, *FLA),
    "fla module": (lambda x, w, t: fla.FusedLinearCrossEntropyLoss()(x, t, w), 3, True, *VERL),
    "cce function": (cut_cross_entropy.linear_cross_entropy, 3, False, *CCE),
    "cce module": (lambda x, w, t: cut_cross_entropy.LinearCrossEntropy()(x, w, t), 2, False, *CCE),
    "quack function": (lambda x, w, t: quack.linear_cross_entropy_func(x, w, None, t), 2, False, *QUACK),
    "quack module": (lambda x, w, t: holding(w, quack.LinearCrossEntropy(D, V))(x, t), 3, False, *QUACK),
    "quack chunked module": (
        lambda x, w, t: holding(w, quack.LinearCrossEntropy(D, V, chunk_size=8))(x, t), 3, True, *QUACK),
    "quack chunked": (quack.chunked_linear_cross_entropy, 3, True, *QUACK),
    "quack scaled exp": (quack.scaled_exp_linear_cross_entropy, 2, True, *QUACK),
    "verl": (lambda x, w, t: -verl.linear_cross_entropy(x, w, t, 1.0, "mean")[0], 3, True, *VERL),
    "openrlhf": (lambda x, w, t: -openrlhf.log_probs_from_hidden(x, w, t).mean(), 3, False, *OPENRLHF),
    "openrlhf entropy": (
        lambda x, w, t: -openrlhf.log_probs_and_entropy_from_hidden(x, w, t)[0].mean(), 2, False, *OPENRLHF),
    "prime_rl": (
        lambda x, w, t: -holding(w, prime_rl.FusedOutputLinear(D, V))(x, t, temperature=1.0)["logprobs"].mean(),
        3, True, *PRIME_RL),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_other_names(name):
    call, dimensions, only_number_counts, error, of_scalar, dtypes, of_dtype = TABLE[name]
    rows = {2: (N,), 3: (3, N)}[dimensions]
    x, weight = torch.randn(*rows, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    logits = (x @ weight.T).flatten(0, -2)
    for shape, dtype in cases(rows):
        target = made(shape, dtype)
        got = outcome(lambda: call(x, weight, target))
        fits = shape == rows or (only_number_counts and target.numel() == logits.shape[0])
        if fits and dtype in dtypes:
            assert isinstance(got, torch.Tensor), (shape, dtype, got)
            expected = F.cross_entropy(logits, target.flatten().long())
            torch.testing.assert_close(got, expected, rtol=2**-40, atol=2**-40)
        elif fits:
            assert type(got) is of_dtype, (shape, dtype, got)
        else:
            raised = of_scalar if not shape else ValueError if name.startswith("cce") and shape[-1] == 0 else error
            assert type(got) in ((raised,) if dtype in dtypes else (raised, of_dtype)), (shape, dtype, got)


@pytest.mark.parametrize("name", ["liger module", "liger apply", "liger function", "fla function", "prime_rl"])
def test_hidden_states_that_these_unpack(name):
    for shape in ((N, D), (D,)) if name == "prime_rl" else ((2, N, D), (D,)):
        got = outcome(lambda: TABLE[name][0](torch.randn(shape), torch.randn(V, D), torch.zeros(shape[:-1]).long()))
        assert type(got) is ValueError


def test_torchtitan_labels_are_those_of_cross_entropy():
    """torchtitan 0.3.0, components/loss.py, calls F.cross_entropy on logits and labels with their first two dimensions
    merged."""
    rows = (2, 3)
    logits = torch.randn(6, V, dtype=torch.float64)
    for shape, dtype in cases(rows):
        if len(shape) < 2 or (dtype.is_floating_point and shape == (*rows, V)):  # neither are labels
            continue
        labels = made(shape, dtype)
        theirs = outcome(lambda: F.cross_entropy(logits, labels.flatten(0, 1)))
        ours = outcome(lambda: _targets.check_as_cross_entropy("labels", labels, rows))
        if shape[0] * shape[1] == 6 and shape[:2] != rows:  # chunks along the second dimension do not match
            assert type(ours) is ValueError, (shape, dtype, ours)
        elif isinstance(theirs, Exception):
            assert type(ours) is type(theirs), (shape, dtype, ours, theirs)
        else:
            assert ours.dtype == torch.int64 and torch.equal(ours, labels.long())
