"""The layer of a patched model beside clients' other changes to a model."""

import copy
import functools
import io
import itertools
import pickle
import types

import logitless.transformers
import pytest
import torch
import transformers
from compare import Reference, step
from logitless.errors import UnsupportedError
from tiny import inputs
from torch.nn.utils import parametrize

pytestmark = pytest.mark.slow


def test_the_class_is_one_of_its_own_while_the_model_is_patched(llama):
    kind = type(llama)
    logitless.transformers.patch(llama)
    assert isinstance(llama, kind) and type(llama).__name__ == kind.__name__ and repr(llama).startswith(kind.__name__)
    assert type(llama).forward is kind.forward and llama.config_class is kind.config_class
    assert llama.forward == llama.forward and isinstance(llama.forward, types.MethodType)
    assert "forward" not in llama.__dict__ and not hasattr(llama, "_old_forward")
    other = logitless.transformers.patch(copy.deepcopy(llama))
    assert type(other) is type(llama)
    logitless.transformers.unpatch(llama)
    assert type(llama) is kind and "_logitless_patch" not in llama.__dict__


def test_tensors_of_the_model_itself_are_parametrized_and_no_more(llama):
    """In any order with the patch, the class becomes the model's own in the end, and only then."""
    llama.extra = torch.nn.Parameter(torch.ones(3))
    llama.other = torch.nn.Parameter(torch.ones(3))
    batch, kind = inputs(llama), type(llama)
    pairs = ("patch", "unpatch"), ("extra", "no extra"), ("other", "no other")
    for order in itertools.permutations(sum(pairs, ())):
        if any(order.index(first) > order.index(second) for first, second in pairs):
            continue
        model = copy.deepcopy(llama)
        for place, name in enumerate(order, 1):
            done = order[:place]
            if name in ("patch", "unpatch"):
                getattr(logitless.transformers, name)(model)
            elif name.startswith("no "):
                parametrize.remove_parametrizations(model, name[3:])
            else:
                parametrize.register_parametrization(model, name, torch.nn.Softplus())
            patched = "patch" in done and "unpatch" not in done
            for tensor in ("extra", "other"):
                here = tensor in done and f"no {tensor}" not in done
                assert parametrize.is_parametrized(model, tensor) == here, order
            if place in (3, 5):
                assert (copy.deepcopy(model)(**batch).logits is None) == patched, order
        assert type(model) is kind and torch.equal(model.extra, torch.nn.functional.softplus(llama.extra)), order


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), "torch"])
def test_copies_of_all_kinds_keep_the_patch(llama, how):
    def saved(model):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    batch = inputs(llama)
    logitless.transformers.patch(llama, max_workspace_bytes=1 << 20)
    loss = llama(**batch).loss
    other = (saved if how == "torch" else how)(llama)
    outputs = other(**batch)
    assert outputs.logits is None and torch.equal(outputs.loss, loss)
    logitless.transformers.unpatch(other)
    assert type(other) is transformers.LlamaForCausalLM and other(**batch).logits is not None


def test_a_forward_that_is_no_method(llama):
    """It is a partial function of the model's own forward, stored before or after, as by accelerate's hooks."""
    batch = inputs(llama)
    reference = Reference.of(llama, batch)
    own = functools.partial(llama.forward, use_cache=False)
    for first in (True, False):
        if first:
            llama.forward = own
        logitless.transformers.patch(llama)
        if not first:
            llama.forward = functools.partial(llama.forward, use_cache=False)
        result = step(llama, batch)
        assert reference.share(result) <= 1 and result.outputs.logits is None
        logitless.transformers.unpatch(llama)
        assert not first or llama.forward is own
        del llama.forward


def test_a_wrapper_that_takes_anything(llama):
    """Its signature names no labels; the class's signature gives their place."""
    batch, forward = inputs(llama), llama.forward
    llama.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    logitless.transformers.patch(llama)
    place = list(type(llama).forward.__annotations__).index("labels")
    assert llama(batch["input_ids"], *[None] * (place - 1), batch["labels"]).logits is None


