"""torch.compile(fullgraph=True, dynamic=True): the same bits as eager, forward and backward."""

import logitless
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

lce = logitless.linear_cross_entropy
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

CASES = {
    "mean": {},
    "sum": {"reduction": "sum", "label_smoothing": 0.1},
    "none": {"reduction": "none", "softcap": 5.0},
    "shift": {"shift": 1, "z_loss": 0.01},
    "stats": {"return_stats": True},
    "detached": {"return_stats": True, "differentiable_stats": False},
    "class_weight": {"weight": torch.rand(23)},
    "num_items": {"num_items": 7.0},
}


def tensors(tokens, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    input = torch.randn(2, tokens, 8, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(23, 8, generator=g).to(dtype).requires_grad_()
    bias = torch.randn(23, generator=g).to(dtype).requires_grad_()
    target = torch.randint(0, 23, (2, tokens), generator=g)
    target[0, 0] = -100
    return input, weight, bias, target


def function(options):
    def loss(input, weight, bias, target):
        hidden = torch.relu(input)
        out = lce(hidden, weight, target, linear_bias=bias, **options)
        if not isinstance(out, tuple):
            return out, ()
        scalar = out.loss.mean()
        if options.get("differentiable_stats", True):
            scalar = scalar + out.lse.mean() - 0.5 * out.entropy.mean()
        return scalar, (out.nll, out.argmax, out.correct_count, out.valid_count)

    return loss


def results(f, arguments, factor):
    loss, stats = f(*arguments)
    gradients = torch.autograd.grad(factor * loss.sum(), arguments[:3])
    return [loss, *stats, *gradients]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_as_eager(name, dtype):
    eager = function(CASES[name])
    # aot_eager traces forward and backward as inductor does, and leaves the other operators as they are
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens, factor in ((5, 1.0), (9, 0.3), (3, 2.0)):
        arguments = tensors(tokens, dtype)
        for c, e in zip(results(compiled, arguments, factor), results(eager, arguments, factor)):
            assert torch.equal(c, e)


@pytest.mark.parametrize("name", ["mean", "none"])
def test_same_bits_through_inductor(name):
    eager = lambda *arguments: (lce(*arguments[:2], arguments[3], linear_bias=arguments[2], **CASES[name]), ())  # noqa: E731
    compiled = torch.compile(eager, fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        arguments = tensors(tokens)
        for c, e in zip(results(compiled, arguments, 1.0), results(eager, arguments, 1.0)):
            assert torch.equal(c, e)


def test_one_graph_for_all_lengths():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function({"shift": 1}), fullgraph=True, dynamic=True, backend=counter)
    compiled(*tensors(5))
    compilations = counter.frame_count
    for tokens in (9, 17, 4):
        compiled(*tensors(tokens))
    assert counter.frame_count == compilations


def test_num_items_tensor_does_not_break_the_graph():
    def eager(input, weight, target, items):
        return lce(input, weight, target, num_items=items)

    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
    input, weight, _, target = tensors(6)
    for items in (3, 8):
        assert torch.equal(
            compiled(input, weight, target, torch.tensor(items)), lce(input, weight, target, num_items=items)
        )


def test_module_autocast_and_no_grad():
    model = logitless.LinearCrossEntropyLoss(8, 23, bias=True)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    input, _, _, target = tensors(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(input, target), model(input, target))
    with torch.no_grad():
        assert torch.equal(compiled(input, target), model(input, target))


def test_main_grad():
    def eager(input, weight, target, main_grad):
        return lce(input, weight, target, main_grad=main_grad)

    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
    input, weight, _, target = tensors(6)
    buffers = torch.zeros(23, 8), torch.zeros(23, 8)
    for f, buffer in zip((eager, compiled), buffers):
        (2 * f(input, weight, target, buffer)).backward()
    assert weight.grad is None
    assert torch.equal(*buffers) and (buffers[0] != 0).any()


def test_errors_name_the_argument():
    compiled = torch.compile(lce, fullgraph=True, dynamic=True, backend="aot_eager")
    input, weight, _, target = tensors(6)
    target[1, 2] = 23
    with pytest.raises(logitless.InvalidTargetError, match=r"target: .* got 23 at target\[1, 2\]"):
        compiled(input, weight, target)


def test_an_option_changes_no_schema():
    """PyTorch keeps compiled code on disk. All that is no tensor and no number has a name in the text of a call."""
    schemas = [str(getattr(torch.ops.logitless, name).default._schema) for name in ("run", "run_into")]
    assert schemas == [
        "logitless::run(Tensor[] tensors, float[] numbers, SymInt[] integers, str text) -> Tensor[]",
        "logitless::run_into(Tensor[] tensors, Tensor(a!) main_grad, float[] numbers, SymInt[] integers, str text) -> "
        "(Tensor d_hidden, Tensor d_bias, Tensor d_scale, Tensor d_temperature)",
    ]


def test_no_text_of_a_call_breaks_a_line():
    """PyTorch 2.11 writes texts into a comment of the code that it makes."""
    texts = []

    def compiler(graph, _):
        texts.extend(arg for node in graph.graph.nodes for arg in node.args if isinstance(arg, str))
        return make_boxed_func(graph.forward)

    input, weight, bias, target = tensors(6)
    torch.compile(lce, backend=aot_autograd(fw_compiler=compiler))(input, weight, target, linear_bias=bias)
    assert texts and not any("\n" in text for text in texts)
