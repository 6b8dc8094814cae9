"""The self-check leaves out numbers that are not finite, and compares the rest, in a later batch if needed."""

import copy
import math
from unittest import mock

import logitless.transformers
import pytest
import torch
from compare import check_patched, make_wrong
from logitless.errors import UnsupportedError
from logitless.transformers import _loss
from logitless.transformers._logits import ROWS, Logits
from tiny import TEXT, VOCAB, build, inputs

pytestmark = pytest.mark.slow

PRECISIONS = ["float32", "bfloat16", "float16"]
UNUSED = 5  # entries at the vocabulary's end


def padded(model, rows=slice(0, 2)):
    """Puts NaN into hidden states of ignored labels, as attention does in rows that are masked as a whole."""

    def spoil(module, args, out):
        out = out.clone()
        out[0, rows] = math.nan
        return out

    model.model.norm.register_forward_hook(spoil)


def biased(model):
    head = model.lm_head
    head.bias = torch.nn.Parameter(torch.zeros(VOCAB, dtype=head.weight.dtype))
    with torch.no_grad():
        head.bias[-UNUSED:] = -math.inf


def spoiled(model):
    """Spoils entries that are never used."""
    with torch.no_grad():
        model.lm_head.weight[-UNUSED:] = math.nan
    model.lm_head.register_forward_hook(lambda module, args, out: out[..., :-UNUSED])
    model.config.vocab_size = VOCAB - UNUSED


DAMAGES = [padded, biased, spoiled]


def damaged(damage, precision):
    model = build("LlamaForCausalLM")
    model.lm_head.register_forward_hook(lambda module, args, out: out * 1.5)
    damage(model)
    return model.to(getattr(torch, precision))


def looks_again(model, batch):
    """Returns whether the self-check compares rows of another batch."""
    with mock.patch.object(_loss, "compare", wraps=_loss.compare) as compare:
        model(**batch)
    return compare.called


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_right_passes(damage, precision):
    """Both losses are float32 sums of logits that were rounded twice, with as many terms as the vocabulary at most."""
    model = damaged(damage, precision)
    batch = inputs(model)
    stock = model(**batch)
    loss = logitless.transformers.patch(model)(**batch).loss
    logits = stock.logits.detach()
    largest = float(logits[logits.isfinite()].abs().max())
    unit = torch.finfo(getattr(torch, precision)).eps + VOCAB**0.5 * torch.finfo(torch.float32).eps
    assert abs(float(loss.detach()) - float(stock.loss.detach())) <= 2 * unit * largest


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_wrong_factor_is_refused(damage, precision, monkeypatch):
    make_wrong(monkeypatch)
    model = damaged(damage, precision)
    with pytest.raises(UnsupportedError, match="differs from the fused head's by"):
        logitless.transformers.patch(model)(**inputs(model))


def test_a_bias_of_minus_infinity_that_is_left_out_is_refused(monkeypatch):
    def bias_of(model):
        bias = torch.zeros(VOCAB)
        bias[::2] = -math.inf
        model.lm_head.register_forward_hook(lambda module, args, out: out + bias)

    model = damaged(bias_of, "float32")
    batch = inputs(model)
    batch["labels"] = torch.where(batch["labels"] % 2 == 1, batch["labels"], -100)
    stock = model(**batch).loss
    torch.testing.assert_close(logitless.transformers.patch(model)(**batch).loss, stock)
    monkeypatch.setattr(Logits, "with_bias", lambda self, bias: self)
    with pytest.raises(UnsupportedError, match="differs from the fused head's by"):
        logitless.transformers.patch(model)(**batch)


def test_gradients_under_a_bias_of_minus_infinity():
    check_patched(damaged(biased, "float32"))


@pytest.mark.parametrize("seed", range(12))
def test_any_rows_may_be_missing(seed, monkeypatch):
    """A wrong formula is refused if and only if a compared row is finite, in this batch or the next."""
    generator = torch.Generator().manual_seed(seed)
    missing = torch.rand(TEXT, generator=generator) < [0.3, 0.7, 0.95, 1.0][seed % 4]
    model = build("LlamaForCausalLM")
    model.lm_head.register_forward_hook(lambda module, args, out: out * 1.5)
    spoil = model.model.norm.register_forward_hook(lambda m, args, out: out.masked_fill(missing[..., None], math.nan))
    batch = inputs(model)
    stock = model(**batch).loss
    other = logitless.transformers.patch(copy.deepcopy(model))
    torch.testing.assert_close(other(**batch).loss, stock, equal_nan=True)
    looked_at = ~missing.flatten()[torch.linspace(0, missing.numel() - 1, ROWS).long()]
    assert looks_again(other, batch) == (not looked_at.all())

    make_wrong(monkeypatch)
    logitless.transformers.patch(model)
    if looked_at.any():
        with pytest.raises(UnsupportedError, match=f"on {int(looked_at.sum())} tokens of this batch the loss of"):
            model(**batch)
    else:
        model(**batch)
    spoil.remove()
    with pytest.raises(UnsupportedError, match=f"on {ROWS} tokens of this batch the loss of"):
        model(**batch)


def test_rows_that_are_compared_add_up(llama):
    padded(llama, slice(0, 7))
    batch = inputs(llama)
    logitless.transformers.patch(llama)
    assert [looks_again(llama, batch) for _ in range(4)] == [True, True, False, False]  # 4 rows of 8 each time


@pytest.mark.parametrize("entries", [slice(0, 3), slice(None)])
def test_weights_that_are_not_finite_and_used_make_the_loss_nan_as_the_models_own(llama, entries):
    with torch.no_grad():
        llama.lm_head.weight[entries] = math.nan
    batch = inputs(llama)
    assert llama(**batch).loss.isnan()
    assert logitless.transformers.patch(llama)(**batch).loss.isnan()
    assert looks_again(llama, batch) == (entries == slice(None))


def test_an_overflow_is_left_to_the_scaler(llama):
    """The first steps of float16 training overflow until the scaler has found the loss scale."""
    batch, scaler = inputs(llama), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(llama.parameters(), lr=1e-3)
    logitless.transformers.patch(llama)
    for scale in (1e5, 1.0):
        handle = llama.model.norm.register_forward_hook(lambda module, args, out, s=scale: out * s)
        before = llama.lm_head.weight.detach().clone()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = llama(**batch).loss
        scaler.scale(loss).backward()
        assert bool(loss.isfinite()) == (scale == 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(llama.lm_head.weight, before) == (scale != 1.0)
        assert looks_again(llama, batch) == (scale != 1.0)
        handle.remove()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_beyond_the_range_of_16_bits_pass(llama, precision):
    """In float16 they are infinite; the fused head has them in float32."""
    llama.lm_head.register_forward_hook(lambda module, args, out: out * 1e-4)
    llama.to(getattr(torch, precision))
    with torch.no_grad():
        llama.lm_head.weight.mul_(2.0**15)
    batch = inputs(llama)
    assert torch.isfinite(logitless.transformers.patch(llama)(**batch).loss)
    assert not looks_again(llama, batch)
