"""logitless.nn.AdaptiveLogSoftmaxWithLoss is PyTorch's, without its logits."""

import inspect

import logitless
import pytest
import torch
from logitless.nn import AdaptiveLogSoftmaxWithLoss
from torch.utils._python_dispatch import TorchDispatchMode

Theirs = torch.nn.AdaptiveLogSoftmaxWithLoss
D, CLASSES, CUTOFFS = 64, 60, (7, 20, 40)


def pair(dtype=torch.float64, cutoffs=CUTOFFS, **options):
    """Returns PyTorch's module in float64, and ours with the same numbers."""
    torch.manual_seed(1)
    ours = AdaptiveLogSoftmaxWithLoss(D, CLASSES, cutoffs, dtype=dtype, **options)
    theirs = Theirs(D, CLASSES, cutoffs, dtype=torch.float64, **options)
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours


def results(module, input, target, upstream):
    """Returns output, loss, and the gradients of both."""
    input = input.to(next(module.parameters()).dtype, copy=True).requires_grad_()
    out = module(input, target)
    torch.autograd.backward([out.output, out.loss], [upstream.to(out.output), torch.tensor(3.0).to(out.loss)])
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in module.parameters()]
    return [out.output.detach(), out.loss.detach(), input.grad, *gradients]


TARGETS = {
    "all clusters": torch.arange(0, CLASSES, 3),
    "shortlist alone": torch.tensor([0, 6, 3]),
    "one cluster alone": torch.tensor([20, 39, 20, 25]),
    "no row in a cluster": torch.tensor([1, 59, 41, 8]),
    "one row": torch.tensor([19]),
    "no batch": torch.tensor(45),
    "int32": torch.tensor([45, 2], dtype=torch.int32),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_values_and_gradients(name, bias):
    target = TARGETS[name]
    theirs, ours = pair(head_bias=bias)
    input, upstream = torch.randn(*target.shape, D, dtype=torch.float64), torch.randn(target.shape, dtype=torch.float64)
    got, expected = results(ours, input, target, upstream), results(theirs, input, target.long(), upstream)
    terms = D + CLASSES + target.numel()  # each result adds up products along one of these, in float64
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape
        assert (g - e).abs().max() <= 4 * terms * torch.finfo(torch.float64).eps * e.abs().max().clamp(min=1)


def check_errors(got, truth, naive, dtype):
    """An error is at most twice that of PyTorch's module in this dtype, and a rounding."""
    for g, t, n in zip(got, truth, naive, strict=True):
        unit = torch.finfo(dtype).eps * t.abs().max()
        assert (g.double() - t).abs().max() <= 2 * (n.double() - t).abs().max() + unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision(dtype):
    theirs, ours = pair(dtype)
    naive = Theirs(D, CLASSES, CUTOFFS, dtype=dtype)
    naive.load_state_dict(ours.state_dict())
    target, upstream = TARGETS["all clusters"], torch.randn(20)
    input = torch.randn(20, D).to(dtype)
    truth, got, rounded = (results(module, input, target, upstream) for module in (theirs, ours, naive))
    check_errors(got, truth, rounded, dtype)
    assert got[0].dtype == got[1].dtype == torch.float32


def test_autocast():
    """Float32 parameters have the error of bf16 ones. (PyTorch's module fails under the CPU's autocast.)"""
    theirs, ours = pair(torch.float32)
    naive = Theirs(D, CLASSES, CUTOFFS, dtype=torch.bfloat16)
    naive.load_state_dict(ours.state_dict())
    target, upstream, input = TARGETS["all clusters"], torch.randn(20), torch.randn(20, D)
    truth, rounded = (results(module, input, target, upstream) for module in (theirs, naive))
    with torch.autocast("cpu", torch.bfloat16):
        got = results(ours, input, target, upstream)
    assert all(t.dtype == torch.float32 for t in got)
    check_errors(got, truth, rounded, torch.bfloat16)


def test_constructor_and_state_dict_are_pytorchs():
    names = list(inspect.signature(Theirs).parameters)
    assert list(inspect.signature(AdaptiveLogSoftmaxWithLoss).parameters)[: len(names)] == names
    theirs, ours = pair(head_bias=True)
    assert isinstance(ours, Theirs) and list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("bias", [False, True])
def test_predict_and_log_prob(bias):
    theirs, ours = pair(head_bias=bias)
    input = 3 * torch.randn(200, D, dtype=torch.float64)
    best = theirs.predict(input)
    assert {int(b) for b in torch.bucketize(best, torch.tensor(ours.cutoffs), right=True)} == {0, 1, 2, 3}
    assert torch.equal(ours.predict(input), best)
    assert torch.equal(ours.log_prob(input), theirs.log_prob(input))
    for rows in (best < CUTOFFS[0], best >= CUTOFFS[0], best < 0):
        assert torch.equal(ours.predict(input[rows]), best[rows])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_cluster_without_hidden_size():
    theirs, ours = pair(div_value=100.0)
    input, target = torch.randn(3, D, dtype=torch.float64), torch.tensor([1, 30, 59])
    for got, expected in zip(
        results(ours, input, target, torch.ones(3)), results(theirs, input, target, torch.ones(3))
    ):
        torch.testing.assert_close(got, expected)
    assert torch.equal(ours.predict(input), theirs.predict(input))


class Largest(TorchDispatchMode):
    """The most elements of a tensor that PyTorch's operators made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        made = out if isinstance(out, (list, tuple)) else [out]
        self.elements = max([self.elements, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
        return out


def test_no_logits_are_stored():
    ours = AdaptiveLogSoftmaxWithLoss(32, 4000, [1000, 2000], max_workspace_bytes="2MiB")
    input, target = torch.randn(600, 32), torch.randint(0, 4000, (600,))
    with Largest() as mode:
        ours(input, target).loss.backward()
        ours.predict(input)
    assert mode.elements <= 1002 * 32  # the head's weight


ERRORS = {
    "shapes": (torch.zeros(3, D), torch.zeros(2, dtype=torch.int64)),
    "several targets": (torch.zeros(2, 3, D), torch.zeros(2, 3, dtype=torch.int64)),
    "one target of a batch": (torch.zeros(1, D), torch.tensor(0)),
    "a batch of no batch": (torch.zeros(D), torch.zeros(1, dtype=torch.int64)),
    "too large": (torch.zeros(2, D), torch.tensor([0, CLASSES])),
    "negative": (torch.zeros(2, D), torch.tensor([-1, 3])),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_pytorch(name):
    input, target = ERRORS[name]
    for module in pair(torch.float32):
        with pytest.raises(RuntimeError):
            module(input.to(next(module.parameters()).dtype), target)


@pytest.mark.parametrize("cutoffs", [[], [5, 3], [0, 3], [3, 3], [2.5], [CLASSES]])
def test_cutoffs_are_checked_as_by_pytorch(cutoffs):
    for kind in (Theirs, AdaptiveLogSoftmaxWithLoss):
        with pytest.raises(ValueError, match="cutoffs"):
            kind(D, CLASSES, cutoffs)


def test_options_are_checked():
    with pytest.raises(TypeError, match="unexpected keyword argument 'softcap'"):
        AdaptiveLogSoftmaxWithLoss(D, CLASSES, CUTOFFS, softcap=3.0)
    with pytest.raises(ValueError, match='screen: expected "none"'):
        AdaptiveLogSoftmaxWithLoss(D, CLASSES, CUTOFFS, gradient="sparsified", screen="fp8")
    ours = AdaptiveLogSoftmaxWithLoss(D, CLASSES, CUTOFFS, max_workspace_bytes=1)
    for call in (ours.predict, lambda input: ours(input, torch.tensor([0, 1]))):
        with pytest.raises(logitless.BudgetTooSmallError):
            call(torch.zeros(2, D))


WRONG = {
    "input_: expected a last dimension of 64": lambda ours: ours(torch.zeros(2, 3), torch.tensor([0, 1])),
    "target_: expected int64 or int32": lambda ours: ours(torch.zeros(2, D), torch.zeros(2)),
    "target_: expected a torch.Tensor": lambda ours: ours(torch.zeros(2, D), [0, 1]),
    "input: expected a last dimension of 64": lambda ours: ours.predict(torch.zeros(2, 3)),
    r"input: expected shape \[N, D\]": lambda ours: ours.predict(torch.zeros(2, 3, D)),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_the_modules_arguments(message):
    with pytest.raises((TypeError, RuntimeError), match=message):
        WRONG[message](AdaptiveLogSoftmaxWithLoss(D, CLASSES, CUTOFFS))


def test_predict_refuses_an_adapter():
    """It adds to the head's result, which only the layer's own call would compute."""

    class Adapter(torch.nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer, self.weight, self.bias = base_layer, base_layer.weight, base_layer.bias

        def forward(self, x):
            return self.base_layer(x) + 1

    ours = AdaptiveLogSoftmaxWithLoss(D, CLASSES, CUTOFFS)
    ours.head = Adapter(ours.head)
    for call in (ours.predict, lambda input: ours(input, torch.tensor([0, 1]))):
        with pytest.raises(logitless.UnsupportedError, match="head: expected a torch.nn.Linear, got a .*Adapter"):
            call(torch.zeros(2, D))
