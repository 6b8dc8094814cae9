"""logitless.trl.patch, and the function that replaces TRL's, beside TRL's and float64."""

import sys
import types

import logitless.trl
import pytest
import torch
from logitless.errors import UnsupportedError
from logitless.trl._log_probs import OUTPUTS, LogProbs
from logitless.trl._step import StandIn
from support import in_threads
from whole import close, whole_logits

pytestmark = pytest.mark.slow

TOKENS, VOCAB, HIDDEN = 23, 301, 24
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def current():
    import trl.trainer.utils

    return trl.trainer.utils._ChunkedLogProbFunction


def operands(dtype=torch.float32, bias=True):
    torch.manual_seed(5)
    hidden = torch.randn(TOKENS, HIDDEN).to(dtype)
    weight = (0.3 * torch.randn(VOCAB, HIDDEN)).to(dtype)
    return hidden, weight, torch.randn(VOCAB).to(dtype) if bias else None, torch.randint(VOCAB, (TOKENS,))


def run(apply, tensors, options, outputs=OUTPUTS, dtype=None):
    """Returns outputs and gradients of weighted log-probabilities and entropies."""
    hidden, weight, bias, targets = tensors
    leaves = [t if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in (hidden, weight, bias)]
    results = apply(*leaves, targets, *options, outputs)
    torch.manual_seed(7)
    loss = (results[0] * torch.randn(TOKENS)).sum()
    if results[1] is not None:
        loss = loss + (results[1] * torch.randn(TOKENS)).sum()
    loss.backward()
    return list(results), [None if leaf is None else leaf.grad for leaf in leaves]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("temperature", "softcap", "scale", "bias"),
    [
        (1.0, None, 1.0, False),
        (0.7, None, 1.0, True),
        (1, 5.0, 0.25, True),
        (1.3, None, 2.0, True),
        (0.9, 4.0, 1.0, False),
    ],
)
def test_returns_and_gradients_are_those_of_trl(dtype, temperature, softcap, scale, bias):
    tensors, options = operands(dtype, bias), (temperature, 64, softcap, scale)
    logitless.trl.patch()
    exact = run(whole_logits, tensors, options, dtype=torch.float64)
    stock = run(current().original.apply, tensors, options)
    fused = run(current().apply, tensors, options)
    assert fused[0][4].dtype == torch.bool
    for e, s, f in zip(exact[0][:4], stock[0][:4], fused[0][:4], strict=True):
        assert f.dtype == s.dtype and f.shape == s.shape
        assert close(f, s, e, UNIT[torch.float32])
    if dtype == torch.float32:
        assert torch.equal(fused[0][4], exact[0][4])
    for e, s, f in zip(exact[1], stock[1], fused[1], strict=True):
        assert (f is None) == (s is None)
        assert f is None or (f.dtype == dtype and close(f, s, e, UNIT[dtype]))


@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy"), ("is_top1", "mean_logits")])
def test_only_what_is_asked_for(outputs):
    logitless.trl.patch()
    tensors, options = operands(), (1.0, 64, None, 1.0)
    fused, stock = (apply(*tensors, *options, outputs) for apply in (current().apply, current().original.apply))
    assert [value is None for value in fused] == [value is None for value in stock]
    assert [value is None for value in fused[1:]] == [name not in outputs for name in OUTPUTS]


def test_top1_is_the_first_of_equal_logits():
    hidden, weight, _, _ = operands(bias=False)
    weight[200] = weight[100] = 10 * hidden[0]
    targets = torch.full((TOKENS,), 200)
    targets[1:] = 100
    logitless.trl.patch()
    fused, stock = (f.apply(hidden, weight, None, targets, 1.0, 64)[4] for f in (current(), current().original))
    assert torch.equal(fused, stock) and not fused[0]


def test_no_tokens():
    logitless.trl.patch()
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    results = current().apply(
        hidden, weight, None, torch.zeros(0, dtype=torch.int64), 1.0, 64, outputs=("entropy", "is_top1")
    )
    results[0].sum().backward()
    assert not weight.grad.any() and results[4].shape == (0,)


