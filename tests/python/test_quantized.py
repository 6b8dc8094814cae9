"""Frozen heads that bitsandbytes and torchao have quantised: their rows, losses, gradients, budgets and refusals."""

import copy
import functools
import gc
import pickle
import weakref

import logitless
import pytest
import torch
from logitless.errors import BudgetTooSmallError, InvalidTargetError, UnsupportedError
from support import DEVICES, lce
from torch import nn
from torch.utils.checkpoint import checkpoint

bnb = pytest.importorskip("bitsandbytes")
ao = pytest.importorskip("torchao.quantization")

V, D, N = 30_011, 48, 37
WINDOWS = 3 << 19  # bytes that give several windows, and chunks of rows
KINDS = ["int8", "float8", "bits8", "nf4", "nf4 nested", "fp4"]
SHORT = (torch.bfloat16, torch.float16)


def layer(kind, vocab=V):
    """Returns a quantised linear layer."""
    return copy.deepcopy(_layer(kind, vocab))


@functools.cache
def _layer(kind, vocab):
    torch.manual_seed(1)
    dtype = torch.bfloat16
    plain = nn.Linear(D, vocab, bias=False, dtype=dtype)
    with torch.no_grad():
        plain.weight.mul_(4)
    if kind in ("int8", "float8"):
        config = ao.Int8WeightOnlyConfig() if kind == "int8" else ao.Float8WeightOnlyConfig()
        ao.quantize_(plain, config)
        return plain
    if kind == "bits8":
        made = bnb.nn.Linear8bitLt(D, vocab, bias=False, has_fp16_weights=False)
    else:
        nested = kind.endswith("nested")
        made = bnb.nn.Linear4bit(D, vocab, bias=False, quant_type=kind[:3], compress_statistics=nested)
    made.load_state_dict(plain.state_dict())
    made.weight.data = made.weight.data.to(dtype)
    return made.to("cpu")


def dequantised(made, dtype):
    """Returns the whole weight as the packages' own functions dequantise it."""
    if isinstance(made, bnb.nn.Linear4bit):
        # In one row: bitsandbytes 0.50.2 is wrong on CPUs where a block of scales has parts of two rows.
        state = copy.copy(made.weight.quant_state)
        shape, state.shape = state.shape, torch.Size((state.shape.numel(),))
        return bnb.functional.dequantize_4bit(made.weight.data, state).to(dtype).view(shape)
    if isinstance(made, bnb.nn.Linear8bitLt):
        codes = made.weight.data  # weight.CB and SCB stay where the layer was quantised
        return codes.to(dtype).mul_(made.weight.SCB.to(codes.device).unsqueeze(1).mul(1.0 / 127.0))
    return made.weight.dequantize(torch.float32).to(dtype) if dtype == torch.float64 else made.weight.dequantize(dtype)


def inputs(dtype, rows=N):
    torch.manual_seed(2)
    hidden, targets = torch.randn(rows, D).to(dtype).requires_grad_(), torch.randint(0, V, (rows,))
    targets[::5] = -100
    return hidden, targets


def errors(made, expected, exact, windows=False):
    """Returns each value's distance to the exact one, and the largest that is allowed.

    Where the exact ones have no more bits, they are wrong by a rounding for each of the D terms of a logit. Windows
    round four times more.
    """
    for a, b, e in zip(made, expected, exact, strict=True):
        unit = torch.finfo(a.dtype).eps * (D if a.dtype == torch.float64 else 5 if windows else 1)
        yield (a.double() - e).norm(), 2 * (b.double() - e).norm() + unit * e.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_bits_of_the_package(kind, dtype):
    """48 columns are no multiple of the 4-bit kinds' blocks of 64, so rows begin inside blocks."""
    made = layer(kind, vocab=501)
    weight, whole = logitless.QuantizedWeight(made), dequantised(made, dtype)
    assert weight.shape == whole.shape == (501, D) and not weight.requires_grad
    for piece in (1, 1000, 1 << 22):
        for start, stop in ((0, 501), (0, 1), (500, 501), (7, 300), (3, 3)):
            assert torch.equal(weight.rows(start, stop, dtype, piece), whole[start:stop])
    assert torch.equal(torch.cat(list(weight[:77].blocks(10, dtype))), whole[:77])


def test_8_bit_codes_that_stayed_behind_on_another_device():
    made = layer("bits8", vocab=501)
    whole = dequantised(made, torch.float32)
    made.weight.CB = made.weight.CB.to("meta")
    assert torch.equal(logitless.QuantizedWeight(made).rows(0, 501, torch.float32, 1 << 22), whole)


