"""Calls without operators: where nothing watches, and nowhere else; what they keep answers for nothing else."""

import threading

import headroom
import numpy as np
import pytest
import torch
from headroom import _dispatch, _eager, _run, functional
from headroom._cache import Cache
from test_autograd import head
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

lce = headroom.linear_cross_entropy
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def ways(monkeypatch):
    """Records which way calls go."""
    taken = []
    for name in ("by_operators", "without_operators"):
        original = getattr(functional, name)
        monkeypatch.setattr(functional, name, lambda a, n=name, f=original: taken.append(n) or f(a))
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
        self.names += [str(function)] if "headroom" in str(function) else []
        return function(*args, **(kwargs or {}))


class Functions(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names += [str(function)] if "headroom" in str(function) else []
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
    for name in ("forward", "forward_backward", "backward"):
        monkeypatch.setattr(_dispatch._ops, name, None)
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
    names = ["headroom.forward.default"] if later else ["headroom.forward_backward.default"]
    if later and mode is Recorder:  # functions are not seen inside of torch.autograd.grad, which is one
        names.append("headroom.backward.default")
    assert seen.names == names


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
    assert any("headroom" in name for name in counts)


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
    assert names.count("headroom::forward_backward") == 1 and names.count("headroom::forward") == 2
    assert ways == ["by_operators", *["without_operators"] * 3]


def variants():
    """Calls that differ in one thing each from the first."""
    input, weight, bias, target = head(tokens=12, vocab=16, hidden=8)
    frozen = input.detach(), weight.detach()

    def made(change, *tensors):
        return [change(t.detach()).requires_grad_() for t in tensors]

    plain = dict(input=input, linear_weight=weight, target=target)
    changes = {
        "plain": {},
        "row stride": {"input": made(lambda t: torch.cat([t, 2 * t], 1)[:, :8], input)[0]},
        "transposed": {"linear_weight": made(lambda t: (2 * t).t().contiguous().t(), weight)[0]},
        "backwards": {"input": made(lambda t: t.flip(0).repeat_interleave(2, 0)[::2], input)[0]},
        "bfloat16": dict(zip(("input", "linear_weight"), made(torch.Tensor.bfloat16, input, weight))),
        "bfloat16 weight": {"linear_weight": made(torch.Tensor.bfloat16, weight)[0]},
        "float16": dict(zip(("input", "linear_weight"), made(torch.Tensor.half, input, weight))),
        "float64": dict(zip(("input", "linear_weight"), made(torch.Tensor.double, input, weight))),
        "frozen input": {"input": frozen[0]},
        "frozen weight": {"linear_weight": frozen[1]},
        "frozen": dict(zip(("input", "linear_weight"), frozen)),
        "fewer rows": {"input": made(lambda t: t[:7], input)[0], "target": target[:7]},
        "less vocabulary": {"linear_weight": made(lambda t: t[:15], weight)[0], "target": target.clamp(max=14)},
        "three dimensions": {"input": made(lambda t: t.view(3, 4, 8), input)[0], "target": target.view(3, 4)},
        "int32": {"target": target.int()},
        "strided target": {"target": target.repeat_interleave(2)[::2]},
        "bias": {"linear_bias": bias},
        "frozen bias": {"linear_bias": bias.detach()},
        "bfloat16 bias": {"linear_bias": bias.detach().bfloat16().requires_grad_()},
        "class weight": {"weight": torch.linspace(0.5, 2, 16)},
        "token weight": {"token_weight": torch.linspace(0.5, 2, 12)},
        "sum": {"reduction": "sum"},
        "none": {"reduction": "none"},
        "ignore_index": {"ignore_index": int(target[1]), "target": target.clamp(min=0)},
        "smoothing": {"label_smoothing": 0.25},
        "scale": {"scale": 0.5},
        "scale tensor": {"scale": torch.tensor(0.75)},
        "learned scale": {"scale": torch.tensor(0.625, requires_grad=True)},
        "softcap": {"softcap": 2},
        "z_loss": {"z_loss": 0.5},
        "num_items": {"num_items": 5},
        "num_items of 0": {"num_items": 0},
        "num_items tensor": {"num_items": torch.tensor(7)},
        "shift": {"shift": 1},
        "budget": {"max_workspace_bytes": 1 << 20},
        "stats": {"return_stats": True},
        "some stats": {"return_stats": ["argmax", "lse"]},
        "detached stats": {"return_stats": True, "differentiable_stats": False},
        "thinned": {"gradient": "thinned", "seed": 1, "threshold": 0.25},
        "thinned none": {"gradient": "thinned", "seed": 2, "threshold": 0.25, "reduction": "none"},
        "other seed": {"gradient": "thinned", "seed": torch.tensor(3), "threshold": 0.25},
        "other threshold": {"gradient": "thinned", "seed": 1, "threshold": 0.5},
        "draw stats": {
            "gradient": "thinned", "seed": 1, "threshold": 0.25, "return_stats": ["kept_count", "draw_variance"]
        },
        "main_grad": {"main_grad": torch.zeros(16, 8)},
        "main_grad rows": {"main_grad": torch.zeros(16, 9)[:, :8]},
    }  # fmt: skip
    return {name: plain | change for name, change in changes.items()}


def everything(call):
    """All that a call gives."""
    main_grad = call.get("main_grad")
    if main_grad is not None:
        main_grad.zero_()
    names = ("input", "linear_weight", "linear_bias", "scale")
    leaves = [call[n] for n in names if torch.is_tensor(call.get(n)) and call[n].requires_grad]
    out = lce(**call)
    parts = list(out) if isinstance(out, tuple) else [out]
    total = sum(part.sum() for part in parts if part is not None and part.requires_grad)
    found = torch.autograd.grad(total, leaves, allow_unused=True) if leaves else ()
    return [p.detach() if torch.is_tensor(p) else p for p in (*parts, *found, main_grad)]


def clear():
    _eager._calls, _run._runs = Cache(256), Cache(256)


def equal(a, b):
    if a is None or b is None:
        return a is b
    same = torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
    return same and a.dtype == b.dtype and a.shape == b.shape


def test_what_is_kept_answers_for_nothing_else():
    """Every call after every other one gives what it gives alone, and what the operators give."""
    torch.set_num_threads(1)
    calls = variants()
    alone = {}
    for name, call in calls.items():
        clear()
        alone[name] = [None if t is None else t.clone() for t in everything(call)]
        with Recorder():
            by_operators = everything(call)
        assert all(map(equal, by_operators, alone[name])), name
    for order in ((0, 1, 2), (2, 0, 1)):
        clear()
        names = [name for part in order for name in list(calls)[part::3]]
        for name in (*names, *reversed(names)):
            assert all(map(equal, everything(calls[name]), alone[name])), name
    with torch.no_grad():
        for name, call in calls.items():
            out = lce(**call)
            assert not (out[0] if isinstance(out, tuple) else out).requires_grad


def test_threads_and_autocast_are_part_of_the_key():
    input, weight, _, target = head(tokens=70, vocab=200, hidden=32)
    expected = results(input, weight, target)
    short = results(*(t.detach().bfloat16().requires_grad_() for t in (input, weight)), target)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        clear()
        assert_same(results(input, weight, target), expected)
        (run,) = _run._runs._young.values()
        assert run.plan.info.threads <= threads
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_same(results(input, weight, target), [t.float() for t in short])
        assert_same(results(input, weight, target), expected)


@pytest.mark.parametrize(
    "name", ["label_smoothing", "z_loss", "scale", "softcap", "num_items", "shift", "ignore_index"]
)
def test_equal_values_of_other_types_are_refused_still(name):
    input, weight, _, target = head()
    target[0] = 1
    number = 1 if name != "z_loss" else 1.0
    lce(input, weight, target, **{name: number})
    lce(input, weight, target, **{name: number})
    with pytest.raises(TypeError, match=f"{name}: expected"):
        lce(input, weight, target, **{name: True})
    if name in ("shift", "ignore_index"):
        with pytest.raises(TypeError, match=f"{name}: expected"):
            lce(input, weight, target, **{name: 1.0})


def test_bad_arguments_are_refused_after_good_ones():
    input, weight, _, target = head()
    for _ in range(2):
        lce(input, weight, target)
        lce(input, weight, target, gradient="thinned", seed=1)
    wrong = [
        ({"target": target[:5]}, r"target: expected shape"),
        ({"linear_weight": weight.double()}, "linear_weight: expected float64"),
        ({"reduction": ["mean"]}, "reduction: expected one of"),
        ({"return_stats": ["nothing"]}, "return_stats: expected names"),
        ({"return_stats": "nll"}, "return_stats: expected a bool"),
        ({"return_stats": [["nll"]]}, "return_stats: expected names"),
        ({"seed": 1}, "seed: expected None"),
        ({"gradient": "thinned", "seed": 1.0}, "seed: expected an integer"),
        ({"gradient": "thinned", "seed": torch.tensor([1, 2])}, "seed: expected one int64"),
        ({"num_items": torch.tensor(-1)}, "num_items: expected a finite number"),
        ({"num_items": torch.tensor(2), "reduction": "sum"}, "num_items: expected None"),
        ({"main_grad": torch.zeros(6, 13).t()}, "main_grad: expected contiguous rows"),
        ({"main_grad": weight.detach()}, None),
    ]
    for options, message in wrong:
        for _ in range(2):
            arguments = {"input": input, "linear_weight": weight, "target": target} | options
            if message is None:
                with pytest.raises(ValueError, match="main_grad: expected a buffer of its own"):
                    lce(**arguments).backward()
            else:
                with pytest.raises((ValueError, TypeError), match=message):
                    lce(**arguments)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_are_those_that_were_written(reduction, monkeypatch):
    """No copy of them is made on the way to .grad."""
    places, original = {}, _run.Run.__call__

    def call(run, tensors):
        found = original(run, tensors)
        places.update({name: tensor.data_ptr() for name, tensor in found.items()})
        return found

    monkeypatch.setattr(_run.Run, "__call__", call)
    input, weight, bias, target = head()
    lce(input, weight, target, linear_bias=bias, reduction=reduction).sum().backward()
    for name, leaf in (("d_hidden", input), ("d_classifier", weight), ("d_bias", bias)):
        assert leaf.grad.data_ptr() == places[name]


def test_a_target_out_of_range_is_found_by_a_kept_call():
    input, weight, _, target = head()
    lce(input.view(3, 3, 6), weight, target.view(3, 3))
    target[7] = 13
    with pytest.raises(headroom.InvalidTargetError, match=r"got 13 at target\[2, 1\]"):
        lce(input.view(3, 3, 6), weight, target.view(3, 3))


def test_the_cache_is_bounded_and_keeps_what_is_used():
    cache = Cache(4)
    for number in range(100):
        cache.put(number, str(number))
        cache.get(0) or cache.put(0, "0")
        assert len(cache) <= 8
    assert cache.get(0) == "0" and cache.get(99) == "99" and cache.get(50) is None
    torch.set_num_threads(1)
    input, weight, _, target = head(tokens=600)
    for tokens in range(1, 600):
        lce(input[:tokens], weight, target[:tokens])
    assert len(_eager._calls) <= 512 and len(_run._runs) <= 512


def test_many_threads_with_many_layouts():
    input, weight, _, target = head(tokens=64)
    lengths = list(range(1, 65)) * 3
    expected = {n: results(input[:n].detach().requires_grad_(), weight, target[:n]) for n in lengths}
    clear()
    wrong = []

    def work(order):
        for n in order:
            for f, e in zip(results(input[:n].detach().requires_grad_(), weight, target[:n]), expected[n]):
                if not torch.equal(f.nan_to_num(), e.nan_to_num()):
                    wrong.append(n)

    orders = [np.random.default_rng(seed).permutation(lengths).tolist() for seed in range(4)]
    workers = [threading.Thread(target=work, args=(order,)) for order in orders]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
