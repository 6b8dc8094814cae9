"""logitless.nn.FusedHead in place of a transformers model's head."""

import copy

import logitless.nn
import logitless.transformers
import pytest
import torch
import transformers
from tiny import VOCAB, build

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("tied", [False, True])
def test_forward_generate_and_state_dict_stay(tied):
    stock = build("LlamaForCausalLM").eval()
    stock.config.tie_word_embeddings = tied
    stock.tie_weights()
    model = copy.deepcopy(stock)
    model.lm_head = logitless.nn.FusedHead.from_linear(model.lm_head, shift=1)
    model.tie_weights()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert list(model.state_dict()) == list(stock.state_dict())
    ids = torch.randint(3, VOCAB, (2, 9))
    generated = [m.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (model, stock)]
    assert torch.equal(*generated)
    expected = stock(ids, labels=ids).loss
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)  # with logits, by the model's own code
    loss = model.lm_head(model.model(ids).last_hidden_state, ids)
    torch.testing.assert_close(loss, expected)
    loss.backward(), expected.backward()
    theirs = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, msg=name)


def test_saved_and_loaded(llama, tmp_path):
    llama.lm_head = logitless.nn.FusedHead.from_linear(llama.lm_head)
    llama.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, llama.lm_head.weight)


def test_the_models_own_softcap_is_applied_once():
    """This includes a patched model, whose loss is computed by its own code."""
    model = build("Gemma2ForCausalLM").eval()
    ids = torch.randint(0, VOCAB, (2, 5))
    cap = model.config.final_logit_softcapping
    expected = model(ids, labels=ids)
    model.lm_head = logitless.nn.FusedHead.from_linear(model.lm_head, softcap=cap, shift=1)
    assert cap and torch.equal(model(ids).logits, expected.logits)
    hidden = model.model(ids).last_hidden_state
    torch.testing.assert_close(model.lm_head.logits(hidden), expected.logits)
    torch.testing.assert_close(model.lm_head(hidden, ids), expected.loss)
    out = logitless.transformers.patch(model)(ids, labels=ids)
    assert out.logits is None
    torch.testing.assert_close(out.loss, expected.loss)
