"""PyTorch's tools have the same effect on every differentiable call as on PyTorch's own functions."""

import itertools

import pytest
import torch
from calls import CALLS, LOSSES, SPARSIFIED, Tensors
from support import CUDA, Recorder, assert_same
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")
EVERY = CALLS | SPARSIFIED
every_call = pytest.mark.parametrize("name", EVERY)
# CUDA runs the losses and statistics only.
on_devices = pytest.mark.parametrize(
    "name, device", [(name, "cpu") for name in EVERY] + [pytest.param(n, "cuda", marks=CUDA.marks) for n in LOSSES]
)


def prepared(name, dtype=torch.float32, device="cpu", tokens=9):
    """Returns a function of leaves, and the leaves."""
    call, tensors = EVERY[name], Tensors(tokens, dtype, device)
    return lambda *leaves: call.function(tensors, *leaves), call.leaves(tensors)


def upstream_of(out):
    return torch.linspace(0.5, 2, out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape)


def run(function, leaves, **options):
    """Returns the value, and the gradients of all leaves."""
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream_of(out), **options)]


@pytest.mark.parametrize(
    "name, device", [(name, "cpu") for name in CALLS] + [pytest.param(n, "cuda", marks=CUDA.marks) for n in LOSSES]
)
def test_gradcheck(name, device):
    assert torch.autograd.gradcheck(*prepared(name, torch.float64, device))


@on_devices
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(name, device, reentrant):
    function, leaves = prepared(name, device=device)
    expected = run(function, leaves)
    out = checkpoint(function, *leaves, use_reentrant=reentrant)
    out.backward(upstream_of(out))
    assert_same([out.detach(), *(leaf.grad for leaf in leaves)], expected)


@every_call
@pytest.mark.parametrize("size", [1.0, 3.0])
def test_retained_graph(name, size):
    """Gradients are changed in place: they must not share memory with what the graph saved."""
    function, leaves = prepared(name)
    out = function(*leaves)
    upstream = torch.full_like(out, size)
    expected = torch.autograd.grad(function(*leaves), leaves, upstream)
    for gradient in torch.autograd.grad(out, leaves, upstream, retain_graph=True):
        gradient.zero_()
    for times in (1, 2, 3):
        out.backward(upstream, retain_graph=times < 3)
        for leaf, e in zip(leaves, expected):
            torch.testing.assert_close(leaf.grad, times * e)
            assert times > 1 or torch.equal(leaf.grad, e)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(upstream)


def by_grad(out, leaves, batch):
    return torch.autograd.grad(out, leaves, batch, is_grads_batched=True, retain_graph=True)


def by_vmap(out, leaves, batch):
    return torch.vmap(lambda upstream: torch.autograd.grad(out, leaves, upstream, retain_graph=True))(batch)


@on_devices
@pytest.mark.parametrize("batched", [by_grad, by_vmap])
def test_batch_of_upstream_gradients(name, device, batched):
    function, leaves = prepared(name, device=device)
    out = function(*leaves)
    batch = torch.randn(3, *out.shape, device=device)
    one_by_one = [torch.autograd.grad(out, leaves, upstream, retain_graph=True) for upstream in batch]
    for together, alone in zip(batched(out, leaves, batch), zip(*one_by_one)):
        torch.testing.assert_close(together, torch.stack(alone))


@every_call
def test_double_backward_is_refused(name):
    function, leaves = prepared(name)
    with pytest.raises(NotImplementedError, match="linear_.*: double backward is not supported"):
        torch.autograd.grad(function(*leaves).sum(), leaves[0], create_graph=True)


@every_call
def test_each_subset_of_the_gradients(name):
    function, leaves = prepared(name)
    _, *expected = run(function, leaves)
    for wanted in itertools.product((False, True), repeat=len(leaves)):
        given = [leaf.detach().requires_grad_(is_wanted) for leaf, is_wanted in zip(leaves, wanted)]
        out = function(*given)
        assert out.requires_grad == any(wanted)
        if any(wanted):
            out.backward(upstream_of(out))
        for leaf, is_wanted, e in zip(given, wanted, expected):
            assert (leaf.grad is not None) == is_wanted
            assert not is_wanted or torch.allclose(leaf.grad, e, rtol=1e-5, atol=1e-6)


