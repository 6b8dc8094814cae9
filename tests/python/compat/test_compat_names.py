"""Compares the names of other libraries with their formulas over whole logits: loss, statistics, gradients.

One table has their differences. Tests of features of a single library follow it.
"""

import dataclasses
import itertools
from collections.abc import Callable
from copy import copy

import pytest
import torch
import torch.nn.functional as F
from exactness import check, head, logits_of
from logitless.compat import cut_cross_entropy as cce
from logitless.compat import fla, liger_kernel, openrlhf, prime_rl, quack, verl
from logitless.compat import torch as names
from torch import nn

VOCAB = 29  # of exactness.head
EVERY_OUTPUT = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
L2WARP = {"use_l2warp": True, "l2_penalty_factor": 3.0}
CCE, LIGER = cce.linear_cross_entropy, liger_kernel.liger_fused_linear_cross_entropy
FLA, TORCH = fla.fused_linear_cross_entropy_loss, names.linear_cross_entropy


def flat_loss(logits, target, **options):
    """Applies PyTorch's loss to targets [...] and logits [..., V]."""
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)
    return loss.reshape(target.shape) if loss.dim() else loss


def capped(logits, softcap):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def of_cce(input, weight, bias, target, **options):
    return dict(zip(("loss", "lse"), CCE(input, weight, target, bias, return_lse=True, **options)))


def of_cce_by_logits(logits, targets, *, softcap=None, shift=0, ignore_index=-100, **options):
    """Computes CCE's results; lse is 0 in ignored rows."""
    logits, shift = capped(logits, softcap), int(shift)
    if shift:
        logits, targets = logits[..., :-shift, :], targets[..., shift:]
    lse = torch.where(targets != ignore_index, logits.logsumexp(-1), 0.0)
    return {"loss": flat_loss(logits, targets, ignore_index=ignore_index, **options), "lse": lse}


def of_fla(input, weight, bias, target, **options):
    return FLA(input, target, weight, bias, **options)


