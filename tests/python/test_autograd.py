"""Calls under PyTorch's autograd, and which of them use operators: those that something watches, and only those."""

import logitless
import pytest
import torch
import torch.nn.functional as F
from support import Recorder, assert_same, head, in_threads, lce, python, results
from torch.profiler import profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS = [{}, {"reduction": "none"}, {"gradient": "sparsified", "seed": 4}]


def passes(call):
    """Returns the names of the passes that run, each after that of its operator, if one is called."""
    with profile() as profiled:
        call()
    return [event.name.split("::")[1] for event in profiled.events() if event.name.startswith("logitless::")]


@pytest.mark.parametrize("stats", [False, ["argmax", "valid_count"], True])
def test_gradients_are_computed_with_a_reduced_loss(stats):
    input, weight, _, target = head()
    out = []
    assert passes(lambda: out.append(lce(input, weight, target, return_stats=stats, differentiable_stats=False))) == [
        "forward_backward"
    ]
    assert passes((out[0].loss if stats else out[0]).backward) == []
    assert stats is not True or (not out[0].nll.requires_grad and not out[0].entropy.requires_grad)


def test_no_gradient_mode_computes_no_gradient():
    input, weight, _, target = head()

    def call():
        with torch.no_grad():
            assert not lce(input, weight, target).requires_grad
        with torch.inference_mode():
            lce(input, weight, target)
        lce(input.detach(), weight.detach(), target)

    assert passes(call) == ["forward"] * 3


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_asked_for_in_inference_mode(reduction):
    input, weight, _, target = head()
    with torch.inference_mode(), torch.enable_grad():
        inside = lce(input, weight, target, reduction=reduction)
    outside = lce(input, weight, target, reduction=reduction)
    assert outside.requires_grad and not inside.requires_grad and torch.equal(inside, outside)


def test_forward_mode_is_refused():
    input, weight, _, target = head()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(input.detach(), torch.ones_like(input))
        with pytest.raises(NotImplementedError, match="hidden: .* forward-mode"):
            lce(dual, weight.detach(), target)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_function_transforms_are_refused(transform):
    input, weight, _, target = (t.detach() for t in head())

    def loss(x):
        return lce(x, weight, target)

    calls = {
        "vmap": lambda: torch.func.vmap(loss)(torch.stack([input, input])),
        "grad": lambda: torch.func.grad(loss)(input),
        "jvp": lambda: torch.func.jvp(loss, (input,), (input,)),
    }
    with pytest.raises(NotImplementedError, match="hidden: .*torch.func"):
        calls[transform]()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tied_weights(reduction):
    embedding = torch.nn.Embedding(13, 6)
    model = logitless.LinearCrossEntropyLoss(6, 13, reduction=reduction)
    model.linear.weight = embedding.weight
    tokens = torch.randint(0, 13, (9,))
    model(embedding(tokens), tokens.roll(-1)).sum().backward()
    gradient = embedding.weight.grad.clone()
    embedding.weight.grad = None
    logits = F.linear(embedding(tokens), embedding.weight)
    F.cross_entropy(logits, tokens.roll(-1), reduction=reduction).sum().backward()
    torch.testing.assert_close(gradient, embedding.weight.grad)


def test_small_float16_gradients_do_not_underflow():
    """float16 keeps nothing below 6e-8: the loss scale must be applied before rounding."""
    input, weight, _, target = head(dtype=torch.float16)
    loss = lce(input, weight, target, num_items=1e7)
    gradient = torch.autograd.grad(loss * 1e7, weight)[0]
    expected = torch.autograd.grad(lce(input, weight, target, reduction="sum"), weight)[0]
    torch.testing.assert_close(gradient, expected, rtol=2e-3, atol=1e-3)


def test_autocast_leaves_float64_alone():
    input, weight, _, target = head(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lce(input, weight, target), lce(input, weight, target).double())


