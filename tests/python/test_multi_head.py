"""logitless.multi_head_linear_cross_entropy: values, gradients, shifts, rounding, memory, and what it refuses.

test_tools.py runs it with compilers, checkpoints and batches of upstream gradients.
"""

import contextlib

import logitless
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from support import DEVICES, assert_same, lce
from torch.utils._python_dispatch import TorchDispatchMode

many = logitless.multi_head_linear_cross_entropy
H, N, D, V = 3, 10, 6, 11


class Case:
    """H heads: hidden states and weights that are shared or not, targets of which some are ignored."""

    def __init__(self, own_states=False, shared=False, dtype=torch.float64, heads=H, rows=(N,), seed=0):
        g = torch.Generator().manual_seed(seed)
        sizes = [V] if shared else [V + 4 * head for head in range(heads)]
        states = (heads, *rows, D) if own_states else (*rows, D)
        self.hidden = torch.randn(states, generator=g).to(dtype)
        self.weights = [(torch.randn(size, D, generator=g) / D**0.5).to(dtype) for size in sizes]
        self.biases = [torch.randn(size, generator=g).to(dtype) for size in sizes]
        self.targets = torch.randint(0, V, (heads, *rows), generator=g)
        self.targets[torch.rand(self.targets.shape, generator=g) < 0.2] = -100
        self.factors = torch.tensor([1.0, -0.5, 0.0, 2.5][:heads], dtype=torch.promote_types(dtype, torch.float32))
        self.heads, self.own_states, self.shared = heads, own_states, shared

    def leaves(self, dtype=None, device="cpu"):
        """Returns hidden, weights, biases and factors, which require grad."""
        made = [self.hidden, *self.weights, *self.biases, self.factors]
        return [t.detach().to(device, dtype or t.dtype, copy=True).requires_grad_() for t in made]

    def parts(self, leaves):
        hidden, *rest, factors = leaves
        half = len(rest) // 2
        return hidden, rest[:half], rest[half:], factors

    def got(self, dtype=None, device="cpu", **options):
        """Returns loss and losses, and the gradients."""
        leaves, targets = self.leaves(dtype, device), self.targets.to(device)
        hidden, weights, biases, factors = self.parts(leaves)
        weights, biases = (weights[0], biases[0]) if self.shared else (weights, biases)
        out = many(hidden, weights, targets, head_weights=factors, biases=biases, return_losses=True, **options)
        assert not out.losses.requires_grad
        out.loss.backward()
        made = [out.loss.detach(), out.losses, *(leaf.grad for leaf in leaves)]
        return [None if t is None else t.cpu() for t in made]

    def expected(self, dtype=torch.float64):
        """Returns the same by PyTorch in a dtype; rounding happens in each head, as in separate calls."""
        leaves = self.leaves(dtype)
        hidden, weights, biases, factors = self.parts(leaves)
        losses = []
        for head in range(self.heads):
            own, state = (0 if self.shared else head), hidden[head] if self.own_states else hidden
            logits, target = F.linear(state, weights[own], biases[own]).flatten(0, -2), self.targets[head].flatten()
            seen = (target != -100).any()
            losses.append(F.cross_entropy(logits, target) if seen else logits.sum() * 0)
        losses = torch.stack(losses)
        loss = (losses * factors).sum()
        loss.backward()
        return [loss.detach(), losses.detach(), *(leaf.grad for leaf in leaves)]


def check(case, got, dtype=None):
    """Compares with float64: twice the error of PyTorch's own computation, and a rounding for each term of a sum."""
    dtype = dtype or case.hidden.dtype
    terms = case.hidden.numel() + sum(len(weight) for weight in case.weights)
    for mine, truth, naive in zip(got, case.expected(), case.expected(dtype), strict=True):
        assert mine.shape == truth.shape
        if mine.numel() == 0:
            continue
        size = truth.abs().max().item()
        bound = 2 * (naive.double() - truth).abs().max() + torch.finfo(dtype).eps * size
        bound += terms * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * size
        assert (mine.double() - truth).abs().max() <= bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("own_states", [False, True])
