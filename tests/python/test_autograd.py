"""How the operators behave under PyTorch's autograd and its tools."""

import copy
import threading

import logitless
import pytest
import torch
import torch.nn.functional as F
from logitless import autograd, run
from logitless import options as _options
from logitless.options import Flags
from torch.utils.checkpoint import checkpoint

lce = logitless.linear_cross_entropy


def head(tokens=9, vocab=13, hidden=6, dtype=torch.float32):
    input = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, hidden, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocab, dtype=dtype, requires_grad=True)
    target = torch.randint(0, vocab, (tokens,))
    target[0] = -100
    return input, weight, bias, target


class Passes:
    """Records which passes run, and the gradients that each of them makes."""

    NAMES = {_options.FORWARD: "forward", _options.BACKWARD: "backward", _options.FORWARD_BACKWARD: "forward_backward"}

    def __init__(self, monkeypatch):
        self.names = []
        original = run.Run.__call__

        def call(run, tensors):
            flags = run.asked.flags._asdict()
            self.names.append(
                (self.NAMES[run.asked.kind], tuple(k for k in sorted(flags) if "want_d_" in k and flags[k]))
            )
            return original(run, tensors)

        monkeypatch.setattr(run.Run, "__call__", call)


@pytest.fixture
def passes(monkeypatch):
    return Passes(monkeypatch)