def test_options_reach_the_operator():
    tensors, options = operands(), (1.0, 64, None, 1.0, ("log_probs",))
    with pytest.raises(ValueError, match="gradient"):
        logitless.trl.patch(gradient="coarse")
    with pytest.raises(ValueError, match="max_workspace_bytes"):
        logitless.trl.patch(max_workspace_bytes=0)
    logitless.trl.patch(max_workspace_bytes=1)
    with pytest.raises(logitless.BudgetTooSmallError):
        current().apply(*tensors, *options)
    logitless.trl.patch(gradient="always-sparsified", threshold=0.5)
    exact = run(current().original.apply, tensors, options[:4], ("log_probs",))[1][0]
    sparsified = run(current().apply, tensors, options[:4], ("log_probs",))[1][0]
    assert torch.nn.functional.cosine_similarity(exact.flatten(), sparsified.flatten(), dim=0) > 0.5
    assert not torch.allclose(exact, sparsified)


def holders(value):
    names = [name for name in sys.modules if name == "trl" or name.startswith("trl.")]
    return {(n, k) for n in names for k, v in list(vars(sys.modules[n]).items()) if v is value}


def test_patch_reaches_every_module_and_unpatch_goes_back():
    import trl.kernels  # noqa: F401
    from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer, SFTTrainer  # noqa: F401

    original = current()
    before = holders(original)
    assert {("trl.trainer.utils", "_ChunkedLogProbFunction"), ("trl.kernels", "ChunkedLogProbFunction")} <= before
    logitless.trl.patch()
    assert isinstance(current(), LogProbs) and holders(original) == set() and holders(current()) == before
    logitless.trl.patch(max_workspace_bytes=1 << 20)
    assert current().original is original and current().options["max_workspace_bytes"] == 1 << 20
    assert holders(current()) == before
    logitless.trl.unpatch()
    logitless.trl.unpatch()
    assert holders(original) == before


def test_first_steps_in_several_threads_put_in_one_stand_in():
    from logitless.trl import _patch

    held = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            in_threads(lambda _: _patch.install(), *range(4))
            assert len({id(value) for value in stand_ins()}) == 3
            logitless.trl.unpatch()
            assert not stand_ins()
    finally:
        sys.setswitchinterval(held)


def stand_ins():
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "trl" and module]
    return [v for module in modules for v in list(vars(module).values()) if isinstance(v, StandIn)]


@pytest.mark.parametrize("missing", [True, False])
def test_another_trl_is_refused_by_name(monkeypatch, missing):
    import trl
    import trl.trainer.utils

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, targets):
            raise NotImplementedError

    monkeypatch.setattr(trl, "__version__", "1.99.0")
    if missing:
        monkeypatch.delattr(trl.trainer.utils, "_ChunkedLogProbFunction")
    else:
        monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Other)
    with pytest.raises(UnsupportedError, match=r"trl 1\.99\.0; known: trl 1\.16\.0"):
        logitless.trl.patch()
    logitless.trl.unpatch()


def test_partitioned_weights_are_refused_where_gradients_are_wanted():
    logitless.trl.patch()
    hidden, weight, _, targets = operands(bias=False)
    weight.ds_id = 3
    call = (hidden, weight, None, targets, 1.0, 64, None, 1.0, ("log_probs",))
    assert current().apply(*call)[0].shape == (TOKENS,)
    with pytest.raises(UnsupportedError, match="ZeRO-3"):
        current().apply(hidden.requires_grad_(), *call[1:])


def test_quantised_heads_are_refused():
    bnb = pytest.importorskip("bitsandbytes")
    head = bnb.nn.Linear4bit(HIDDEN, VOCAB, bias=False, quant_type="nf4").to("cpu")
    hidden, _, _, targets = operands()
    logitless.trl.patch()
    with pytest.raises(UnsupportedError, match="expected a head that is not quantised, got a Params4bit"):
        current().apply(hidden, head.weight, None, targets, 1.0, 64)