@pytest.mark.parametrize("budget", [None, "fastest", WINDOWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *SHORT])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_loss_and_gradient(device, kind, dtype, budget):
    made = layer(kind).to(device)
    whole = dequantised(made, dtype)

    def run(hidden, weight, budget=None):
        hidden = hidden.detach().requires_grad_()
        loss = lce(hidden, weight, targets, max_workspace_bytes=budget)
        loss.backward()
        return loss.detach(), hidden.grad

    hidden, targets = (each.to(device) for each in inputs(dtype))
    exact = run(hidden.double(), whole.double())
    fused = run(hidden, logitless.QuantizedWeight(made), budget)
    for error, allowed in errors(fused, run(hidden, whole), exact, budget == WINDOWS):
        assert error <= allowed


OPTIONS = {
    "bias": {"bias": torch.randn(V)},
    "several": {"scale": 0.7, "softcap": 5.0, "temperature": 1.3, "z_loss": 1e-3},
    "learned": {"scale": torch.tensor(0.7), "temperature": torch.tensor(1.3)},
    "label smoothing": {"label_smoothing": 0.1},
    "class weights": {"label_smoothing": 0.2, "class_weight": torch.rand(V) + 0.5},
    "class weights alone": {"class_weight": torch.rand(V) + 0.5},
    "token weights": {"token_weight": torch.rand(N), "num_items": 7.0, "label_smoothing": 0.1},
    "temperatures": {"temperature": torch.rand(N) + 0.5},
    "an ignored class": {"ignore_index": 3},
    "shift": {"shift": 2},
    "16 bits": {
        "label_smoothing": 0.2,
        "class_weight": (torch.rand(V) * 100 + 0.5).half(),
        "bias": torch.zeros(V).half(),
    },
    "padding": {"bias": torch.zeros(V).index_fill(0, torch.arange(20_000, V), -torch.inf)},
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_in_windows(name, reduction):
    """The loss of windows is that of the whole vocabulary, and so are all gradients."""
    made, given = layer("int8"), OPTIONS[name] | {"reduction": reduction}
    if reduction != "mean":
        given.pop("num_items", None)
    hidden, targets = inputs(torch.float32)
    if name == "padding":
        targets = targets.clamp(max=19_999)
    if name == "an ignored class":
        targets = targets.clamp(min=3)
    upstream = torch.rand(N) if reduction == "none" else torch.tensor(1.5)

    def run(hidden, weight, dtype, budget=None):
        tensors = {
            key: value.detach().clone().to(dtype) for key, value in given.items() if isinstance(value, torch.Tensor)
        }
        leaves = [hidden.detach().to(dtype).requires_grad_()]
        leaves += [tensors[key].requires_grad_() for key in ("bias", *given) if key in tensors and key in TRAINED[name]]
        loss = lce(leaves[0], weight, targets, max_workspace_bytes=budget, **given | tensors)
        loss.backward(upstream.to(loss.dtype))
        return [loss.detach(), *(leaf.grad for leaf in leaves)]

    whole = dequantised(made, torch.float32)
    exact = run(hidden, whole.double(), torch.float64)
    fused = run(hidden, logitless.QuantizedWeight(made), torch.float32, WINDOWS)
    for error, allowed in errors(fused, run(hidden, whole, torch.float32), exact, windows=True):
        assert error <= allowed


TRAINED = dict.fromkeys(OPTIONS, ()) | {"bias": ("bias",), "learned": ("scale", "temperature")}


@pytest.mark.parametrize("budget", [None, WINDOWS])
def test_the_backward_pass_dequantises_again(monkeypatch, budget):
    """No window outlives its use, and no two live at a time."""
    seen = []
    rows = logitless.QuantizedWeight.rows

    def counted(self, *args):
        assert all(window() is None for window in seen)
        made = rows(self, *args)
        seen.append(weakref.ref(made))
        return made

    hidden, targets = inputs(torch.bfloat16)
    weight = logitless.QuantizedWeight(layer("int8"))
    monkeypatch.setattr(logitless.QuantizedWeight, "rows", counted)
    loss = lce(hidden, weight, targets, reduction="none", max_workspace_bytes=budget)
    forward = len(seen)
    assert (forward == 1) == (budget is None)
    loss.sum().backward()
    assert len(seen) == 2 * forward and all(window() is None for window in seen)


def test_a_budget_that_is_too_small_says_one_that_works():
    hidden, targets = inputs(torch.bfloat16)
    weight = logitless.QuantizedWeight(layer("nf4"))
    with pytest.raises(BudgetTooSmallError, match="max_workspace_bytes: expected at least") as raised:
        lce(hidden, weight, targets, max_workspace_bytes=1000)
    lce(hidden, weight, targets, max_workspace_bytes=raised.value.required_bytes).backward()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("what", ["hidden", "codes"])
@pytest.mark.parametrize("budget", [None, WINDOWS])
def test_changes_in_place_before_the_backward_pass(what, budget):
    hidden, targets = inputs(torch.bfloat16)
    states = hidden * 1
    made = layer("int8")
    loss = lce(states, logitless.QuantizedWeight(made), targets, reduction="none", max_workspace_bytes=budget)
    with torch.no_grad():
        (states if what == "hidden" else made.weight.qdata).add_(1)
    with pytest.raises(RuntimeError, match="in.?place"):
        loss.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    hidden, targets = inputs(torch.bfloat16)
    weight = logitless.QuantizedWeight(layer("int8"))

    def loss(states):
        return lce(states * 1, weight, targets, max_workspace_bytes=WINDOWS)

    (expected,) = torch.autograd.grad(loss(hidden), hidden)
    checkpoint(loss, hidden, use_reentrant=reentrant).backward()
    assert torch.equal(hidden.grad, expected)


@pytest.mark.parametrize("budget", [None, WINDOWS])
def test_autocast_rounds_both_operands(budget):
    hidden, targets = inputs(torch.float32)
    weight = logitless.QuantizedWeight(layer("int8"))
    with torch.autocast("cpu", torch.bfloat16):
        lce(hidden, weight, targets, max_workspace_bytes=budget).backward()
    short = hidden.detach().bfloat16().requires_grad_()
    lce(short, weight, targets, max_workspace_bytes=budget).backward()
    assert hidden.grad.dtype == torch.float32 and torch.equal(hidden.grad.bfloat16(), short.grad)


@pytest.mark.parametrize("name", ["bias", "class_weight"])
def test_chunks_keep_no_copies(name):
    """The memory kept for the backward pass grows with rows by statistics, not by a vector of V for each chunk."""
    weight = logitless.QuantizedWeight(layer("int8"))
    given = {name: (torch.rand(V) + 0.5).half(), "label_smoothing": 0.1, "max_workspace_bytes": WINDOWS}
    held = []
    for rows in (50, 400):
        hidden, targets = inputs(torch.bfloat16, rows)
        before = {id(each) for each in gc.get_objects() if isinstance(each, torch.Tensor)}
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            loss = lce(hidden, weight, targets, **given)
        objects = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and id(each) not in before]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in (*objects, *kept)}
        held.append(sum(storages.values()))
        loss.backward()
    assert held[1] - held[0] < 350 * 8 * 100, held