OPTIONS = [
    {},
    {"reduction": "sum", "softcap": 3.0},
    {"reduction": "none", "label_smoothing": 0.2},
    {"z_loss": 0.1, "scale": 0.5},
    {"shift": 2, "weight": torch.rand(13, dtype=torch.float64)},
    {"token_weight": torch.rand(9, dtype=torch.float64), "num_items": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=[" ".join(o) or "plain" for o in OPTIONS])
def test_gradcheck(options):
    input, weight, bias, target = head(dtype=torch.float64)

    def loss(input, weight, bias):
        return lce(input, weight, target, linear_bias=bias, **options)

    assert torch.autograd.gradcheck(loss, (input, weight, bias))


@pytest.mark.parametrize("name", ["nll", "lse", "entropy"])
def test_gradcheck_of_statistics(name):
    input, weight, bias, target = head(dtype=torch.float64)

    def stat(input, weight, bias):
        return getattr(lce(input, weight, target, linear_bias=bias, return_stats=[name]), name)

    assert torch.autograd.gradcheck(stat, (input, weight, bias))


def test_gradients_are_computed_with_a_reduced_loss(passes):
    input, weight, _, target = head()
    lce(input, weight, target, return_stats=["argmax", "valid_count"]).loss.backward()
    assert [name for name, _ in passes.names] == ["forward_backward"]
    passes.names.clear()
    out = lce(input, weight, target, return_stats=True, differentiable_stats=False)
    assert not out.nll.requires_grad and not out.entropy.requires_grad and out.loss.requires_grad
    assert [name for name, _ in passes.names] == ["forward_backward"]


def test_no_gradient_mode_computes_no_gradient(passes):
    input, weight, _, target = head()
    with torch.no_grad():
        assert not lce(input, weight, target).requires_grad
    with torch.inference_mode():
        lce(input, weight, target)
    lce(input.detach(), weight.detach(), target)
    assert [name for name, _ in passes.names] == ["forward"] * 3


@pytest.mark.parametrize("reduction, op", [("mean", "forward_backward"), ("none", "backward")])
def test_frozen_tensors_have_no_gradient_computed(passes, reduction, op):
    input, weight, bias, target = head()
    names = ("want_d_hidden", "want_d_weight", "want_d_bias")
    tensors = (input, weight, bias)
    for trained in ((0,), (1,), (2,), (0, 2), (1, 2)):
        passes.names.clear()
        given = [t if i in trained else t.detach() for i, t in enumerate(tensors)]
        loss = lce(given[0], given[1], target, linear_bias=given[2], reduction=reduction).sum()
        found = torch.autograd.grad(loss, [tensors[i] for i in trained])
        assert (op, tuple(sorted(names[i] for i in trained))) in passes.names
        expected = F.cross_entropy(F.linear(*given), target, reduction=reduction).sum()
        for g, e in zip(found, torch.autograd.grad(expected, [tensors[i] for i in trained])):
            torch.testing.assert_close(g, e)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_retain_graph(reduction, upstream):
    input, weight, _, target = head()
    loss = lce(input, weight, target, reduction=reduction).sum() * upstream
    for times in (1, 2, 3):  # .grad is added to in place: it must not share memory with what the graph saved
        loss.backward(retain_graph=True)
        expected = torch.autograd.grad(upstream * lce(input, weight, target, reduction=reduction).sum(), weight)[0]
        torch.testing.assert_close(weight.grad, times * expected)
    loss.backward()
    torch.testing.assert_close(weight.grad, 4 * expected)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_zeroed_in_place_between_backward_passes():
    input, weight, _, target = head()
    loss = lce(input, weight, target)
    loss.backward(retain_graph=True)
    first = weight.grad.clone()
    weight.grad.zero_()
    loss.backward()
    assert torch.equal(weight.grad, first)


def test_double_backward_is_refused():
    input, weight, _, target = head()
    for reduction in ("mean", "none"):
        loss = lce(input, weight, target, reduction=reduction).sum()
        with pytest.raises(NotImplementedError, match="double backward is not supported"):
            torch.autograd.grad(loss, input, create_graph=True)


def test_forward_mode_is_refused():
    input, weight, _, target = head()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(input.detach(), torch.ones_like(input))
        with pytest.raises(NotImplementedError, match="input: .* forward-mode"):
            lce(dual, weight.detach(), target)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_function_transforms_are_refused(transform):
    input, weight, _, target = (t.detach() for t in head())

    def loss(x):
        return lce(x, weight, target)

    with pytest.raises(NotImplementedError, match="input: .*torch.func"):
        if transform == "vmap":
            torch.func.vmap(loss)(torch.stack([input, input]))
        elif transform == "grad":
            torch.func.grad(loss)(input)
        else:
            torch.func.jvp(loss, (input,), (input,))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_checkpoint(reentrant, reduction):
    input, weight, bias, target = head()
    body = torch.nn.Linear(6, 6)

    def loss(x):
        return lce(body(x), weight, target, linear_bias=bias, reduction=reduction).sum()

    expected = torch.autograd.grad(loss(input), (input, weight, bias))
    checkpoint(loss, input, use_reentrant=reentrant).backward()
    for tensor, e in zip((input, weight, bias), expected):
        assert torch.equal(tensor.grad, e)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tied_weights(reduction):
    embedding = torch.nn.Embedding(13, 6)
    model = logitless.LinearCrossEntropyLoss(6, 13, reduction=reduction)
    model.linear.weight = embedding.weight
    tokens = torch.randint(0, 13, (9,))
    model(embedding(tokens), tokens.roll(-1)).sum().backward()
    found = embedding.weight.grad.clone()
    embedding.weight.grad = None
    logits = F.linear(embedding(tokens), embedding.weight)
    F.cross_entropy(logits, tokens.roll(-1), reduction=reduction).sum().backward()
    torch.testing.assert_close(found, embedding.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_main_grad(reduction, dtype):
    input, weight, bias, target = head(dtype=dtype)
    start = torch.randn(13, 6)
    main_grad = torch.cat([start, start], 1)[:, :6]  # rows with a stride
    assert not main_grad.is_contiguous()
    loss = 3 * lce(input, weight, target, linear_bias=bias, reduction=reduction, main_grad=main_grad).sum()
    assert torch.equal(main_grad, start)
    loss.backward(retain_graph=True)
    assert weight.grad is None and input.grad is not None and bias.grad is not None
    plain = [t.detach().double() for t in (input, weight, bias)]
    plain[1].requires_grad_()
    expected = 3 * lce(plain[0], plain[1], target, linear_bias=plain[2], reduction=reduction).sum()
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


def test_main_grad_of_interleaved_microbatches():
    input, weight, _, target = head()
    main_grad = torch.zeros(13, 6)
    losses = [lce(input * k, weight, target, main_grad=main_grad) for k in (1, 2)]
    for loss in losses:
        loss.backward()
    expected = sum(torch.autograd.grad(lce(input * k, weight, target), weight)[0] for k in (1, 2))
    torch.testing.assert_close(main_grad, expected)


def test_main_grad_of_a_frozen_weight_is_left_alone():
    input, weight, _, target = head()
    main_grad = torch.zeros(13, 6)
    lce(input, weight.detach(), target, main_grad=main_grad).backward()
    assert (main_grad == 0).all() and input.grad is not None


def test_small_float16_gradients_do_not_underflow():
    """float16 keeps nothing below 6e-8: the loss scale must be applied before rounding."""
    input, weight, _, target = head(dtype=torch.float16)
    loss = lce(input, weight, target, num_items=1e7)
    found = torch.autograd.grad(loss * 1e7, weight)[0]
    expected = torch.autograd.grad(lce(input, weight, target, reduction="sum"), weight)[0]
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast(reduction, dtype):
    input, weight, _, target = head()
    with torch.autocast("cpu", dtype=dtype):
        loss = lce(input, weight, target, reduction=reduction)
    cast = [t.detach().to(dtype).requires_grad_() for t in (input, weight)]
    expected = lce(*cast, target, reduction=reduction)
    assert loss.dtype == torch.float32 and torch.equal(loss, expected)
    loss.sum().backward()
    expected.sum().backward()
    assert input.grad.dtype == weight.grad.dtype == torch.float32
    for tensor, short in zip((input, weight), cast):  # which is rounded once more
        torch.testing.assert_close(tensor.grad, short.grad.float(), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_autocast_leaves_float64_alone():
    input, weight, _, target = head(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lce(input, weight, target), lce(input, weight, target).double())


def test_threads_of_python_and_numbers_of_threads():
    input, weight, bias, target = head(tokens=300, vocab=500, hidden=40)

    def run():
        loss = lce(input, weight, target, linear_bias=bias)
        return (loss.detach(), *torch.autograd.grad(loss, (input, weight, bias)))

    expected = run()
    results = []
    workers = [threading.Thread(target=lambda: results.append(run())) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.set_num_threads(1)
    results.append(run())
    assert len(results) == 5
    for result in results:
        assert all(torch.equal(r, e) for r, e in zip(result, expected))


@pytest.mark.parametrize("gradient", ["exact", "thinned"])
def test_opcheck(gradient):
    input, weight, bias, target = (tensor.detach() for tensor in head())
    thinned = gradient == "thinned"
    options = dict(reduction="mean", ignore_index=-100, numbers=[0.1, 1.0, 0.0, 1.0, 0.0, float("nan"), 0.1])
    options |= dict(shift=0, sequence_length=9, max_workspace_bytes=0, gradient=gradient, compute_dtype=0)
    options |= dict(batch_invariant=False, top_k=0)
    stats = Flags(stats=("nll", "lse", "entropy", "argmax"))
    wants = Flags(want_d_hidden=True, want_d_weight=True, want_d_bias=True, want_d_scale=True, want_d_temperature=True)
    tensors = {"hidden": input, "classifier": weight, "targets": target, "bias": bias}
    tensors |= {"learned_scale": torch.tensor(2.0), "learned_temperature": torch.tensor(0.5)}
    tensors |= {"numbers": torch.tensor([0.1, 2.0, 0.0, 0.5, 0.0, float("nan"), 0.1], dtype=torch.float64)}
    tensors |= {"seed": torch.tensor(3)} if thinned else {}

    def arguments(kind, flags, tensors):
        asked = autograd.Pass(kind, flags, "linear_cross_entropy")
        numbers = [options["numbers"], [options[name] for name in autograd._INTEGERS[:-2]] + [-1, -1]]
        return list(tensors.values()), *numbers, autograd._text(asked, options, tensors)

    both = Flags(*[a or b for a, b in zip(stats, wants)])._replace(want_draw_stats=thinned)
    torch.library.opcheck(autograd.run, arguments(_options.FORWARD_BACKWARD, both, tensors))
    # The tensor of draws has bytes that nothing writes: no comparison of two runs.
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    utils += [] if thinned else ["test_aot_dispatch_dynamic"]
    forward = arguments(_options.FORWARD, stats._replace(keeps_draws=thinned), tensors)
    torch.library.opcheck(autograd.run, forward, test_utils=utils)
    found = dict(zip(autograd._names(*forward), autograd.run(*forward)))
    upstream = {name: found[name] for name in ("lse", "lse_low", *(("draws",) if thinned else ()))}
    rest = arguments(_options.BACKWARD, wants, tensors | upstream | {"grad_loss": torch.tensor(1.0)})
    torch.library.opcheck(autograd.run, rest)
    torch.library.opcheck(autograd.run_into, (rest[0], torch.zeros(13, 6), *rest[1:]))


def test_copies_of_a_module_are_independent():
    model = logitless.LinearCrossEntropyLoss(6, 13)
    again = copy.deepcopy(model)
    input, _, _, target = head()
    again(input, target).backward()
    assert model.linear.weight.grad is None and again.linear.weight.grad is not None