def test_a_wrapper_that_takes_the_gradients_away_or_the_labels(llama):
    """The model decides about a wrapper around the patch. A wrapper that came before it is refused if its effect is
    unknown."""
    batch = inputs(llama)

    def without(model, drop):
        forward = model.forward

        def wrapper(**kwargs):
            if drop:
                return forward(**kwargs | {"labels": None})
            with torch.no_grad():
                return forward(**kwargs)

        model.forward = wrapper
        return model

    for drop in (True, False):
        stock = without(copy.deepcopy(llama), drop)(**batch)
        outer = without(logitless.transformers.patch(copy.deepcopy(llama)), drop)(**batch)
        assert torch.equal(outer.logits, stock.logits) and (outer.loss is None) == drop
        inner = logitless.transformers.patch(without(copy.deepcopy(llama), drop))
        if drop:
            with pytest.raises(UnsupportedError, match="is not made of the logits"):
                inner(**batch)
        else:
            assert torch.equal(inner(**batch).loss, stock.loss)


def test_a_wrapper_that_calls_twice(llama):
    """R-Drop does this: two passes, each with its own loss."""
    batch = inputs(llama)
    logitless.transformers.patch(llama)
    forward = llama.forward

    def twice(**kwargs):
        first, second = forward(**kwargs), forward(**kwargs)
        assert first.logits is None and second.logits is None
        first.loss = first.loss + second.loss
        return first

    one = llama(**batch).loss
    llama.forward = twice
    torch.testing.assert_close(llama(**batch).loss, 2 * one)


def test_a_class_that_is_patched_later_is_followed(llama, monkeypatch):
    """Liger's functions do this: they replace the forward of the class."""
    calls, own = [], transformers.LlamaForCausalLM.forward

    def forward(self, *args, **kwargs):
        calls.append(self)
        return own(self, *args, **kwargs)

    logitless.transformers.patch(llama)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    assert llama(**inputs(llama)).logits is None and calls == [llama]


def test_a_whole_model_under_checkpointing(llama):
    batch = inputs(llama)
    reference = Reference.of(llama, batch)
    logitless.transformers.patch(llama).zero_grad()
    loss = torch.utils.checkpoint.checkpoint(lambda: llama(**batch).loss, use_reentrant=False)
    loss.backward()
    gradients = {name: p.grad for name, p in llama.named_parameters()}
    assert reference.share(type(reference.stock)(loss.detach(), gradients)) <= 1


@pytest.mark.parametrize("where", ["outside", "in place", "a module around it", "its forward there"])
def test_inference_is_one_graph(llama, where):
    class Around(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, **kwargs):
            return self.model.forward(**kwargs) if where == "its forward there" else self.model(**kwargs)

    ids = inputs(llama)["input_ids"]
    logitless.transformers.patch(llama)
    if where == "in place":
        called = llama
        llama.compile(backend="eager", fullgraph=True)
    else:
        called = torch.compile(llama if where == "outside" else Around(llama), backend="eager", fullgraph=True)
    torch._dynamo.reset()
    with torch.no_grad():
        logits = called(input_ids=ids, use_cache=False).logits
        logitless.transformers.unpatch(llama)
        torch.testing.assert_close(logits, llama(input_ids=ids).logits)


def test_accelerates_device_hooks_stay(llama):
    accelerate = pytest.importorskip("accelerate")
    batch = inputs(llama)
    reference = Reference.of(llama, batch)
    logitless.transformers.patch(llama)
    accelerate.dispatch_model(llama, {"": "cpu"}, force_hooks=True)
    for change in (logitless.transformers.patch, logitless.transformers.unpatch, logitless.transformers.patch):
        change(llama)
        assert hasattr(llama, "_hf_hook")
        assert reference.share(step(llama, batch)) <= 1
    accelerate.hooks.remove_hook_from_module(llama, recurse=True)
    result = step(llama, batch)
    assert reference.share(result) <= 1 and result.outputs.logits is None


def test_adapters_around_a_model_whose_forward_was_replaced(llama):
    """PEFT calls forward itself, past the hooks of the module."""
    peft = pytest.importorskip("peft")
    batch, forward = inputs(llama), llama.forward
    model = peft.get_peft_model(llama, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    logitless.transformers.patch(model)
    llama.forward = forward  # from before the patch
    assert model(**batch).logits is None
    logitless.transformers.unpatch(model)
    assert model(**batch).logits is not None