def test_bad_numbers_are_refused_in_windows_too():
    """A small budget does not change which arguments are accepted."""
    weight = logitless.QuantizedWeight(layer("int8"))
    hidden, targets = inputs(torch.bfloat16)
    for given in (
        {"token_weight": torch.rand(1)},
        {"temperature": torch.rand(N, 1)},
        {"class_weight": torch.rand(V + 3)},
        {"bias": torch.rand(V + 3)},
        {"shift": -1},
        {"label_smoothing": 1.5},
        {"z_loss": float("nan")},
        {"num_items": -3.0},
        {"num_items": 3.0, "reduction": "sum"},
        {"seed": 1},
        {"token_weight": torch.rand(N, requires_grad=True)},
    ):
        with pytest.raises((TypeError, ValueError), match=next(iter(given))):
            lce(hidden, weight, targets, max_workspace_bytes=WINDOWS, **given)
    one = lce(hidden[0], weight, targets[1], max_workspace_bytes=WINDOWS)
    assert one.shape == () and one.isfinite()
    assert lce(hidden, weight, targets, num_items=torch.ones(1), max_workspace_bytes=WINDOWS).shape == ()


def test_padding_of_16_bits_and_rows_that_it_hides():
    weight = logitless.QuantizedWeight(layer("int8"))
    hidden, targets = inputs(torch.float16)
    bias = torch.zeros(V).index_fill(0, torch.arange(15_000, V), -torch.inf).half()
    whole = dequantised(layer("int8"), torch.float16)
    for rows in (targets.clamp(max=14_999), targets):  # the loss of a hidden target is infinite
        losses = [
            lce(hidden, w, rows, bias=bias, reduction="none", max_workspace_bytes=b)
            for w, b in ((weight, WINDOWS), (whole, None))
        ]
        torch.testing.assert_close(*losses, atol=1e-4, rtol=1e-4)
    ignored = torch.ones(N).masked_fill(targets == -100, torch.nan)
    assert lce(hidden, weight, targets, token_weight=ignored, max_workspace_bytes=WINDOWS).isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode(kind):
    hidden, targets = inputs(torch.bfloat16)
    weight = logitless.QuantizedWeight(layer(kind))
    expected = lce(hidden, weight, targets).detach()
    with torch.inference_mode():
        assert torch.equal(lce(hidden, weight, targets), expected)


def test_copies_are_refused():
    """A copy would read the codes of the original."""
    weight = logitless.QuantizedWeight(layer("int8"))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="QuantizedWeight: expected a new one"):
            copied(weight)


