"""torch.compile and torch.export: few graphs serve all numbers. test_tools.py compares the bits of every call."""

import logitless
import pytest
import torch
from functorch.compile import make_boxed_func
from support import CUDA, DEVICES, assert_same, head, lce
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

STEPS = [0.03 * k for k in range(1, 21)]
SPARSIFIED = {"gradient": "sparsified", "seed": 3}
SCHEDULES = {
    "num_items": ("num_items", [3 + k for k in range(20)], {}),
    "float num_items": ("num_items", [3.5 + k for k in range(20)], {}),
    "z_loss": ("z_loss", STEPS, {}),
    "scale": ("scale", STEPS, {}),
    "softcap": ("softcap", [1.5 + k for k in range(20)], {}),
    "label_smoothing": ("label_smoothing", STEPS, {}),
    "threshold": ("threshold", STEPS, SPARSIFIED),
    "scale of none": ("scale", STEPS, {"reduction": "none"}),
    "scale of draws that are kept": ("scale", STEPS, SPARSIFIED | {"reduction": "none"}),
}


def check_compilations(call, values, most, backend="aot_eager", device="cpu"):
    """Checks that compiling call(input, weight, target, value) happens no more often, and keeps all bits, even
    gradients'."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    input, weight, _, target = head(device=device)
    for value in values:
        got, expected = (f(input, weight, target, value) for f in (compiled, call))
        assert torch.equal(got, expected)
        learned = [value] if torch.is_tensor(value) and value.requires_grad else []
        assert_same(*(torch.autograd.grad(loss.sum(), [input, weight, *learned]) for loss in (got, expected)))
    assert counter.frame_count <= most


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_compiles_twice(name):
    argument, values, options = SCHEDULES[name]
    check_compilations(lambda i, w, t, v: lce(i, w, t, **{argument: v}, **options), values, most=2)


@pytest.mark.parametrize("name, device", [("z_loss", "cpu"), ("none", "cpu"), *(
    pytest.param(name, "cuda", marks=CUDA.marks) for name in ("num_items", "z_loss", "none"))])  # fmt: skip
def test_a_schedule_compiles_twice_through_inductor(name, device):
    argument, values, options = SCHEDULES["scale of none" if name == "none" else name]
    values = values[:4] if device == "cpu" else values
    call = lambda i, w, t, v: lce(i, w, t, **{argument: v}, **options)  # noqa: E731
    check_compilations(call, values, most=2, backend="inductor", device=device)


def test_all_at_once():
    def call(input, weight, target, v):
        numbers = {"scale": v, "softcap": 30 * v, "z_loss": v / 2, "label_smoothing": v / 3, "num_items": 9 * v}
        return lce(input, weight, target, **numbers)

    check_compilations(call, STEPS, most=2)
    check_compilations(lambda i, w, t, v: lce(i, w, t, num_items=v), (3, 4), most=2)


CONSTANT = ("z_loss", "scale", "softcap", "label_smoothing", "temperature", "num_items")


@pytest.mark.parametrize("name, learned", [*((n, False) for n in CONSTANT), ("scale", True), ("temperature", True)])
def test_tensors_compile_once(name, learned):
    values = [torch.tensor(v, requires_grad=learned) for v in STEPS[:5]]
    check_compilations(lambda i, w, t, v: lce(i, w, t, **{name: v}), values, most=1)


def test_two_calls_in_one_graph_of_symbols():
    def both(input, weight, target):
        return lce(input, weight, target, z_loss=0.1) + lce(input, weight, target, temperature=0.5)

    input, weight, _, target = head()
    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(input, weight, target), both(input, weight, target))


def test_temperatures_of_rows_compile_once():
    values = [torch.rand(9) + 0.5 for _ in range(3)]
    check_compilations(lambda i, w, t, v: lce(i, w, t, temperature=v, reduction="none"), values, most=1)


def test_module_autocast_and_no_grad():
    model = logitless.LinearCrossEntropyLoss(6, 13, bias=True)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    input, _, _, target = head()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(input, target), model(input, target))
    with torch.no_grad():
        assert torch.equal(compiled(input, target), model(input, target))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("gradient", ["exact", "always-sparsified"])
def test_autocast_compiled(device, gradient, dtypes):
    input, weight, _, target = head(device=device)
    weight = weight.detach().to(dtypes[1]).requires_grad_()

    def step(input, weight, target, seed):
        with torch.autocast(device, dtype=torch.bfloat16):
            return lce(input, weight, target, gradient=gradient, seed=seed)

    seed = None if gradient == "exact" else 3
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    losses = [f(input, weight, target, seed) for f in (compiled, step)]
    assert torch.equal(*losses)
    assert_same(*(torch.autograd.grad(loss, (input, weight)) for loss in losses))


def test_an_option_changes_no_schema():
    """PyTorch keeps compiled code on disk. A call's text names everything that is not a tensor or a number."""
    schemas = [str(getattr(torch.ops.logitless, name).default._schema) for name in ("run", "run_into")]
    assert schemas == [
        "logitless::run(Tensor[] tensors, float[] numbers, SymInt[] integers, str text) -> Tensor[]",
        "logitless::run_into(Tensor[] tensors, Tensor(a!) main_grad, float[] numbers, SymInt[] integers, str text) -> "
        "(Tensor d_hidden, Tensor d_bias, Tensor d_scale, Tensor d_temperature)",
    ]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_log_probs", "linear_top_k"])
def test_numbers_and_temperatures_of_rows_are_inputs_of_an_exported_graph(function, strict):
    class Loss(torch.nn.Module):
        def forward(self, input, weight, scale, temperature):
            given = {
                "linear_cross_entropy": torch.arange(3),
                "linear_log_probs": torch.arange(6).reshape(3, 2),
                "linear_top_k": 2,
            }[function]
            out = getattr(logitless, function)(input, weight, given, scale=scale, temperature=temperature)
            return out.log_probs if function == "linear_top_k" else out

    input, weight = torch.randn(3, 4), torch.randn(9, 4)
    for temperature in (torch.tensor([2.0]), torch.tensor([0.5, 1.0, 2.0])):
        program = torch.export.export(Loss(), (input, weight, torch.tensor(0.5), temperature), strict=strict)
        for factor in (1.0, 0.25):
            given = (input, weight, torch.tensor(0.5 * factor), temperature * factor)
            assert torch.equal(program.module()(*given), Loss()(*given))


def test_no_text_of_a_call_breaks_a_line():
    """PyTorch 2.11 writes texts into a comment of the code that it makes."""
    texts = []

    def compiler(graph, _):
        texts.extend(arg for node in graph.graph.nodes for arg in node.args if isinstance(arg, str))
        return make_boxed_func(graph.forward)

    input, weight, bias, target = head()
    torch.compile(lce, backend=aot_autograd(fw_compiler=compiler))(input, weight, target, bias=bias)
    assert texts and not any("\n" in text for text in texts)
