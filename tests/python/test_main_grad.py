"""A main_grad has its own memory, and PyTorch learns that it was written."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support import Recorder, head, lce
from torch.utils.flop_counter import FlopCounterMode

N, D, V = 6, 5, 9
COMPILED = pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)


def bytes_of(tensor):
    """Returns the addresses of all bytes, one by one."""
    places = {tensor.data_ptr()} if tensor.numel() else set()
    for stride, count in zip(tensor.stride(), tensor.shape):
        places = {place + i * stride * tensor.element_size() for place in places for i in range(count)}
    return {place + i for place in places for i in range(tensor.element_size())}


@given(st.integers(0, 60), st.integers(D, 12), st.integers(0, 140), st.integers(0, 12), st.integers(0, 12))
def test_shared_bytes_are_found(own_start, own_stride, start, row_stride, stride):
    """It finds all shared bytes, and no others if at most one dimension leaves gaps."""
    memory = torch.zeros(320)
    main_grad = memory.as_strided((V, D), (own_stride, 1), own_start)
    input = memory.as_strided((N, D), (row_stride, stride), start)
    shared = bool(bytes_of(main_grad) & bytes_of(input))
    is_exact = stride == 1 and row_stride >= D
    weight = torch.randn(V, D, requires_grad=True)
    try:
        lce(input, weight, torch.zeros(N, dtype=torch.int64), main_grad=main_grad)
    except ValueError as error:
        assert "main_grad: expected a buffer of its own" in str(error) and (shared or not is_exact)
    else:
        assert not shared


def arguments(*trained):
    given = {
        "hidden": torch.randn(N, D),
        "weight": torch.randn(V, D),
        "targets": torch.randint(0, V, (N,)),
        "bias": torch.randn(V),
        "class_weight": torch.rand(V),
        "token_weight": torch.rand(N),
        "temperature": torch.rand(N) + 0.5,
        "main_grad": torch.zeros(V, D),
    }
    for name in trained:
        given[name].requires_grad_()
    return given


def steps(compiled):
    def step(given, **options):
        return lce(**given, **options)

    return torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step


def overlapping(name):
    """Returns arguments; the chosen one shares its last element with the first of main_grad."""
    given = arguments()
    tensor = given[name]
    words = tensor.nbytes // 4
    flat = torch.zeros(words + V * D - 1)
    given[name] = flat[:words].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    given["main_grad"] = flat[-V * D :].view(V, D)
    return given


NAMES = ("hidden", "weight", "targets", "bias", "class_weight", "token_weight", "temperature")


@COMPILED
@pytest.mark.parametrize("name", NAMES)
def test_shared_memory_is_refused_by_name(name, compiled):
    given = overlapping(name)
    before = {key: tensor.clone() for key, tensor in given.items()}
    leaf = given["weight"].detach().requires_grad_()
    with pytest.raises(ValueError, match=f"main_grad: expected a buffer of its own, got one .* {name}$"):
        steps(compiled)(given | {"weight": leaf}).backward()
    for key, tensor in before.items():
        assert torch.equal(given[key], tensor), key


def test_a_negated_view_is_refused():
    given = arguments("weight")
    with pytest.raises(ValueError, match="main_grad: expected a buffer that holds its values"):
        lce(**given | {"main_grad": torch._neg_view(given["main_grad"])})


def test_an_upstream_gradient_in_main_grad_is_refused():
    given = arguments("weight")
    loss = lce(**given, reduction="none")
    with pytest.raises(ValueError, match="shares memory with grad_loss"):
        loss.backward(given["main_grad"].view(-1)[3 : 3 + N])


@COMPILED
@pytest.mark.parametrize("of", ["hidden", "weight"])
@pytest.mark.parametrize("rows", ["interleaved", "twice as far apart"])
def test_rows_between_rows_are_memory_of_its_own(rows, of, compiled):
    given = arguments()
    count = given[of].shape[0]
    flat = torch.zeros(max(V, 2 * count), 2 * D)
    place = flat[:count, :D] if rows == "interleaved" else flat[: 2 * count : 2, :D]
    given[of] = place.copy_(given[of])
    given["main_grad"] = flat[:V, D:]
    leaf = given["weight"].detach().requires_grad_()
    steps(compiled)(given | {"weight": leaf}).backward()
    own = leaf.detach().clone().requires_grad_()
    lce(**given | {"weight": own, "main_grad": None}).backward()
    torch.testing.assert_close(given["main_grad"], own.grad)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=pytest.mark.slow), "watched"])
def test_a_backward_pass_is_a_write_to_pytorch(how, reduction):
    given = arguments("weight")
    leaf, main_grad = given["weight"], given["main_grad"]
    square = (torch.ones(V, D, requires_grad=True) * main_grad).sum()  # saves main_grad
    version = main_grad._version

    def step():
        loss = steps(how == "compiled")(given, reduction=reduction)
        assert main_grad._version == version
        loss.sum().backward()

    with FlopCounterMode(display=False) if how == "watched" else contextlib.nullcontext():
        step()
    assert main_grad._version > version and bool(main_grad.any()) and leaf.grad is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_a_backward_pass_that_leads_elsewhere_writes_nothing():
    given = arguments("hidden", "weight")
    loss = lce(**given)
    version = given["main_grad"]._version
    torch.autograd.grad(loss, given["hidden"])
    assert given["main_grad"]._version == version and not given["main_grad"].any()


def test_an_inference_tensor_has_no_version():
    given = arguments("weight")
    with torch.inference_mode():
        given["main_grad"] = torch.zeros(V, D)
    lce(**given).backward()
    assert bool(given["main_grad"].any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_is_added_to_in_each_backward_pass(reduction, dtype):
    input, weight, bias, target = head(dtype=dtype)
    start = torch.randn(13, 6)
    main_grad = torch.cat([start, start], 1)[:, :6]  # rows with a stride
    loss = 3 * lce(input, weight, target, bias=bias, reduction=reduction, main_grad=main_grad).sum()
    assert torch.equal(main_grad, start)
    loss.backward(retain_graph=True)
    assert weight.grad is None and input.grad is not None and bias.grad is not None
    plain = [t.detach().double() for t in (input, weight, bias)]
    plain[1].requires_grad_()
    expected = 3 * lce(plain[0], plain[1], target, bias=plain[2], reduction=reduction).sum()
    once = torch.autograd.grad(expected, plain[1])[0]
    # The exponentials of bfloat16 inputs are kept in bfloat16; those of float32 have the error of their logits.
    logits = F.linear(*plain)[1:].detach()
    spread = 1.0 if dtype == torch.bfloat16 else 4 + logits.abs().max()
    dz = spread * torch.softmax(logits, -1) + F.one_hot(target[1:], 13)
    upstream = 3 / (8 if reduction == "mean" else 1)
    bound = torch.finfo(dtype).eps * upstream * dz.T @ plain[0][1:].abs() + torch.finfo(torch.float32).eps * 8
    assert ((main_grad - start - once).abs() <= bound).all()
    loss.backward()  # adds exactly once more
    assert ((main_grad - start - 2 * once).abs() <= 2 * bound).all()


@pytest.mark.parametrize("several", [False, True])
def test_interleaved_microbatches(several):
    input, weight, _, target = head()
    options = {"target_weight": torch.rand(9, 2)} if several else {}
    target = torch.stack([target, target], 1) if several else target
    main_grad = torch.zeros(13, 6)
    losses = [lce(input * k, weight, target, main_grad=main_grad, **options) for k in (1, 2)]
    for loss in losses:
        loss.backward()
    expected = sum(torch.autograd.grad(lce(input * k, weight, target, **options), weight)[0] for k in (1, 2))
    torch.testing.assert_close(main_grad, expected)


def test_a_frozen_weight_leaves_it_alone():
    input, weight, _, target = head()
    main_grad = torch.zeros(13, 6)
    lce(input, weight.detach(), target, main_grad=main_grad).backward()
    assert (main_grad == 0).all() and input.grad is not None


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("leaf", [True, False])
def test_it_is_added_to_where_the_weight_is_asked_for_only(leaf, operators):
    def backward(run):
        input, weight, _, target = head()
        main_grad = torch.zeros(13, 6)
        with Recorder() if operators else torch.device("cpu"):
            loss = lce(input, weight if leaf else 2 * weight, target, main_grad=main_grad)
        run(loss, input, weight)
        return bool(main_grad.any())

    assert not backward(lambda loss, input, weight: torch.autograd.grad(loss, input))
    assert not backward(lambda loss, input, weight: loss.backward(inputs=[input]))
    assert backward(lambda loss, input, weight: loss.backward())
    assert backward(lambda loss, input, weight: loss.backward(inputs=[weight]))
    assert backward(lambda loss, input, weight: torch.autograd.grad(loss, weight, allow_unused=True))
    assert backward(lambda loss, input, weight: torch.autograd.grad(loss, (input, weight), allow_unused=True))


def test_a_batch_of_upstream_gradients_is_refused():
    input, weight, _, target = head()
    loss = lce(input, weight, target, main_grad=torch.zeros(13, 6))
    message = "main_grad: expected None with a batch of upstream gradients"
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.grad(loss, input, torch.ones(3), is_grads_batched=True, retain_graph=True)
    with pytest.raises(NotImplementedError, match=message):
        torch.vmap(lambda upstream: torch.autograd.grad(loss, input, upstream, retain_graph=True))(torch.ones(3))