def test_hostile_rows():
    weight = logitless.QuantizedWeight(layer("int8"))
    hidden, targets = inputs(torch.bfloat16)
    for rows in (0, 1):
        loss = lce(hidden[:rows], weight, targets[1 : 1 + rows], reduction="sum", max_workspace_bytes=WINDOWS)
        assert loss.isfinite()
    ignored = torch.full_like(targets, -100)
    assert lce(hidden, weight, ignored, max_workspace_bytes=WINDOWS).isnan()
    lce(hidden, weight, ignored, reduction="sum", max_workspace_bytes=WINDOWS).backward()
    assert not hidden.grad.any()
    with pytest.raises(InvalidTargetError, match=f"0 <= target < {V}"):
        lce(hidden, weight, targets.index_fill(0, torch.tensor([4]), V), max_workspace_bytes=WINDOWS)
    with torch.no_grad():
        assert not lce(hidden, weight, targets, max_workspace_bytes=WINDOWS).requires_grad


def test_compute_dtype_of_four_bits():
    """The layer rounds hidden states to its own dtype, and so does the loss."""
    made = layer("nf4")
    made.compute_dtype, made.compute_type_is_set = torch.bfloat16, True
    hidden, targets = inputs(torch.float32)
    lce(hidden, logitless.QuantizedWeight(made), targets).backward()
    short = hidden.detach().bfloat16().requires_grad_()
    lce(short, dequantised(made, torch.bfloat16), targets).backward()
    assert hidden.grad.dtype == torch.float32 and torch.equal(hidden.grad, short.grad.float())


def trained_8_bits():
    return bnb.nn.Linear8bitLt(D, V, bias=False, has_fp16_weights=True)


def trained():
    made = layer("int8")
    made.weight.requires_grad_()
    return made


def dynamic():
    made = nn.Linear(D, V, bias=False, dtype=torch.bfloat16)
    ao.quantize_(made, ao.Int8DynamicActivationInt8WeightConfig())
    return made


def of_tensor():
    made = nn.Linear(D, V, bias=False, dtype=torch.bfloat16)
    ao.quantize_(made, ao.Float8WeightOnlyConfig())
    made.weight.block_size = [V, D]
    return made


def weight_of_a_used_layer():
    made = layer("bits8")
    made(torch.randn(2, D).bfloat16())  # moves codes and scales to the layer
    logitless.QuantizedWeight(made)
    return made.weight


REFUSED = [
    (trained_8_bits, "has_fp16_weights=True|trained Int8Params"),
    (trained, "got a trained Int8Tensor"),
    (dynamic, "got one with act_quant_kwargs"),
    (of_tensor, "scales for each row, got .* in blocks of"),
    (weight_of_a_used_layer, "pass the layer"),
    (lambda: bnb.nn.Linear4bit(D, V), "one that is not quantised"),
    (lambda: nn.Linear(D, V), "got Linear with a Parameter"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_heads_that_are_not_known_are_refused(make, message):
    with pytest.raises(UnsupportedError, match=f"head: expected .*({message})"):
        logitless.QuantizedWeight(make())


def test_arguments_that_do_not_fit():
    with pytest.raises(TypeError, match="head: expected a layer or its weight, got str"):
        logitless.QuantizedWeight("lm_head")
    weight = logitless.QuantizedWeight(layer("int8"))
    hidden, targets = inputs(torch.bfloat16)
    several = torch.stack([targets.clamp(min=0)] * 2, 1)
    for given in (
        {"gradient": "sparsified"},
        {"batch_invariant": True},
        {"return_stats": True},
        {"main_grad": torch.zeros(V, D)},
        {"target_weight": torch.rand(N, 2)},
    ):
        (name,) = given
        with pytest.raises(UnsupportedError, match=f"{name}: expected its default with a QuantizedWeight"):
            lce(hidden, weight, several if name == "target_weight" else targets, **given)
    with pytest.raises(ValueError, match=r"hidden: expected shape .*D = 48 of weight, got .37, 47"):
        lce(hidden[:, :-1], weight, targets)
    with pytest.raises(TypeError, match="weight"):
        logitless.linear_log_probs(hidden, weight, several)


def test_many_heads():
    """Quantised heads beside a trained one."""
    quantised = [logitless.QuantizedWeight(layer(kind, 301)) for kind in ("int8", "nf4")]
    hidden, weight = (torch.randn(rows, D, requires_grad=True) for rows in (N, 301))
    targets, factors = torch.randint(0, 301, (3, N)), torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    leaves = hidden, weight, factors
    loss = logitless.multi_head_linear_cross_entropy(hidden, [*quantised, weight], targets, head_weights=factors)
    expected = sum(f * lce(hidden, w, t) for f, w, t in zip(factors, [*quantised, weight], targets))
    for pair in zip(*(torch.autograd.grad(total, leaves) for total in (loss, expected))):
        torch.testing.assert_close(*pair)