@every_call
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(name, dtype):
    """Operands are rounded to the dtype, and their gradients are not rounded further. A bias is not an operand."""
    if name == "screened" and dtype == torch.float16:
        pytest.skip("float16 gradients come after the loss, and those of a screen with it")
    call, tensors, short = EVERY[name], Tensors(dtype=torch.float32), Tensors(dtype=torch.float32)
    short.teacher_hidden, short.teacher_weight = short.teacher_hidden.to(dtype), short.teacher_weight.to(dtype)
    leaves = call.leaves(tensors)
    rounded = [
        leaf.detach().to(dtype if place < 2 else leaf.dtype).requires_grad_() for place, leaf in enumerate(leaves)
    ]
    with torch.autocast("cpu", dtype=dtype):
        out = call.function(tensors, *leaves)
    expected = call.function(short, *rounded)
    assert out.dtype == torch.float32 and torch.equal(out, expected)
    out.backward(upstream_of(out)), expected.backward(upstream_of(expected))
    for leaf, other in zip(leaves, rounded):
        error, size = (leaf.grad - other.grad.float()).norm(), other.grad.float().norm()
        assert leaf.grad.dtype == leaf.dtype and error <= torch.finfo(dtype).eps * size


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, device, dtype",
    [(name, "cpu", torch.float32) for name in EVERY]
    + [(name, "cpu", torch.bfloat16) for name in LOSSES]
    + [pytest.param(n, "cuda", d, marks=CUDA.marks) for n in ("mean", "none") for d in (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_compiled_is_bitwise_eager(name, device, dtype):
    """One graph serves all lengths. aot_eager traces as inductor does, and leaves the other operators unchanged."""
    call = EVERY[name]

    def eager(tensors, input, *leaves):
        return call.function(tensors, torch.relu(input), *leaves)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend=counter)
    lengths = (5, 9, 4, 17)
    for tokens in lengths:
        tensors = Tensors(tokens, dtype, device)
        leaves = call.leaves(tensors)
        assert_same(*(run(lambda *given: f(tensors, *given), leaves) for f in (compiled, eager)))  # noqa: B023
    # The planner gives the bytes of kept draws, so a graph has one length.
    assert counter.frame_count <= (2 if name != "sparsified none" else len(lengths) + 1)


@every_call
def test_operators_give_the_same_bits(name):
    """Calls with and without operators agree; a mode may see the forward pass, the backward pass, or both."""
    function, leaves = prepared(name)
    expected = run(function, leaves)
    for forward, backward in ((True, False), (False, True), (True, True)):
        for called in (function, lambda *given: checkpoint(function, *given, use_reentrant=False)):
            with (mode := Recorder()) if forward else torch.device("cpu"):
                out = called(*leaves)
            assert not forward or mode.names
            with Recorder() if backward else torch.device("cpu"):
                gradients = torch.autograd.grad(out, leaves, upstream_of(out))
            assert_same([out.detach(), *gradients], expected)


@pytest.mark.slow
@every_call
def test_opcheck(name):
    function, leaves = prepared(name)
    with Recorder() as recorder:
        run(function, leaves)
    assert recorder.calls
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    for operator, arguments, options in recorder.calls:
        arguments = tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
        # The tensor of draws has bytes that nothing writes, so two runs cannot be compared.
        more = [] if name in SPARSIFIED else ["test_aot_dispatch_dynamic"]
        torch.library.opcheck(operator, arguments, options, test_utils=utils + more)


PACKS = {
    "as arrays": (lambda t: t.detach().numpy().copy(), lambda a: torch.from_numpy(a)),
    "by an element": (lambda t: t.detach(), lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)),
    "strided": (lambda t: t.detach(), lambda t: torch.stack([t, t], -1)[..., 0]),
    "columns": (lambda t: t.detach(), lambda t: t.t().contiguous().t() if t.dim() == 2 else t),
}


@every_call
def test_saved_tensors_come_back_in_other_layouts(name):
    function, (input, *leaves) = prepared(name)
    wide = torch.cat([input, input], 1).detach()[:, : input.shape[1]].requires_grad_()  # rows with a stride
    expected = run(function, [wide, *leaves])
    # One list for all rows is multiplied by PyTorch, whose sums depend on the layout on some processors.
    same = torch.testing.assert_close if name == "one list of candidates" else assert_same
    for hooks in [torch.autograd.graph.saved_tensors_hooks(*pair) for pair in PACKS.values()]:
        with hooks:
            same(run(function, [wide, *leaves]), expected)
    with torch.autograd.graph.save_on_cpu():
        same(run(function, [wide, *leaves]), expected)
