"""A main_grad has memory of its own, and PyTorch is told that it was written."""

import logitless
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from logitless.run import _meet, _region

N, D, V = 6, 5, 9


def bytes_of(tensor):
    """The addresses of all bytes, one by one."""
    found = {tensor.data_ptr()} if tensor.numel() else set()
    for stride, count in zip(tensor.stride(), tensor.shape):
        found = {place + i * stride * tensor.element_size() for place in found for i in range(count)}
    return {place + i for place in found for i in range(tensor.element_size())}


@st.composite
def views(draw, rank=st.integers(0, 3)):
    """Views of a flat buffer with any strides, which may go over themselves."""
    dtype = draw(st.sampled_from([torch.uint8, torch.float16, torch.float32]))
    shape = draw(st.lists(st.integers(0, 5), min_size=(n := draw(rank)), max_size=n))
    strides = draw(st.lists(st.integers(0, 12), min_size=n, max_size=n))
    return dtype, shape, strides, draw(st.integers(0, 120))


MEMORY = torch.zeros(4096, dtype=torch.uint8)


def view(described):
    dtype, shape, strides, start = described
    return MEMORY.view(dtype).as_strided(shape, strides, start)


@given(views(), views())
def test_shared_bytes_are_found(first, second):
    """All of them, and no others where at most one dimension leaves gaps."""
    a, b = view(first), view(second)
    regions = _region(a), _region(b)
    if None in regions:
        assert not bytes_of(a) or not bytes_of(b)
        return
    shared = bool(bytes_of(a) & bytes_of(b))
    assert _meet(*regions) == _meet(*reversed(regions))
    if shared or all(region.exact for region in regions):
        assert _meet(*regions) == shared


def arguments():
    return {
        "input": torch.randn(N, D),
        "linear_weight": torch.randn(V, D),
        "target": torch.randint(0, V, (N,)),
        "linear_bias": torch.randn(V),
        "weight": torch.rand(V),
        "token_weight": torch.rand(N),
        "temperature": torch.rand(N) + 0.5,
        "main_grad": torch.zeros(V, D),
    }


def steps(compiled):
    def step(given, **options):
        return logitless.linear_cross_entropy(**given, **options)

    return torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step


def overlapping(name):
    """Arguments of which that one shares its last element with the first of main_grad."""
    given = arguments()
    tensor = given[name]
    flat = torch.zeros(tensor.numel() + V * D - 1, dtype=torch.float32)
    place = flat[: tensor.numel()].view(tensor.shape)
    if not tensor.is_floating_point():
        flat = torch.zeros(2 * tensor.numel() + V * D - 1)
        place = flat[: 2 * tensor.numel()].view(torch.int64)
    given[name] = place.copy_(tensor)
    given["main_grad"] = flat[-V * D :].view(V, D)
    return given


NAMES = ("input", "linear_weight", "target", "linear_bias", "weight", "token_weight", "temperature")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", NAMES)
def test_shared_memory_is_refused_by_name(name, compiled):
    given = overlapping(name)
    before = {key: tensor.clone() for key, tensor in given.items()}
    leaf = given["linear_weight"].detach().requires_grad_()
    with pytest.raises(ValueError, match=f"main_grad: expected a buffer of its own, got one .* {name}$"):
        steps(compiled)(given | {"linear_weight": leaf}).backward()
    for key, tensor in before.items():
        assert torch.equal(given[key], tensor), key


def test_a_negated_view_is_refused():
    given = arguments()
    given["linear_weight"].requires_grad_()
    with pytest.raises(ValueError, match="main_grad: expected a buffer that holds its values"):
        logitless.linear_cross_entropy(**given | {"main_grad": torch._neg_view(given["main_grad"])})


def test_an_upstream_gradient_in_main_grad_is_refused():
    given = arguments()
    given["linear_weight"].requires_grad_()
    loss = logitless.linear_cross_entropy(**given, reduction="none")
    with pytest.raises(ValueError, match="shares memory with grad_loss"):
        loss.backward(given["main_grad"].view(-1)[3 : 3 + N])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("of", ["input", "linear_weight"])
@pytest.mark.parametrize("rows", ["interleaved", "twice as far apart"])
def test_rows_between_rows_are_memory_of_its_own(rows, of, compiled):
    given = arguments()
    count = given[of].shape[0]
    flat = torch.zeros(max(V, 2 * count), 2 * D)
    place = flat[:count, :D] if rows == "interleaved" else flat[: 2 * count : 2, :D]
    given[of] = place.copy_(given[of])
    given["main_grad"] = flat[:V, D:]
    leaf = given["linear_weight"].detach().requires_grad_()
    steps(compiled)(given | {"linear_weight": leaf}).backward()
    own = leaf.detach().clone().requires_grad_()
    logitless.linear_cross_entropy(**given | {"linear_weight": own, "main_grad": None}).backward()
    torch.testing.assert_close(given["main_grad"], own.grad)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("how", ["eager", "compiled", "watched"])
def test_a_backward_pass_is_a_write_to_pytorch(how, reduction):
    given = arguments()
    leaf = given["linear_weight"].requires_grad_()
    main_grad = given["main_grad"]
    square = (torch.ones(V, D, requires_grad=True) * main_grad).sum()  # saves main_grad
    version = main_grad._version

    def step():
        loss = steps(how == "compiled")(given, reduction=reduction)
        assert main_grad._version == version
        loss.sum().backward()

    if how == "watched":
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False):
            step()
    else:
        step()
    assert main_grad._version > version and bool(main_grad.any()) and leaf.grad is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_a_backward_pass_that_leads_elsewhere_writes_nothing():
    given = arguments()
    given["input"].requires_grad_(), given["linear_weight"].requires_grad_()
    loss = logitless.linear_cross_entropy(**given)
    version = given["main_grad"]._version
    torch.autograd.grad(loss, given["input"])
    assert given["main_grad"]._version == version and not given["main_grad"].any()


def test_an_inference_tensor_has_no_version():
    given = arguments()
    with torch.inference_mode():
        given["main_grad"] = torch.zeros(V, D)
    given["linear_weight"].requires_grad_()
    logitless.linear_cross_entropy(**given).backward()
    assert bool(given["main_grad"].any())