def of_fla_by_logits(logits, target, *, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0,
                     logit_softcapping=None, reduction="mean", use_l2warp=False, l2_penalty_factor=1e-4):  # fmt: skip
    """Computes FLA's loss. The scale comes after the bias; L2Warp's largest logits precede scale and softcap, in all
    rows."""
    z = capped(logits * logit_scale, logit_softcapping)
    loss = F.cross_entropy(z, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum")
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum().clamp_min(1)
    if use_l2warp:
        penalty = l2_penalty_factor / (2 * len(target)) * logits.amax(-1).square().sum()
        loss = loss + (penalty - penalty.detach())
    return loss


def of_liger(input, weight, bias, target, **options):
    outputs = LIGER(input, weight, target, bias, **options, **EVERY_OUTPUT)
    assert isinstance(outputs, liger_kernel.CrossEntropyOutput)
    assert outputs.loss.requires_grad and not outputs.z_loss.requires_grad
    return vars(outputs)


def of_liger_by_logits(logits, target, *, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
                       reduction="mean", softcap=None, use_token_scaling=False):  # fmt: skip
    """Computes Liger's four outputs.

    Losses are a mean over their weights, z-losses over rows. Without valid rows they are 0.
    """
    logits, valid = capped(logits, softcap), target != ignore_index
    y, vocab = torch.where(valid, target, 0), logits.shape[1]
    w = torch.ones(vocab).to(logits) if ce_weight is None else ce_weight.to(logits)
    lse = logits.logsumexp(-1)
    nll = lse - logits.gather(1, y[:, None])[:, 0]
    smooth = (w * (lse[:, None] - logits)).sum(-1) / vocab
    rows = (1 - label_smoothing) * w[y] * nll + label_smoothing * smooth
    z_rows = lse_square_scale * lse**2
    if reduction == "mean":
        rows = rows / torch.where(valid, w[y], 0).sum()
        z_rows = z_rows / valid.sum()
    rows = rows + z_rows
    if use_token_scaling:
        p = torch.exp(-nll).detach()
        rows, z_rows = rows * p, z_rows * p
    rows, z_rows = torch.where(valid, rows, 0.0), torch.where(valid, z_rows, 0.0).detach()
    correct = (valid & (logits.argmax(-1) == target)).to(logits.dtype)
    predicted = torch.where(valid, logits.argmax(-1), -1)
    if reduction == "none":
        return {"loss": rows, "z_loss": z_rows, "token_accuracy": correct, "predicted_tokens": predicted}
    accuracy = correct.sum() / valid.sum()
    return {"loss": rows.sum(), "z_loss": z_rows.sum(), "token_accuracy": accuracy, "predicted_tokens": predicted}


def of_quack(input, weight, bias, target, **options):
    return quack.linear_cross_entropy_func(input, weight, bias, target, inplace_backward=True, **options)


def of_torch(input, weight, bias, target, class_weight=None, **options):
    return TORCH(input, weight, target, linear_bias=bias, weight=class_weight, **options)


def of_torch_by_logits(logits, target, class_weight=None, **options):
    class_weight = None if class_weight is None else class_weight.to(logits.dtype)
    return F.cross_entropy(logits, target, weight=class_weight, **options)


def log_probs_by_logits(logits, target, temperature=1.0, softcap=None, reduction="none"):
    """Computes log-probabilities and each row's entropy, for trainers of reinforcement learning."""
    if isinstance(temperature, torch.Tensor) and temperature.numel() > 1:
        temperature = temperature.to(logits.dtype).reshape(*target.shape, 1)
    log_p = (capped(logits, softcap) / temperature).log_softmax(-1)
    rows, entropy = log_p.gather(-1, target[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    reduced = {"none": rows, "sum": rows.sum(), "mean": rows.mean()}[reduction.lower()]
    return {"log_probs": reduced, "entropy": entropy}


def of_verl(input, weight, bias, target, temperature=1.0, reduction="none"):
    outputs = verl.linear_cross_entropy(input, weight, target, temperature, reduction, None)
    assert outputs[0].shape == (target.shape if reduction == "none" else ()) and outputs[1].shape == target.shape
    return dict(zip(("log_probs", "entropy"), outputs))


def of_prime_rl(input, weight, bias, target, temperature=1.0, softcap=None):
    kind, more = prime_rl.FusedOutputLinear, {}
    if softcap is not None:
        kind, more = prime_rl.GemmaFusedOutputLinear, {"softcap": softcap}
    layer = kind(in_features=input.shape[-1], out_features=len(weight), chunk_size=64, **more)
    assert list(layer.state_dict()) == ["weight"]
    given = dict(labels=target, temperature=torch.as_tensor(temperature))
    outputs = torch.func.functional_call(layer, {"weight": weight}, (input,), given)
    return {"log_probs": outputs["logprobs"], "entropy": outputs["entropy"]}


def of_openrlhf(input, weight, bias, target, temperature=1.0, softcap=None):
    options = dict(bias=bias, softcap=softcap, max_workspace_bytes=1 << 20)
    outputs = openrlhf.log_probs_and_entropy_from_hidden(input, weight, target, temperature, **options)
    assert torch.equal(openrlhf.log_probs_from_hidden(input, weight, target, temperature, **options), outputs[0])
    return dict(zip(("log_probs", "entropy"), outputs))


@dataclasses.dataclass
class Name:
    """function(input, weight, bias, target, **options), reference(logits, target, **options), and their options.

    ``options`` has values by name, of which all combinations run. Its entry "shape" is the shape of the 24 targets.
    """

    function: Callable
    reference: Callable
    options: dict
    biases: tuple = (True,)
    ignores: bool = True
    dtypes: tuple = (torch.float64, torch.float32)

    def combinations(self):
        for values in itertools.product(*self.options.values()):
            yield dict(zip(self.options, values))


def class_weights(kind):
    weight = torch.linspace(0.1, 1.1, VOCAB) if kind == "positive" else torch.linspace(-2.0, 1.0, VOCAB)
    return weight.double()


REDUCTIONS = ["mean", "sum", "none"]
EACH = torch.rand(24, generator=torch.Generator().manual_seed(0)) + 0.5
TARGETS = [(24,), (4, 6), (2, 3, 4)]
CHUNKED = {"reduction": ["mean", "sum"], "chunk_size": [8], "shape": [(4, 6)]}


def by_flat(logits, target, chunk_size=None, **options):
    return flat_loss(logits, target, **options)


NAMES = {
    "cce": Name(of_cce, of_cce_by_logits, {
        "shape": TARGETS, "shift": [0, 1, 3, False, True], "reduction": REDUCTIONS, "softcap": [None, 3.0],
    }, biases=(True, False)),
    "fla": Name(of_fla, of_fla_by_logits, {
        "logit_scale": [1.0, 0.3, -1.5], "logit_softcapping": [None, 3.0], "label_smoothing": [0.0, 0.1, 1.0],
        "reduction": ["mean", "sum"], "use_l2warp": [False, True], "l2_penalty_factor": [3.0],
    }, biases=(True, False)),
    "liger": Name(of_liger, of_liger_by_logits, {
        "lse_square_scale": [0.0, 0.01], "label_smoothing": [0.0, 0.1], "softcap": [None, 3.0], "reduction": REDUCTIONS,
        "ce_weight": [None, class_weights("positive"), class_weights("of a negative sum")],
        "use_token_scaling": [False, True],
    }),
    "quack": Name(of_quack, flat_loss, {"reduction": REDUCTIONS}, biases=(True, False)),
    "quack chunked": Name(
        lambda i, w, b, t, **o: quack.chunked_linear_cross_entropy(i, w, t, **o), by_flat, CHUNKED, (False,)
    ),
    "quack scaled exp": Name(
        lambda i, w, b, t, **o: quack.scaled_exp_linear_cross_entropy(i, w, t, **o), by_flat, CHUNKED, (False,)
    ),
    "torch": Name(of_torch, of_torch_by_logits, {
        "reduction": REDUCTIONS, "label_smoothing": [0.0, 0.1, 1.0],
        "class_weight": [None, class_weights("positive").float()],
    }),
    "verl": Name(of_verl, log_probs_by_logits, {
        "shape": [(24,)], "reduction": ["none", "sum", "MEAN"], "temperature": [1.0, 0.7, 2, EACH],
    }, (False,), ignores=False, dtypes=(torch.float32,)),
    "prime_rl": Name(of_prime_rl, log_probs_by_logits, {
        "shape": [(4, 6)], "temperature": [0.8, EACH.reshape(4, 6)], "softcap": [None, 2.5],
    }, (False,), ignores=False, dtypes=(torch.float32,)),
    "openrlhf": Name(of_openrlhf, log_probs_by_logits, {
        "shape": [(4, 6)], "temperature": [1.0, 0.6], "softcap": [None, 2.5],
    }, ignores=False, dtypes=(torch.float32,)),
}  # fmt: skip
every_name = pytest.mark.parametrize("name", NAMES)


def compare(name, leaves, target, dtypes=None, **options):
    entry, shape = NAMES[name], options.pop("shape", target.shape)

    def both(function, by_logits):
        def call(input, weight, bias=None):
            input = input.reshape(*shape, input.shape[-1])
            given = (logits_of(input, weight, bias),) if by_logits else (input, weight, bias)
            outputs = function(*given, target.reshape(shape), **options)
            # A loss of NaN is a constant, without a gradient.
            if isinstance(outputs, torch.Tensor):
                return outputs.nan_to_num(5.0)
            return {key: value.nan_to_num(5.0) if key == "loss" else value for key, value in outputs.items()}

        return call

    check(both(entry.function, False), both(entry.reference, True), leaves, dtypes or entry.dtypes)


def operands(name, rows=None, bias=True, **sizes):
    if rows is None:
        rows = 24 if "shape" in NAMES[name].options else 13
    leaves, target = head(rows, **({} if NAMES[name].ignores else {"ignored": ()}) | sizes)
    if not bias:
        del leaves["bias"]
    return leaves, target


@every_name
def test_every_option(name):
    for bias in NAMES[name].biases:
        for options in NAMES[name].combinations():
            compare(name, *operands(name, bias=bias), **options)


@every_name
def test_bfloat16(name):
    entry = NAMES[name]
    *_, options = entry.combinations()
    if name == "liger":
        options["ce_weight"] = None
    compare(name, *operands(name, bias=entry.biases[0]), [torch.bfloat16], **options)


@every_name
@pytest.mark.parametrize("rows, vocab, hidden", list(itertools.product([1, 2], [1, 2], [1, 3])))
def test_tiny_shapes(name, rows, vocab, hidden):
    shape = {}
    if "shape" in NAMES[name].options:
        shape["shape"] = (*[1] * (len(NAMES[name].options["shape"][0]) - 1), rows)
    options = {"fla": L2WARP, "liger": {"lse_square_scale": 0.01, "use_token_scaling": True}}.get(name, {}) | shape
    leaves, target = operands(name, rows, NAMES[name].biases[0], vocab=vocab, hidden=hidden, ignored=())
    compare(name, leaves, target, **options)


@pytest.mark.parametrize("name", [name for name, entry in NAMES.items() if entry.ignores and name != "liger"])
@pytest.mark.parametrize("rows", [0, 5])
def test_every_row_ignored(name, rows):
    """Gradients are 0, even if the loss is NaN."""
    entry = NAMES[name]
    for options in entry.combinations():
        leaves, _ = operands(name, rows, entry.biases[0])
        if rows == 0 and (options.get("use_l2warp") or "shape" in options):  # these divide by the rows, or by none
            continue
        options |= {"shape": (1, rows)} if "shape" in options else {}
        if options.get("shift", 0) < max(rows, 1):
            compare(name, leaves, torch.full((rows,), 3), ignore_index=3, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("prime_rl", "openrlhf")])
def test_compiled_in_one_graph(name):
    entry = NAMES[name]
    *_, options = entry.combinations()
    shape = options.pop("shape", (13,))
    leaves, target = operands(name, bias=entry.biases[0])
    tensors = [leaf.float().requires_grad_() for leaf in leaves.values()]

    def step(target, input, weight, bias=None):
        outputs = entry.function(input.reshape(*shape, input.shape[-1]), weight, bias, target.reshape(shape), **options)
        return outputs if isinstance(outputs, torch.Tensor) else list(outputs.values())

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    made = [f(target, *tensors) for f in (compiled, step)]
    torch.testing.assert_close(*made, equal_nan=True)
    losses = [outputs if isinstance(outputs, torch.Tensor) else outputs[0] for outputs in made]
    torch.testing.assert_close(*(torch.autograd.grad(loss.sum(), tensors) for loss in losses), equal_nan=True)


def tensors_of(*names):
    leaves, target = head()
    return *(leaves[name].float() for name in names), target


def call_cce(**change):
    arguments = {"e": torch.randn(2, 6, 7), "c": torch.randn(11, 7), "targets": torch.zeros(2, 6, dtype=torch.long)}
    return CCE(**arguments | change)


def call_liger(**options):
    input, weight, target = tensors_of("input", "weight")
    if list(options)[0] in ("label_smoothing", "reduction", "softcap"):
        with pytest.raises(AssertionError, match="expected"):
            liger_kernel.LigerFusedLinearCrossEntropyLoss(**options)
    return LIGER(input, weight, target, **options)


def call_fla(**options):
    input, weight, target = tensors_of("input", "weight")
    with pytest.raises((AssertionError, ValueError), match="expected"):
        fla.FusedLinearCrossEntropyLoss(**options)
    return FLA(input, target, weight, **options)


def call_quack(name, **options):
    input, weight, target = tensors_of("input", "weight")
    bias = (None,) if name == "linear_cross_entropy_func" else ()
    return getattr(quack, name)(input, weight, *bias, target, **options)


def call_verl(*more):
    input, weight, target = tensors_of("input", "weight")
    return verl.linear_cross_entropy(input, weight, target.clamp(min=0), *more)


def call_prime_rl(*more):
    return prime_rl.FusedOutputLinear(7, VOCAB)(torch.randn(1, 4, 7), *more)


LABELS = torch.zeros(1, 4, dtype=torch.long)
REFUSED = [
    (call_cce, {"impl": "flash"}, NotImplementedError, "impl: expected one of cce"),
    (call_cce, {"filter_eps": "low"}, RuntimeError, "filter_eps: expected"),
    (call_cce, {"shift": -1}, ValueError, r"shift: expected an integer in \[0, 6\)"),
    (call_cce, {"shift": 6}, ValueError, r"shift: expected an integer in \[0, 6\)"),
    (call_cce, {"bias": torch.randn(5)}, ValueError, r"bias: expected shape \[11\]"),
    (call_cce, {"softcap": 0.0}, ValueError, "softcap: expected a number > 0"),
    (call_cce, {"reduction": "avg"}, ValueError, "reduction: expected"),
    (call_cce, {"targets": torch.zeros(2, 5, dtype=torch.long)}, AssertionError, "targets: expected shape"),
    (call_cce, {"c": torch.randn(11, 8)}, AssertionError, r"e: expected shape \[..., 8\]"),
    (call_cce, {"vocab_parallel_options": cce.VocabParallelOptions(0, 5)}, ValueError, "c: expected 5 rows of vocab_"),
    (call_cce, {"bias": -100}, TypeError, "cut-cross-entropy 25.1.1 has ignore_index in this place"),
    (cce.LinearCrossEntropy, (-100, None, "mean", "high"), TypeError, "25.1.1 has filter_eps in this place"),
    (cce.compute_z_loss, {"lse": torch.rand(4), "reduction": "avg"}, ValueError, "reduction"),
    (call_fla, {"reduction": "none"}, AssertionError, "reduction: expected"),
    (call_fla, {"logit_softcapping": 0.0}, ValueError, "logit_softcapping: expected"),
    (call_liger, {"label_smoothing": 1.5}, AssertionError, "label_smoothing: expected"),
    (call_liger, {"reduction": "batchmean"}, AssertionError, "reduction: expected"),
    (call_liger, {"softcap": 0.0}, AssertionError, "softcap: expected"),
    (call_liger, {"return_z_loss": 1}, AssertionError, "return_z_loss: expected"),
    (call_liger, {"return_token_accuracy": None}, AssertionError, "return_token_accuracy: expected"),
    (call_liger, {"return_predicted_tokens": "yes"}, AssertionError, "return_predicted_tokens: expected"),
    (call_liger, {"ce_weight": torch.rand(5)}, AssertionError, r"ce_weight: expected shape \[29\]"),
    (call_liger, {"ce_weight": torch.ones(29, dtype=torch.long)}, AssertionError, "ce_weight: expected a floating"),
    (call_liger, {"chunk_mem_const": 0}, ValueError, "chunk_mem_const: expected"),
    (call_liger, {"chunk_mem_const": True}, ValueError, "chunk_mem_const: expected"),
    (call_liger, {"accum_dtype": torch.float64}, NotImplementedError, "accum_dtype: expected"),
    (call_quack, {"name": "linear_cross_entropy_func", "reduction": "avg"}, ValueError, "reduction"),
    (call_quack, {"name": "chunked_linear_cross_entropy", "reduction": "none"}, ValueError, '"mean" or "sum"'),
    (call_quack, {"name": "scaled_exp_linear_cross_entropy", "reduction": "none"}, ValueError, '"mean" or "sum"'),
    (call_verl, ("hot",), AssertionError, "temperature must be a float"),
    (call_verl, (1.0, 2), AssertionError, "reduction must be a str"),
    (call_verl, (1.0, "max"), ValueError, "Invalid reduction: max"),
    (call_verl, (torch.ones(5),), ValueError, "temperature"),
    (call_prime_rl, (), AssertionError, "FusedOutputLinear requires labels"),
    (call_prime_rl, (LABELS,), AssertionError, "FusedOutputLinear requires per-token temperatures"),
]


@pytest.mark.parametrize("call, given, error, message", REFUSED, ids=[f"{r[0].__name__} {r[3]}" for r in REFUSED])
def test_refusals(call, given, error, message):
    with pytest.raises(error, match=message):
        call(**given) if isinstance(given, dict) else call(*given)


# ---- Cut Cross Entropy


IMPLEMENTATIONS = [*cce.LinearCrossEntropyImpl, *(i.name.lower() for i in cce.LinearCrossEntropyImpl)]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("filter_eps", ["auto", "high", None, 0.001])
def test_what_steers_kernels_changes_nothing(impl, filter_eps):
    e, c, targets = tensors_of("input", "weight")
    options = dict(accum_e_fp32=True, accum_c_fp32=True, filter_e_grad=False)
    assert torch.equal(CCE(e, c, targets, impl=impl, filter_eps=filter_eps, **options), CCE(e, c, targets))


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_z_loss(reduction, shift):
    leaves, targets = head(24)
    targets = targets.reshape(4, 6)

    def ours(input, weight, bias):
        e = input.reshape(4, 6, -1)
        loss, lse = CCE(e, weight, targets, bias, reduction=reduction, shift=shift, return_lse=True)
        return loss + 0.1 * cce.compute_z_loss(lse, targets, shift, reduction=reduction)

    def theirs(input, weight, bias):
        logits = logits_of(input.reshape(4, 6, -1), weight, bias)
        outputs = of_cce_by_logits(logits, targets, shift=shift, reduction=reduction)
        rows = outputs["lse"] ** 2
        if reduction != "none":
            rows = rows.sum() / (1 if reduction == "sum" else (targets[..., shift:] != -100).sum())
        return outputs["loss"] + 0.1 * rows

    check(ours, theirs, leaves)
    lse = torch.rand(4, 6)
    assert cce.compute_z_loss(lse) == lse.square().mean()
    assert cce.compute_z_loss(lse, reduction="sum") == lse.square().sum()


@pytest.mark.parametrize("return_lse", [False, True])
def test_module_of_cce(return_lse):
    e, c, bias, targets = tensors_of("input", "weight", "bias")
    module = cce.LinearCrossEntropy(-100, 3.0, "none", True, return_lse=return_lse)
    got = module(e, c, targets, bias)
    expected = CCE(e, c, targets, bias, softcap=3.0, reduction="none", shift=1, return_lse=return_lse)
    assert all(torch.equal(a, b) for a, b in zip(*((got, expected) if return_lse else ([got], [expected]))))
    assert not module.state_dict()


class Sharded(torch.Tensor):
    """Has the names that identify a DTensor."""

    placements = full_tensor = None


@pytest.mark.parametrize("name", ["e", "c", "targets"])
def test_a_distributed_tensor_is_refused_by_cce(name):
    given = {"e": torch.randn(2, 7), "c": torch.randn(11, 7), "targets": torch.zeros(2, dtype=torch.long)}
    given[name] = given[name].as_subclass(Sharded)
    with pytest.raises(ValueError, match=f"{name}: expected a plain torch.Tensor, got a DTensor"):
        CCE(**given)


@pytest.mark.slow
def test_patch_of_cce():
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=37, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.LlamaConfig(**sizes)
    stock, model = (transformers.LlamaForCausalLM(config) for _ in range(2))
    model.load_state_dict(stock.state_dict())
    assert cce.cce_patch(model, cce.LinearCrossEntropyImpl.CCE_EXACT, train_only=True) is model
    batch = torch.randint(0, 37, (2, 9))
    got, expected = model(batch, labels=batch), stock(batch, labels=batch)
    torch.testing.assert_close(got.loss, expected.loss)
    assert got.logits is None
    with torch.no_grad():
        assert model(batch, labels=batch).logits is not None
        cce.cce_patch(model)
        assert model(batch, labels=batch).logits is None
    for arguments, options, error, message in [
        (("llama",), {}, RuntimeError, "expected a model, got 'llama'"),
        ((config,), {}, RuntimeError, "expected a model, got 'LlamaConfig'"),
        ((model,), {"reduction": "sum"}, NotImplementedError, 'reduction: expected "mean"'),
        ((model,), {"impl": "flash"}, ValueError, "impl: expected one of"),
    ]:
        with pytest.raises(error, match=message):
            cce.cce_patch(*arguments, **options)


# ---- flash-linear-attention


@pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
def test_l2warp_of_frozen_tensors(frozen):
    leaves, target = head()
    fixed = leaves.pop(frozen)

    def with_fixed(function):
        return lambda **given: function(**given, **{frozen: fixed.to(next(iter(given.values())).dtype)})

    check(
        with_fixed(lambda input, weight, bias: FLA(input, target, weight, bias, **L2WARP)),
        with_fixed(lambda input, weight, bias: of_fla_by_logits(logits_of(input, weight, bias), target, **L2WARP)),
        leaves,
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_l2warp_adds_up_rows_of_one_class_in_float32(device):
    """It sums 4096 equal terms. A bfloat16 sum, like PyTorch's index_add_ on a GPU, stops after 256 of them."""
    rows = 4096
    input = torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16, device=device).repeat(rows, 1)
    weight = torch.tensor([[1.0, 0.0], [-30.0, 0.0]], dtype=torch.bfloat16, device=device, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.long, device=device)
    FLA(input, target, weight, use_l2warp=True, l2_penalty_factor=1.0).backward()
    torch.testing.assert_close(weight.grad[0].float().cpu(), torch.tensor([1.0, 0.5]), rtol=2**-8, atol=0)


def test_l2warp_of_no_row():
    input, weight, _ = tensors_of("input", "weight")
    loss = FLA(input[:0], torch.zeros(0, dtype=torch.long), weight.requires_grad_(), **L2WARP)
    loss.backward()
    assert loss == 0 and (weight.grad == 0).all()


def test_a_label_out_of_range_beside_l2warp():
    input, weight, target = tensors_of("input", "weight")
    target[2] = len(weight)
    with pytest.raises(IndexError, match=f"or ignore_index -100, got {len(weight)}"):
        FLA(input, target, weight, **L2WARP)


def test_l2warp_keeps_the_loss_and_may_be_run_again():
    *leaves, target = tensors_of("input", "weight", "bias")
    input, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    loss = FLA(input, target, weight, bias, **L2WARP)
    torch.testing.assert_close(loss, FLA(input, target, weight, bias))
    first = torch.autograd.grad(loss, weight, torch.tensor(0.5), retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], 2 * first)


class Model(nn.Module):
    """A head and a loss with the contract between FLA 0.6.0's models and a criterion."""

    def __init__(self, criterion, *, fused, bias=False):
        super().__init__()
        self.body, self.lm_head, self.criterion = nn.Linear(6, 8), nn.Linear(8, 17, bias), criterion
        self.fused = fused

    def forward(self, x, labels, num_items_in_batch=None):
        hidden, criterion = self.body(x), self.criterion
        if num_items_in_batch is not None:
            criterion = copy(criterion)
            criterion.reduction = "sum"
        shifted = torch.cat((labels[..., 1:], torch.full_like(labels[:, :1], criterion.ignore_index)), 1)
        if self.fused == "always" or (self.fused == "training" and self.training):
            loss = criterion(hidden, shifted, self.lm_head.weight, self.lm_head.bias)
        else:
            loss = criterion(self.lm_head(hidden).reshape(shifted.numel(), -1), shifted.reshape(-1))
        return loss if num_items_in_batch is None else loss / num_items_in_batch


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fused", ["always", "training"], ids=["GLA", "KDA"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("items", [None, torch.tensor(7)], ids=["mean", "items"])
def test_criterion_of_a_model(items, training, fused, bias):
    stock = Model(nn.CrossEntropyLoss(), fused="never", bias=bias)
    model = Model(fla.FusedLinearCrossEntropyLoss(), fused=fused, bias=bias)
    model.load_state_dict(stock.state_dict())
    model.train(training)
    x, labels = torch.randn(2, 5, 6), torch.randint(0, 17, (2, 5))
    labels[0, 3] = -100
    expected, got = stock(x, labels, items), model(x, labels, items)
    torch.testing.assert_close(got, expected)
    expected.backward(), got.backward()
    for (name, a), b in zip(model.named_parameters(), stock.parameters()):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_logits_have_the_same_options(reduction):
    input, weight, bias, target = tensors_of("input", "weight", "bias")
    options = dict(label_smoothing=0.1, logit_scale=0.3, logit_softcapping=2.0, reduction=reduction)
    loss = fla.FusedLinearCrossEntropyLoss(**options)
    torch.testing.assert_close(loss(logits_of(input, weight, bias), target), loss(input, target, weight, bias))
    assert loss(logits_of(input, weight, bias), torch.full_like(target, -100)) == 0


def test_process_groups_of_fla_and_verl(monkeypatch):
    input, weight, target = tensors_of("input", "weight")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    alone = verl.linear_cross_entropy(input, weight, target, 1.0, "none", object())
    assert torch.equal(alone[0], verl.linear_cross_entropy(input, weight, target)[0])
    FLA(input, target, weight, process_group="tp")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    with pytest.raises(NotImplementedError, match="process_group: expected None or a group of one rank"):
        FLA(input, target, weight, process_group="tp")


# ---- Liger


@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", [0, 5])
def test_every_row_ignored_by_liger(rows, reduction, weighted, scaling):
    """Loss and gradients are 0, which Liger's kernel leaves unwritten; the accuracy is that of no row."""
    leaves, _ = head(rows)
    input, weight = (leaves[name].float().requires_grad_() for name in ("input", "weight"))
    options = dict(ignore_index=3, lse_square_scale=0.1, reduction=reduction, use_token_scaling=scaling)
    options |= {"ce_weight": torch.rand(VOCAB)} if weighted else {}
    outputs = LIGER(input, weight, torch.full((rows,), 3), **options, **EVERY_OUTPUT)
    assert (outputs.loss == 0).all() and (outputs.z_loss == 0).all() and (outputs.predicted_tokens == -1).all()
    assert (outputs.token_accuracy == 0).all() if reduction == "none" else outputs.token_accuracy.isnan()
    outputs.loss.sum().backward()
    assert (input.grad == 0).all() and (weight.grad == 0).all()


def test_weights_of_zero_have_no_mean():
    input, weight, target = tensors_of("input", "weight")
    assert LIGER(input, weight, target, ce_weight=torch.zeros(VOCAB)).isnan()


def test_an_ignored_class_is_not_a_correct_one():
    """An ignored row has -1 as the place of its largest logit, which equals this ignore_index."""
    leaves, target = head(ignore_index=-1)
    compare("liger", leaves, target, ignore_index=-1, reduction="none")


def test_ties_are_of_the_first_class():
    weight = torch.tensor([[0.0], [1.0], [1.0], [1.0]])
    outputs = LIGER(torch.ones(1, 1), weight, torch.tensor([1]), **EVERY_OUTPUT)
    assert outputs.predicted_tokens.tolist() == [1] and outputs.token_accuracy == 1


def test_large_logits_scale_by_their_probability():
    """A target whose probability underflows has a loss and a gradient of 0, not NaN."""
    input = torch.tensor([[300.0]], requires_grad=True)
    loss = LIGER(input, torch.tensor([[1.0], [0.0]]), torch.tensor([1]), use_token_scaling=True)
    loss.backward()
    assert loss == 0 and input.grad == 0


def test_module_and_apply_of_liger():
    *leaves, target = tensors_of("input", "weight", "bias")
    input, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    loss, function = liger_kernel.LigerFusedLinearCrossEntropyLoss, liger_kernel.LigerFusedLinearCrossEntropyFunction
    assert isinstance(loss(reduction="sum")(weight, input, target, bias), torch.Tensor)
    options = dict(lse_square_scale=0.1, use_token_scaling=True, accum_dtype=torch.float32)
    module = loss(torch.rand(VOCAB), **options, **EVERY_OUTPUT)
    by_module = module(weight, input, target, bias)
    order = (module.ce_weight, -100, 0.1, 0.0, "mean", None, True, None, True, True, True, None, None, 4)
    outputs = function.apply(input, weight, target, bias, *order)
    for value, other in zip(vars(by_module).values(), outputs, strict=True):
        assert torch.equal(value, other)
    alone = function.apply(input, weight, target)
    assert alone[1:] == (None, None, None) and alone[0].requires_grad
    accuracy = loss(return_token_accuracy=True)(weight, input, target)
    assert accuracy.z_loss is None and accuracy.predicted_tokens is None and accuracy.token_accuracy is not None


def test_a_frozen_body_still_trains_the_head():
    input, weight, bias, target = tensors_of("input", "weight", "bias")
    LIGER(input, weight.requires_grad_(), target, bias.requires_grad_()).backward()
    assert weight.grad.abs().sum() > 0 and bias.grad.abs().sum() > 0


# ---- Quack and verl


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_module_of_quack(reduction, bias):
    ours = quack.LinearCrossEntropy(8, 11, bias, ignore_index=2, reduction=reduction, chunk_size=8)
    linear = nn.Linear(8, 11, bias)
    assert list(ours.state_dict()) == list(linear.state_dict())
    ours.load_state_dict(linear.state_dict())
    input, target = torch.randn(2, 8, 8), torch.randint(0, 11, (2, 8))
    expected = F.cross_entropy(linear(input).flatten(0, 1), target.flatten(), ignore_index=2, reduction=reduction)
    got = ours(input, target)
    torch.testing.assert_close(got, expected.reshape(got.shape))
    got.sum().backward(), expected.sum().backward()
    for a, b in zip(ours.parameters(), linear.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


def test_verls_ignored_rows_and_flat_operands():
    leaves, every = head(24, ignored=())
    hidden, weight = leaves["input"].float(), leaves["weight"].float()
    labels = every.clone()
    labels[8:11] = -100
    outputs = verl.linear_cross_entropy(hidden=hidden, weight=weight, labels=labels)
    expected = verl.linear_cross_entropy(hidden.reshape(4, 6, -1), weight, every.reshape(4, 6))
    for a, b in zip(outputs, expected, strict=True):
        assert torch.equal(a, torch.where(labels != -100, b, 0.0))