def test_threads_of_python_and_numbers_of_threads():
    input, weight, bias, target = head(tokens=300, vocab=500, hidden=40)

    def run():
        loss = lce(input, weight, target, bias=bias)
        return (loss.detach(), *torch.autograd.grad(loss, (input, weight, bias)))

    expected, outcomes = run(), []
    in_threads(lambda _: outcomes.append(run()), *range(4))
    torch.set_num_threads(1)
    outcomes.append(run())
    assert len(outcomes) == 5
    for result in outcomes:
        assert_same(result, expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_are_those_that_were_written(reduction):
    """They are not copied on the way to .grad."""
    input, weight, bias, target = head(tokens=200)
    loss = lce(input, weight, target, bias=bias, reduction=reduction)
    upstream = torch.ones_like(loss)
    with profile() as profiled:
        loss.backward(upstream)
    assert not {"aten::clone", "aten::copy_", "aten::mul"} & {event.name for event in profiled.events()}


@pytest.mark.parametrize("view, is_copied", [
    (lambda wide: wide[:9, :6], False),
    (lambda wide: wide[::2, 3:9], False),
    (lambda wide: wide[:6, :9].T, True),
    (lambda wide: wide[:9, ::3], True),
    (lambda wide: wide[:1, :6].expand(9, 6), True),
])  # fmt: skip
def test_rows_with_a_stride_are_not_copied(view, is_copied):
    _, weight, _, target = head()
    input = view(torch.randn(18, 18))
    with profile() as profiled:
        lce(input, weight.detach(), target)
    assert ("aten::copy_" in {event.name for event in profiled.events()}) == is_copied


# ---- with and without operators


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
    """Returns a view whose memory holds the values with the other sign."""
    view = torch.complex(torch.zeros_like(tensor), -tensor.detach()).conj().imag
    assert view.is_neg() and torch.equal(view, tensor)
    return view


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_plain_calls_need_no_operator(options):
    input, weight, _, target = head()

    def call():
        results(input, torch.nn.Parameter(weight.detach()), target, **options)
        with torch.no_grad():
            lce(input, weight, target, **options)
        with torch.inference_mode():
            lce(input, weight, target, **options)
        with torch.device("cpu"), torch.autocast("cpu", dtype=torch.bfloat16):
            results(input, weight, target, **options)

    names = passes(call)
    assert len(names) >= 4 and "run" not in names
    with Recorder():
        assert "run" in passes(call)


@pytest.mark.parametrize("mode", [Recorder, Functions])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_modes_see_the_operators(options, mode):
    input, weight, _, target = head()
    expected = results(input, weight, target, **options)
    with mode() as seen:
        got = results(input, weight, target, **options)
    assert_same(got, expected)
    later = options.get("reduction") == "none"
    # torch.autograd.grad is itself a function, and functions inside it are invisible.
    assert seen.names == ["logitless.run.default"] * (2 if later and mode is Recorder else 1)


@pytest.mark.parametrize("kind", [negated, lambda t: t.detach().as_subclass(Subclass)], ids=["negated", "subclass"])
@pytest.mark.parametrize("place", [0, 1])
def test_tensors_that_are_not_plain(kind, place):
    tensors = list(head())
    expected = results(tensors[0], tensors[1], tensors[3])
    tensors[place] = kind(tensors[place]).requires_grad_()
    assert_same([t.as_subclass(torch.Tensor) for t in results(tensors[0], tensors[1], tensors[3])], expected)
    assert "run" in passes(lambda: lce(tensors[0], tensors[1], tensors[3]))


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_selective_checkpoint(policy, reduction):
    input, weight, _, target = head()
    expected = results(input, weight, target, reduction=reduction)
    seen = []

    def choose(context, function, *args, **keywords):
        seen.append(str(function))
        return policy

    loss = checkpoint(
        lambda i: lce(i, weight, target, reduction=reduction).sum(),
        input,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(choose),
    )
    assert_same(torch.autograd.grad(loss, (input, weight)), expected[1:])
    assert any("logitless" in name for name in seen)


def test_a_hook_that_changes_what_is_saved_is_refused():
    input, weight, _, target = head()

    def shortened(tensor):
        return tensor.half() if tensor.shape == (9,) and tensor.dtype == torch.float32 else tensor

    with torch.autograd.graph.saved_tensors_hooks(shortened, lambda tensor: tensor):
        loss = lce(input, weight, target, reduction="none")
    with pytest.raises(RuntimeError, match="lse: expected 9 elements of torch.float32, got 9 of torch.float16"):
        loss.sum().backward()


# ---- FLOP


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


PRODUCT = 2 * 9 * 13 * 6


@pytest.mark.slow
def test_flops_of_a_first_use():
    python("""
import torch, logitless
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    logitless.linear_cross_entropy(torch.randn(4, 8), torch.randn(9, 8), torch.zeros(4, dtype=torch.int64))
assert counter.get_total_flops() == 2 * 4 * 9 * 8
""")


@pytest.mark.parametrize("trained", [(True, True), (False, True), (True, False)], ids=str)
def test_flops_are_those_of_linear(trained):
    """A frozen tensor has no computed gradient."""
    input, weight, _, target = head()
    input, weight = (t if on else t.detach() for t, on in zip((input, weight), trained))
    expected = flops(lambda: F.cross_entropy(F.linear(input, weight), target, reduction="sum").backward())
    assert expected == PRODUCT * (1 + sum(trained))
    assert flops(lambda: lce(input, weight, target).backward()) == expected
    assert flops(lambda: lce(input.detach(), weight.detach(), target)) == PRODUCT
    later = flops(lambda: lce(input, weight, target, reduction="none").sum().backward())
    assert later == expected + PRODUCT  # logits once more


def test_flops_of_other_products():
    input, weight, bias, target = head()
    assert flops(lambda: lce(input, weight, target, main_grad=torch.zeros(13, 6)).backward()) == 4 * PRODUCT
    scale = torch.tensor(0.5, requires_grad=True)
    plain = input.detach(), weight.detach()
    assert flops(lambda: lce(*plain, target, scale=scale).backward()) == 2 * PRODUCT
    assert flops(lambda: lce(*plain, target, bias=bias).backward()) == PRODUCT
    for reduction in ("mean", "none"):
        options = {"gradient": "sparsified", "reduction": reduction}
        assert flops(lambda: lce(input, weight, target, **options).sum().backward()) == PRODUCT
    ids = torch.stack([target, target.flip(0)], 1)
    loss = []
    weights = {"target_weight": torch.ones(9, 2)}
    assert flops(lambda: loss.append(lce(input, weight, ids, **weights))) == 3 * PRODUCT
    assert flops(loss[0].backward) == 0
    assert flops(lambda: logitless.linear_log_probs(input, weight, ids).sum().backward()) == 4 * PRODUCT