def test_values_and_gradients(own_states, shared, dtype, device):
    case = Case(own_states, shared, dtype)
    got = case.got(device=device)
    assert [t.dtype for t in got[2:]] == [t.dtype for t in case.leaves()]
    check(case, got)


@pytest.mark.parametrize("heads, rows", [(1, (N,)), (1, (1,)), (2, (1,)), (3, (2, 5)), (4, (0,))])
@pytest.mark.parametrize("own_states", [False, True])
def test_sizes(own_states, heads, rows):
    case = Case(own_states, heads=heads, rows=rows)
    check(case, case.got())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_head_without_targets_has_no_part(shared, reduction):
    case = Case(shared=shared)
    case.targets[1] = -100
    got = case.got(reduction=reduction)
    assert got[1][1] == 0 and all(t.isfinite().all() for t in got)
    if reduction == "mean":
        check(case, got)
    case.targets[:] = -100
    assert all((t == 0).all() for t in case.got(reduction=reduction))


def test_float16_and_learned_numbers_and_main_grad_give_later_gradients():
    case = Case(shared=True, dtype=torch.float16)
    check(case, case.got())
    case = Case(shared=True)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    got, expected = case.got(scale=scale), case.got(scale=0.7)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)
    assert scale.grad is not None
    main_grad = torch.zeros_like(case.weights[0])
    got = case.got(main_grad=main_grad, scale=0.7)
    assert got[3] is None
    torch.testing.assert_close(main_grad, expected[3])


def of_each(hidden, weight, targets, head, **options):
    return lce(hidden, weight, targets[head], **{name: value[head] for name, value in options.items()})


def test_options_of_heads():
    """A list has a value for each head. Vectors of rows are shared, or have one row for each head."""
    g = torch.Generator().manual_seed(3)
    hidden, weights, targets = torch.randn(N, D, generator=g), [torch.randn(V, D, generator=g)] * H, Case().targets
    of_rows = torch.rand(H, N, generator=g) + 0.5
    own = {"token_weight": of_rows, "temperature": of_rows.flip(0), "softcap": [None, 2.0, 3.0], "z_loss": [0.1] * H}
    own["class_weight"] = [torch.rand(V, generator=g) + 0.5, None, None]
    own["num_items"] = [3, None, 7.5]
    got = many(hidden, weights, targets, return_losses=True, **own)
    assert_same(got.losses, [of_each(hidden, weights[0], targets, head, **own) for head in range(H)])
    got = many(hidden, weights, targets, token_weight=of_rows[1], return_losses=True)
    assert_same(got.losses, [lce(hidden, weights[0], targets[head], token_weight=of_rows[1]) for head in range(H)])


def test_several_targets():
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g)
    ids, shares = torch.randint(0, V, (2, N, 3), generator=g), torch.rand(2, N, 3, generator=g)
    got = many(hidden, weight, ids, target_weight=shares, return_losses=True)
    assert_same(got.losses, [of_each(hidden, weight, ids, head, target_weight=shares) for head in range(2)])
    got = many(hidden, weight, ids[0], shifts=[0, 2], target_weight=shares[0], return_losses=True)
    assert_same(got.losses, [lce(hidden, weight, ids[0], shift=s, target_weight=shares[0]) for s in (0, 2)])


@pytest.mark.parametrize("own_states", [False, True])
def test_shifts(own_states):
    case = Case(own_states, rows=(2, 5))
    hidden, weights = case.hidden.requires_grad_(), case.weights
    shifts = [1, 2, 5]  # the last head has no target left
    labels = case.targets[0]
    given = torch.full_like(case.targets, -100)
    for head, shift in enumerate(shifts[:2]):
        given[head, :, :-shift] = labels[:, shift:]
    got = many(hidden, weights, labels, shifts=shifts, return_losses=True)
    expected = many(hidden, weights, given, return_losses=True)
    assert got.losses[2] == 0
    torch.testing.assert_close(got.losses, expected.losses)
    gradients = [torch.autograd.grad(out.loss, hidden)[0] for out in (got, expected)]
    torch.testing.assert_close(*gradients)
    counts = many(hidden, weights, labels, shifts=range(1, H + 1), return_stats=["valid_count"]).stats
    assert [out.valid_count for out in counts] == [(labels[:, shift:] != -100).sum() for shift in (1, 2, 3)]


