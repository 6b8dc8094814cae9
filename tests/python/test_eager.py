"""Calls without operators: where nothing watches, and nowhere else."""

import logitless
import pytest
import torch
from logitless import autograd, call, functional, run
from test_autograd import head
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

lce = logitless.linear_cross_entropy
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def ways(monkeypatch):
    """Records which way calls go."""
    taken, original = [], call.suits

    def suits(a):
        found = original(a)
        taken.append("without_operators" if found else "by_operators")
        return found

    monkeypatch.setattr(functional, "suits", suits)
    return taken


def results(input, weight, target, **options):
    leaves = [t for t in (input, weight) if t.requires_grad]
    loss = lce(input, weight, target, **options)
    return [loss.detach(), *(torch.autograd.grad(loss.sum(), leaves) if leaves else ())]


def assert_same(found, expected):
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(f, e)


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names += [str(function)] if "logitless" in str(function) else []
        return function(*args, **(kwargs or {}))


class Functions(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names += [str(function)] if "logitless" in str(function) else []
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def negated(tensor):
    """A view whose memory holds the values with the other sign."""
    view = torch.complex(torch.zeros_like(tensor), -tensor.detach()).conj().imag
    assert view.is_neg() and torch.equal(view, tensor)
    return view


OPTIONS = [{}, {"reduction": "none"}, {"gradient": "thinned", "seed": 4}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_plain_calls_need_no_operator(ways, options, monkeypatch):
    monkeypatch.setattr(autograd, "by_operator", None)
    input, weight, _, target = head()
    results(input, torch.nn.Parameter(weight.detach()), target, **options)
    with torch.no_grad():
        lce(input, weight, target, **options)
    with torch.inference_mode():
        lce(input, weight, target, **options)
    with torch.device("cpu"), torch.autocast("cpu", dtype=torch.bfloat16):
        results(input, weight, target, **options)
    assert ways == ["without_operators"] * 4


@pytest.mark.parametrize("mode", [Recorder, Functions])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_modes_see_the_operators(ways, options, mode):
    input, weight, _, target = head()
    expected = results(input, weight, target, **options)
    with mode() as seen:
        found = results(input, weight, target, **options)
    assert_same(found, expected)
    assert ways == ["without_operators", "by_operators"]
    later = options.get("reduction") == "none"
    # Functions are not seen inside of torch.autograd.grad, which is one.
    assert seen.names == ["logitless.run.default"] * (2 if later and mode is Recorder else 1)


@pytest.mark.parametrize("kind", [negated, lambda t: t.detach().as_subclass(Subclass)], ids=["negated", "subclass"])
@pytest.mark.parametrize("place", [0, 1])
def test_tensors_that_are_not_plain(ways, kind, place):
    tensors = list(head())
    expected = results(tensors[0], tensors[1], tensors[3])
    tensors[place] = kind(tensors[place]).requires_grad_()
    assert_same([t.as_subclass(torch.Tensor) for t in results(tensors[0], tensors[1], tensors[3])], expected)
    assert ways == ["without_operators", "by_operators"]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("forward, backward", [(True, False), (False, True), (True, True)])
def test_the_passes_may_go_different_ways(options, forward, backward):
    """A mode in one of them only, with a checkpoint that computes the forward pass again in the backward pass."""
    input, weight, _, target = head()
    expected = results(input, weight, target, **options)

    def loss(input, weight):
        return lce(input, weight, target, **options).sum()

    for function in (loss, lambda *a: checkpoint(loss, *a, use_reentrant=False)):
        with Recorder() if forward else torch.device("cpu"):
            total = function(input, weight)
        with Recorder() if backward else torch.device("cpu"):
            found = torch.autograd.grad(total, (input, weight))
        assert_same(found, expected[1:])


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_selective_checkpoint(policy, reduction):
    input, weight, _, target = head()
    expected = results(input, weight, target, reduction=reduction)
    counts = []

    def choose(context, function, *args, **keywords):
        counts.append(str(function))
        return policy

    loss = checkpoint(
        lambda i: lce(i, weight, target, reduction=reduction).sum(),
        input,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(choose),
    )
    assert_same(torch.autograd.grad(loss, (input, weight)), expected[1:])
    assert any("logitless" in name for name in counts)


@pytest.mark.parametrize("options", [*OPTIONS, {"scale": torch.tensor(0.5, requires_grad=True)}], ids=str)
def test_saved_tensors_come_back_in_other_layouts(options):
    input, weight, _, target = head()
    wide = torch.cat([input, input], 1).detach()[:, :6].requires_grad_()  # rows with a stride
    expected = results(wide, weight, target, **options)
    packs = {
        "as arrays": (lambda t: t.detach().numpy().copy(), lambda a: torch.from_numpy(a)),
        "strided": (lambda t: t.detach(), lambda t: torch.stack([t, t], -1)[..., 0]),
        "columns": (lambda t: t.detach(), lambda t: t.t().contiguous().t() if t.dim() == 2 else t),
    }
    for pack, unpack in packs.values():
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            assert_same(results(wide, weight, target, **options), expected)
    with torch.autograd.graph.save_on_cpu():
        assert_same(results(wide, weight, target, **options), expected)


def test_flops_are_counted_and_a_profiler_names_the_pass(ways):
    input, weight, _, target = head()
    with FlopCounterMode(display=False) as counter:
        lce(input, weight, target).backward()
    assert counter.get_total_flops() == 3 * 2 * 9 * 13 * 6
    with profile() as found:
        lce(input, weight, target).backward()
        lce(input, weight, target, reduction="none")
        with torch.no_grad():
            lce(input, weight, target)
    names = [event.name for event in found.events()]
    assert names.count("logitless::forward_backward") == 1 and names.count("logitless::forward") == 2
    assert ways == ["by_operators", *["without_operators"] * 3]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_are_those_that_were_written(reduction, monkeypatch):
    """No copy of them is made on the way to .grad."""
    places, original = {}, run.Run.__call__

    def called(run, tensors):
        found = original(run, tensors)
        places.update({name: tensor.data_ptr() for name, tensor in found.items()})
        return found

    monkeypatch.setattr(run.Run, "__call__", called)
    input, weight, bias, target = head()
    lce(input, weight, target, linear_bias=bias, reduction=reduction).sum().backward()
    for name, leaf in (("d_hidden", input), ("d_classifier", weight), ("d_bias", bias)):
        assert leaf.grad.data_ptr() == places[name]
