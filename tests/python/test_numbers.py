"""Options that are numbers: their ranges, tensors in their place, and compiled graphs that serve all of them."""

import logitless
import numpy as np
import pytest
import torch
from test_compile import tensors
from torch._dynamo.testing import CompileCounterWithBackend

lce = logitless.linear_cross_entropy
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = [0.03 * k for k in range(1, 21)]
SCHEDULES = {
    "num_items": ("num_items", [3 + k for k in range(20)], {}),
    "float num_items": ("num_items", [3.5 + k for k in range(20)], {}),
    "z_loss": ("z_loss", STEPS, {}),
    "scale": ("scale", STEPS, {}),
    "softcap": ("softcap", [1.5 + k for k in range(20)], {}),
    "label_smoothing": ("label_smoothing", STEPS, {}),
    "threshold": ("threshold", STEPS, {"gradient": "thinned", "seed": 3}),
    "scale of none": ("scale", STEPS, {"reduction": "none"}),
    "scale of draws that are kept": ("scale", STEPS, {"reduction": "none", "gradient": "thinned", "seed": 3}),
}


def check_compilations(call, values, most, backend="aot_eager"):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    input, weight, _, target = tensors(6)
    for value in values:
        found, expected = (f(input, weight, target, value) for f in (compiled, call))
        assert torch.equal(found, expected)
        for a, b in zip(*(torch.autograd.grad(loss.sum(), (input, weight)) for loss in (found, expected))):
            assert torch.equal(a, b)
    assert counter.frame_count <= most


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_compiles_twice(name):
    argument, values, options = SCHEDULES[name]
    check_compilations(lambda i, w, t, v: lce(i, w, t, **{argument: v}, **options), values, most=2)


def test_a_schedule_compiles_twice_through_inductor():
    check_compilations(lambda i, w, t, v: lce(i, w, t, z_loss=v), STEPS[:4], most=2, backend="inductor")


def test_all_at_once():
    def call(input, weight, target, v):
        numbers = {"scale": v, "softcap": 30 * v, "z_loss": v / 2, "label_smoothing": v / 3, "num_items": 9 * v}
        return lce(input, weight, target, **numbers)

    check_compilations(call, STEPS, most=2)


@pytest.mark.parametrize("name", ["z_loss", "scale", "softcap", "label_smoothing"])
def test_tensors_compile_once(name):
    values = [torch.tensor(v) for v in STEPS[:5]]
    check_compilations(lambda i, w, t, v: lce(i, w, t, **{name: v}), values, most=1)


@pytest.mark.parametrize("name", ["z_loss", "scale", "softcap", "label_smoothing", "threshold", "num_items"])
def test_tensors_are_numbers(name):
    input, weight, _, target = tensors(6)
    options = {"gradient": "thinned", "seed": 1} if name == "threshold" else {}
    expected = lce(input, weight, target, **{name: 0.5}, **options)
    for tensor in (torch.tensor(0.5), torch.tensor([[0.5]], dtype=torch.float64)):
        assert torch.equal(lce(input, weight, target, **{name: tensor}, **options), expected)


@pytest.mark.parametrize("name", ["z_loss", "softcap", "label_smoothing", "threshold", "num_items"])
def test_gradients_that_are_not_there_are_refused(name):
    input, weight, _, target = tensors(6)
    with pytest.raises(ValueError, match=f"{name}: expected a tensor that does not require grad, got one that does"):
        lce(input, weight, target, **{name: torch.tensor(0.5, requires_grad=True)})


THRESHOLDS = [0, 5, -1, float("nan"), 2.0**-150, 1e-40, 1e-320, "a"]


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=str)
@pytest.mark.parametrize("gradient", ["exact", "thinned"])
def test_a_threshold_is_checked_in_any_case(threshold, gradient):
    input, weight, _, target = tensors(6)
    options = {"gradient": gradient, "threshold": threshold}
    given = (input.detach().numpy(), weight.detach().numpy(), target.numpy())
    calls = (
        lambda: lce(input, weight, target, **options),
        lambda: lce(input.detach(), weight.detach(), target, **options),
        lambda: logitless.numpy.linear_cross_entropy(*given, **options),
        lambda: logitless.plan(6, 23, 8, **options),
        lambda: logitless.LinearCrossEntropyLoss(8, 23, **options),
    )
    for call in calls:
        with pytest.raises((ValueError, TypeError), match=r"threshold: expected a number"):
            call()