def test_a_head_in_float32():
    """cast_lm_head_to_fp32 passes float32 hidden states and a 16-bit weight."""
    logitless.trl.patch()
    hidden, weight, _, targets = operands(bias=False)
    tensors, options = (hidden, weight.bfloat16(), None, targets), (1.0, 64, None, 1.0)
    exact = run(whole_logits, tensors, options, dtype=torch.float64)
    stock, fused = (run(f.apply, tensors, options) for f in (current().original, current()))
    for e, s, f in zip(exact[0][:4], stock[0][:4], fused[0][:4], strict=True):
        assert close(f, s, e, UNIT[torch.float32])
    for e, s, f in zip(exact[1][:2], stock[1][:2], fused[1][:2], strict=True):
        assert f.dtype == s.dtype and close(f, s, e, UNIT[f.dtype])


def test_autocast():
    logitless.trl.patch()
    tensors, options = operands(), (1.0, 64, None, 1.0)
    exact = run(whole_logits, tensors, options, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        stock, fused = (run(f.apply, tensors, options) for f in (current().original, current()))
    for e, s, f in zip(exact[1], stock[1], fused[1], strict=True):
        assert f.dtype == s.dtype and close(f, s, e, UNIT[torch.bfloat16])


@pytest.mark.parametrize("valid", [0, 7])
def test_only_rows_with_a_label_as_on_a_gpu(monkeypatch, trainers, valid):
    """There TRL passes the rows that have a label, possibly none."""
    import trl.trainer.utils

    model = trainers.make_model("gemma2")
    trl.trainer.utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    ids = torch.randint(3, 90, (2, 12))
    labels = torch.where(torch.arange(12) < 12 - valid, -100, ids)
    results = []
    for patched in (False, True):
        if patched:
            logitless.trl.patch()
            monkeypatch.setattr(trl.trainer.utils, "_use_triton", lambda device: True)
        model.zero_grad()
        out = model(input_ids=ids, labels=labels, fused_lm_head=True)
        out.loss.backward()
        results.append((out, {name: p.grad for name, p in model.named_parameters()}))
    (stock, expected), (fused, got) = results
    for key in stock:
        assert torch.allclose(stock[key].float(), fused[key].float(), atol=1e-5), key
    for name, gradient in expected.items():
        assert torch.allclose(gradient, got[name], atol=1e-5), name


def test_compiled_in_one_graph(trainers):
    import trl.trainer.utils

    logitless.trl.patch()
    tensors, options = operands(), (0.7, 64, 5.0, 0.5)
    outputs = ("log_probs", "entropy", "is_top1")

    def call(*arguments):
        return trl.trainer.utils._ChunkedLogProbFunction.apply(*arguments)

    eager = run(call, tensors, options, outputs)
    compiled = run(torch.compile(call, backend="aot_eager", fullgraph=True), tensors, options, outputs)
    for a, b in zip([*eager[0], *eager[1]], [*compiled[0], *compiled[1]], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    model, ids = trainers.make_model("llama"), torch.arange(3, 9)[None]
    trl.trainer.utils.add_fused_lm_head(model)
    torch.compile(model, backend="eager", fullgraph=True)(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()


def test_modules_without_attributes_do_no_harm():
    sys.modules["trl.nothing"] = None
    sys.modules["trl.something"] = types.ModuleType("trl.something")
    try:
        logitless.trl.patch()
        logitless.trl.unpatch()
    finally:
        del sys.modules["trl.nothing"], sys.modules["trl.something"]


def test_a_screen_is_refused():
    with pytest.raises(UnsupportedError, match='screen: expected "none", as TRL needs the loss of each token'):
        logitless.trl.patch(gradient="sparsified", screen="fp8")


def test_batch_invariant():
    with pytest.raises(ValueError, match="batch_invariant"):
        logitless.trl.patch(gradient="sparsified", batch_invariant=True)
    tensors, options = operands(), (0.7, 64, None, 1.0)
    logitless.trl.patch(batch_invariant=True)
    hidden, weight, bias, targets = tensors
    together = current().apply(hidden, weight, bias, targets, *options)
    alone = current().apply(hidden[3:4], weight, bias, targets[3:4], *options)
    assert all(torch.equal(row, rows[3:4]) for row, rows in zip(alone, together, strict=True))