def test_statistics_of_heads():
    case = Case()
    out = many(case.hidden.requires_grad_(), case.weights, case.targets, return_stats=True)
    for head, stats in enumerate(out.stats):
        expected = lce(case.hidden, case.weights[head], case.targets[head], return_stats=True)
        for got, own in zip(stats, expected, strict=True):
            assert got is own is None or (torch.equal(got, own) and not got.requires_grad)


def test_statistics_of_a_draw():
    """They need passes of their own where one head is frozen."""
    case, options = Case(dtype=torch.float32), {"gradient": "always-sparsified", "threshold": 0.1, "seed": 3}
    weights = [case.weights[0].requires_grad_(), *case.weights[1:]]
    for hidden in (case.hidden, case.hidden.clone().requires_grad_()):
        out = many(hidden, weights, case.targets, return_stats=["kept_count"], **options)
        for head, stats in enumerate(out.stats):
            expected = lce(hidden, weights[head], case.targets[head], return_stats=["kept_count"], **options)
            assert torch.equal(stats.kept_count, expected.kept_count)


@pytest.mark.parametrize("gradient", ["exact", "always-sparsified"])
def test_a_shared_gradient_is_rounded_once(gradient):
    """Equal heads add up to one head: rounding after each of 24 would be off by several units in the last place."""
    case = Case(shared=True, dtype=torch.bfloat16)
    options = {"gradient": gradient, "seed": 3 if gradient != "exact" else None, "reduction": "sum"}

    def gradients(factors):
        hidden, weight = (t.clone().requires_grad_() for t in (case.hidden, case.weights[0]))
        loss = many(hidden, weight, case.targets[:1].expand(len(factors), -1), head_weights=factors, **options)
        return torch.autograd.grad(loss, (hidden, weight))

    for got, expected in zip(gradients([1 / 24] * 24), gradients([1.0]), strict=True):
        assert ((got - expected).abs() <= torch.finfo(torch.bfloat16).eps * expected.abs()).all()


def test_later_gradients_of_hidden_are_added_in_float32():
    """Equal heads add up to one head, with a rounding for each and one for the sum."""
    case, gradients = Case(shared=True, dtype=torch.bfloat16), []
    for count in (64, 1):
        hidden, targets = case.hidden.clone().requires_grad_(), case.targets[:1].expand(count, -1)
        loss = many(
            hidden,
            case.weights[0],
            targets,
            head_weights=[1 / count] * count,
            scale=torch.ones((), requires_grad=True),
        )
        gradients += torch.autograd.grad(loss, hidden)
    got, expected = gradients
    assert ((got - expected).abs() <= 2 * torch.finfo(torch.bfloat16).eps * expected.abs()).all()


def test_the_budget_is_that_of_the_largest_head():
    case = Case(dtype=torch.float32)

    def least(call):
        with pytest.raises(logitless.BudgetTooSmallError) as error:
            call()
        return error.value.required_bytes

    largest = case.weights[-1].requires_grad_()
    one = least(lambda: lce(case.hidden.requires_grad_(), largest, case.targets[-1], max_workspace_bytes=1))
    assert least(lambda: many(case.hidden, [largest] * 2, case.targets[1:], max_workspace_bytes=1)) == one
    many(case.hidden, case.weights, case.targets, max_workspace_bytes=one).backward()