@pytest.mark.parametrize("seed", [1.5, 1 << 63, "a"])
def test_a_seed_is_checked_without_gradients(seed):
    input, weight, _, target = (t.detach() for t in tensors(6))
    with pytest.raises((ValueError, TypeError), match="seed: expected an integer"):
        lce(input, weight, target, gradient="thinned", seed=seed)
    with pytest.raises((ValueError, TypeError), match="seed: expected an integer"):
        logitless.numpy.linear_cross_entropy(
            input.numpy(), weight.numpy(), target.numpy(), gradient="thinned", seed=seed
        )


@pytest.mark.parametrize("call", [logitless.plan, logitless.plans])
@pytest.mark.parametrize("budget, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_a_budget_of_nothing_is_refused(call, budget, error):
    with pytest.raises(error, match="max_workspace_bytes: expected"):
        call(64, 100, 32, max_workspace_bytes=budget)


@pytest.mark.parametrize("gradient", ["exact", "thinned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0), torch.tensor([0.0])], ids=str)
def test_num_items_of_nothing_divides_by_zero(zero, dtype, gradient):
    input, weight, _, target = tensors(6, dtype)
    for targets, expected in ((target, torch.inf), (torch.full_like(target, -100), torch.nan)):
        logits = input @ weight.T
        stock = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 0
        loss = lce(input, weight, targets, num_items=zero, gradient=gradient)
        constant = lce(input.detach(), weight.detach(), targets, num_items=zero)
        for found in (loss, stock, constant):
            assert torch.equal(found.double(), torch.tensor(expected, dtype=torch.float64)) or expected != expected
            assert found.isnan().item() == (expected != expected)
        for g in torch.autograd.grad(loss, (input, weight)):
            assert not g[0].isfinite().all() or (g == 0).all()


def test_num_items_of_nothing_in_numpy():
    input, weight, _, target = (t.detach().numpy() for t in tensors(6))
    for options in ({"num_items": 0}, {"num_items": 0, "gradients": True}):
        assert logitless.numpy.linear_cross_entropy(input, weight, target, **options).loss == np.inf
        nothing = np.full_like(target, -100)
        assert np.isnan(logitless.numpy.linear_cross_entropy(input, weight, nothing, **options).loss)
    compiled = torch.compile(lce, fullgraph=True, backend="aot_eager")
    tensors_ = [torch.from_numpy(a) for a in (input, weight, target)]
    for items in (3, 4, 0):
        assert torch.equal(compiled(*tensors_, num_items=items), lce(*tensors_, num_items=items))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_log_probs", "linear_top_k"])
def test_tensors_of_one_number_are_inputs_of_an_exported_graph(function, strict):
    class Loss(torch.nn.Module):
        def forward(self, input, weight, scale, temperature):
            given = {
                "linear_cross_entropy": torch.arange(3),
                "linear_log_probs": torch.arange(6).reshape(3, 2),
                "linear_top_k": 2,
            }[function]
            found = getattr(logitless, function)(input, weight, given, scale=scale, temperature=temperature)
            return found.log_probs if function == "linear_top_k" else found

    input, weight = torch.randn(3, 4), torch.randn(9, 4)
    program = torch.export.export(Loss(), (input, weight, torch.tensor(0.5), torch.tensor([2.0])), strict=strict)
    for numbers in ((0.5, 2.0), (1.5, 0.25)):
        given = (input, weight, torch.tensor(numbers[0]), torch.tensor([numbers[1]]))
        assert torch.equal(program.module()(*given), Loss()(*given))