@pytest.mark.parametrize("scale", [1.0, torch.tensor(1.0, requires_grad=True)], ids=["together", "later"])
def test_a_refused_budget_says_what_all_heads_need(scale):
    case = Case(dtype=torch.bfloat16)
    shared = torch.randn(500, D).bfloat16().requires_grad_()
    weights = [case.weights[0].requires_grad_(), shared, shared]
    with pytest.raises(logitless.BudgetTooSmallError) as error:
        many(case.hidden, weights, case.targets, scale=scale, max_workspace_bytes=1)
    many(case.hidden, weights, case.targets, scale=scale, max_workspace_bytes=error.value.required_bytes)


class Made(TorchDispatchMode):
    """The shapes of tensors that PyTorch's operators made."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.shapes |= {
            tuple(t.shape) for t in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(t, torch.Tensor)
        }
        return out


def test_gradients_that_come_later_are_added_one_by_one():
    case = Case()
    with Made() as mode:
        many(
            case.hidden.requires_grad_(), case.weights, case.targets, scale=torch.ones((), requires_grad=True)
        ).backward()
    assert (N, D) in mode.shapes and (H, N, D) not in mode.shapes


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("change", [torch._neg_view, lambda t: t.as_subclass(Subclass)], ids=["negated", "subclass"])
def test_one_tensor_that_is_not_plain(change):
    case = Case()
    other = change(case.weights[1].neg() if change is torch._neg_view else case.weights[1])
    hidden = case.hidden.requires_grad_()
    losses = [
        many(hidden, [case.weights[0], weight, case.weights[2]], case.targets) for weight in (case.weights[1], other)
    ]
    assert_same(*(torch.autograd.grad(loss, hidden) for loss in losses))


def test_main_grad_of_the_shape_of_rows_is_for_all_heads():
    case, main_grad = Case(heads=V, rows=(D,), shared=True, dtype=torch.float32), torch.zeros(V, D)
    weight = case.weights[0].requires_grad_()
    many(case.hidden, weight, case.targets, main_grad=main_grad).backward()
    torch.testing.assert_close(main_grad, torch.autograd.grad(many(case.hidden, weight, case.targets), weight)[0])


@pytest.mark.parametrize("scale", [1.0, torch.tensor(1.0, requires_grad=True)], ids=["together", "later"])
def test_losses_may_change_in_place(scale):
    case, gradients = Case(dtype=torch.float32), []
    for factor in (1, 2):
        leaves = case.leaves()
        hidden, weights, _, factors = case.parts(leaves)
        out = many(hidden, weights, case.targets, head_weights=factors, scale=scale, return_losses=True)
        out.losses.div_(factor)
        gradients.append(torch.autograd.grad(out.loss, (hidden, factors)))
    assert_same(*gradients)


@pytest.mark.parametrize("run", ["direct", "traced", "later"])
def test_the_place_of_a_wrong_target(run):
    case = Case(rows=(2, 5), dtype=torch.float32)
    case.targets[2, 1, 3] = 99
    mode = Made() if run == "traced" else contextlib.nullcontext()
    options = {"scale": torch.ones((), requires_grad=True)} if run == "later" else {}
    with mode, pytest.raises(logitless.InvalidTargetError, match=r"at targets\[2, 1, 3\]") as error:
        many(case.hidden.requires_grad_(), case.weights, case.targets, **options)
    assert error.value.row == 28
    with mode, pytest.raises(logitless.InvalidTargetError, match=r"at targets\[1, 3\]"):
        many(case.hidden, case.weights, case.targets[2], shifts=[0] * H, **options)


def test_frozen_parts():
    """A head without trained tensors has its loss alone, beside one with gradients."""
    case = Case()
    expected = case.expected()
    for trained in range(4):
        leaves = case.leaves()
        hidden, weights, biases, factors = case.parts([t.requires_grad_(i == trained) for i, t in enumerate(leaves)])
        loss = many(hidden, weights, case.targets, biases=biases, head_weights=factors)
        torch.testing.assert_close(torch.autograd.grad(loss, leaves[trained])[0], expected[2 + trained])
    with torch.no_grad():
        torch.testing.assert_close(many(hidden, weights, case.targets, biases=biases, head_weights=factors), loss)


def test_hidden_states_as_weight():
    """The gradient of one tensor in both places is the sum of two."""
    x, targets = torch.randn(N, D, dtype=torch.float64, requires_grad=True), Case().targets.clamp(max=N - 1)
    others = [x.detach().clone().requires_grad_() for _ in range(2)]
    gradient = torch.autograd.grad(many(x, [x, x, x], targets), x)[0]
    torch.testing.assert_close(gradient, sum(torch.autograd.grad(many(others[0], [others[1]] * 3, targets), others)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype):
    """bf16 products of float32 tensors have the error of bf16 tensors, and gradients have the tensors' dtypes."""
    case = Case(shared=True, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        got = case.got(dtype)
    assert got[0].dtype == torch.float32 and got[2].dtype == got[3].dtype == dtype
    check(case, got)


@pytest.mark.slow
def test_compiled_with_learned_factors_and_heads_of_their_own():
    case = Case(own_states=True, dtype=torch.float32)
    hidden, weights, _, factors = case.parts(case.leaves())

    def step(hidden, weights, targets, factors):
        return many(hidden, weights, targets, head_weights=factors, return_losses=True)

    outs = [
        f(hidden, weights, case.targets, factors)
        for f in (torch.compile(step, fullgraph=True, backend="aot_eager"), step)
    ]
    assert torch.equal(outs[0].losses, outs[1].losses)
    assert_same(*(torch.autograd.grad(out.loss, [hidden, *weights, factors]) for out in outs))


@pytest.mark.parametrize("kind", [list, torch.nn.ParameterList])
def test_a_list_of_learned_factors(kind):
    """Each factor gets its gradient, wherever its dtype differs from the loss's."""
    case = Case(dtype=torch.float32)
    factors = [torch.nn.Parameter(one.to(torch.float64).detach()) for one in case.factors]
    loss = many(case.hidden, case.weights, case.targets, head_weights=kind(factors))
    stacked = case.factors.clone().requires_grad_()
    expected = many(case.hidden, case.weights, case.targets, head_weights=stacked)
    assert torch.equal(loss, expected)
    got = torch.stack(torch.autograd.grad(loss, factors))
    assert torch.equal(got.float(), torch.autograd.grad(expected, stacked)[0])


class Sharded(torch.Tensor):
    """Looks like a DTensor."""

    placements = ()


hidden, weight, ids = torch.zeros(N, D), torch.zeros(V, D), torch.zeros(H, N, dtype=torch.int64)
REFUSED = {
    r"targets: expected shape \[H, ..., N\]": lambda: many(hidden, weight, ids[0]),
    r"targets: expected shape \[2, ...\] .* given once need shifts": lambda: many(hidden, [weight] * 2, ids),
    r"hidden: expected shape \[10, D\] or \[3, 10, D\]": lambda: many(hidden[1:], weight, ids),
    r"weights: expected a tensor or a sequence": lambda: many(hidden, None, ids),
    r"weights: expected at least one head": lambda: many(hidden, [], ids),
    r"shifts: expected at least one head": lambda: many(hidden, weight, ids[0], shifts=[]),
    r"targets: expected at least one head": lambda: many(hidden, weight, ids[:0]),
    r"shifts\[1\]: expected an integer >= 0, got -1": lambda: many(hidden, weight, ids[0], shifts=[0, -1]),
    r"shifts\[1\]: expected an integer, got float": lambda: many(hidden, weight, ids[0], shifts=[0, 1.5]),
    r"weights\[1\]: expected shape \[V, 6\].*\[11, 3\]": lambda: many(hidden, [weight, weight[:, :3], weight], ids),
    r"biases\[1\]: expected shape \[11\]": lambda: many(hidden, [weight] * 3, ids, biases=[None, hidden[0], None]),
    r"biases: expected a torch.Tensor, got int": lambda: many(hidden, weight, ids, biases=5),
    r"softcap: .* \(head 1\)": lambda: many(hidden, weight, ids, softcap=[None, "x", 2.0]),
    r"head_weights\[0\]: expected a number of": lambda: many(hidden, weight, ids, head_weights=[1e300, 1, 1]),
    r"head_weights\[2\]: expected one element": lambda: many(hidden, weight, ids, head_weights=[1, 1, hidden]),
    r"weights: .*, got str": lambda: many(hidden, [weight, weight, "w"], ids),
    r"head_weights: expected 3, .* got 2": lambda: many(hidden, weight, ids, head_weights=[1, 2]),
    r"head_weights: expected shape \[3\]": lambda: many(hidden, weight, ids, head_weights=torch.ones(2)),
    r"head_weights: expected a tensor or a seq": lambda: many(hidden, weight, ids, head_weights=3),
    r"shifts: expected 3, one for each head, got 2": lambda: many(hidden, [weight] * 3, ids[0], shifts=[1, 2]),
    r"shifts: expected a sequence": lambda: many(hidden, weight, ids[0], shifts=1),
    r"biases: expected one value, or 3": lambda: many(hidden, weight, ids, biases=[None]),
    r"z_loss: expected one value, or 3": lambda: many(hidden, weight, ids, z_loss=[0.1, 0.2]),
    r'reduction: expected "mean" or "sum"': lambda: many(hidden, weight, ids, reduction="none"),
    r"unexpected keyword argument 'group'": lambda: many(hidden, weight, ids, group=None),
    r"unexpected keyword argument 'shift'": lambda: many(hidden, weight, ids, shift=1),
    r"targets: expected 0 <= target < 11": lambda: many(hidden, weight, ids + V),
    r"weights: expected plain tensors, got a DTensor": lambda: many(hidden, weight.as_subclass(Sharded), ids),
    r"return_losses: expected a bool": lambda: many(hidden, weight, ids, return_losses=1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_by_name(message):
    with pytest.raises((ValueError, TypeError, logitless.UnsupportedError), match=message):
        REFUSED[message]()


def test_double_backward_is_refused():
    given = hidden.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="multi_head_linear_cross_entropy: double backward"):
        torch.autograd.grad(many(given, weight, ids), given, create_graph=True)


@pytest.mark.parametrize("shared", [False, True])
def test_module(shared):
    factors = torch.nn.Parameter(torch.tensor([1.0, 0.5]))
    sizes = V if shared else [V, V + 3]
    module = logitless.nn.MultiHeadLoss(D, sizes, bias=True, shifts=[1, 2], head_weights=factors, softcap=4.0)
    assert len(module.heads) == 2 - shared and "head_weights" in module.state_dict()
    weights, biases = zip(*((head.weight, head.bias) for head in module.heads))
    hidden, labels = torch.randn(2, 5, D), torch.randint(0, V, (2, 5))
    out = module(hidden, labels, token_weight=torch.ones(2, 5), return_losses=True)
    weights, biases = (weights[0], biases[0]) if shared else (weights, biases)
    given = {"biases": biases, "shifts": [1, 2], "head_weights": factors, "softcap": 4.0, "return_losses": True}
    assert_same(out[:2], many(hidden, weights, labels, **given)[:2])
    with pytest.raises(TypeError, match="unexpected keyword argument 'shift'"):
        logitless.nn.MultiHeadLoss(D, sizes, shift=1)
    learned = torch.nn.ParameterList([torch.tensor(1.0), torch.tensor(0.5)])
    module = logitless.nn.MultiHeadLoss(D, sizes, shifts=[1, 2], head_weights=learned)
    module(hidden, labels).backward()
    assert {f"head_weights.{i}" for i in range(2)} <= set(module.state_dict()) and all(p.grad != 0 for p in learned)
    with pytest.raises(ValueError, match="head_weights: expected numbers, a tensor or a ParameterList"):
        logitless.nn.MultiHeadLoss(D, sizes, shifts=[1, 2], head_weights=list(learned))
    fixed = logitless.nn.MultiHeadLoss(D, sizes, head_weights=torch.ones(2))
    assert fixed.to(torch.float64).head_weights.dtype == torch.float64 and "head_weights" not in fixed.state_dict()


WRONG = {
    r'reduction: expected "mean" or "sum"': (V, {"reduction": "none"}),
    r"head_weights: expected 2, one for each head, got 3": ([V, V], {"head_weights": [1, 2, 3]}),
    r"head_weights: expected 2, .* got 1": (V, {"shifts": [0, 1], "head_weights": [1]}),
    r"head_weights: expected shape \[2\]": ([V, V], {"head_weights": torch.ones(3)}),
    r"head_weights: expected a tensor or a sequence": (V, {"head_weights": 3.0}),
    r"shifts: expected a sequence of integers, got int": (V, {"shifts": 5}),
    r"shifts: expected 2, one for each head, got 1": ([V, V], {"shifts": [1]}),
    r"shifts\[1\]: expected an integer >= 0": (V, {"shifts": [1, -1]}),
    r"num_classes: expected a number >= 1": ([], {}),
    r"num_classes: expected a number >= 1 .*, got 0": (0, {}),
    r"num_classes: expected an integer, got float": (2.5, {}),
}


@pytest.mark.parametrize("message", WRONG)
def test_the_module_refuses_by_name(message):
    sizes, options = WRONG[message]
    with pytest.raises((TypeError, ValueError), match=message):
        logitless.nn.MultiHeadLoss(D, sizes, **options)


def test_the_module_takes_integers_of_any_kind():
    assert len(logitless.nn.MultiHeadLoss(D, np.int64(V), shifts=np.arange(2).tolist()).heads) == 1


def normed(layer):
    return torch.nn.utils.spectral_norm(layer)


def pruned(layer):
    return torch.nn.utils.prune.l1_unstructured(layer, "weight", 0.5)


def scaled(layer):
    layer.register_forward_hook(lambda module, given, out: 2 * out)
    return layer


def replaced(layer):
    old = layer.forward
    layer.forward = lambda hidden: 2 * old(hidden)  # as accelerate's hooks do
    return layer


@pytest.mark.parametrize("change", [normed, pruned, scaled, replaced])
def test_layers_whose_hooks_would_not_run_are_refused(change):
    module = logitless.nn.MultiHeadLoss(D, [V, V])
    change(module.heads[1])
    with pytest.raises(logitless.UnsupportedError, match=r"heads\[1\]: expected a layer without hooks"):
        module(torch.zeros(N, D), ids[:2])
    one = logitless.LinearCrossEntropyLoss(D, V)
    change(one.linear)
    with pytest.raises(logitless.UnsupportedError, match="linear: expected a layer without hooks"):
        one(torch.zeros(N, D), ids[0])
    adaptive = logitless.nn.AdaptiveLogSoftmaxWithLoss(16, 20, [4, 10])
    change(adaptive.tail[1][1])
    with pytest.raises(logitless.UnsupportedError, match=r"tail\[1\]\[1\]: expected a layer without hooks"):
        adaptive(torch.zeros(2, 16), torch.tensor([0, 15]))
    change(adaptive.head)
    for call in (adaptive.predict, lambda input: adaptive(input, torch.tensor([0, 15]))):
        with pytest.raises(logitless.UnsupportedError, match="head: expected a layer without hooks"):
            call(torch.zeros(2, 16))


def test_hooks_that_place_parameters_are_no_obstacle():
    """ZeRO-3 and FSDP2 hook every layer, and leave values as they are."""

    def hook(*_):
        raise AssertionError

    hook.__module__ = "deepspeed.runtime"
    one = logitless.LinearCrossEntropyLoss(D, V)
    one.linear.register_forward_pre_hook(hook)
    assert one(hidden, ids[0]) > 0
