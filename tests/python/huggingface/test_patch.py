"""When the fused head is used, what stays unchanged, and what is an error."""

import contextlib
import threading
import types

import logitless
import logitless.transformers
import pytest
import torch
from compare import Reference, check_patched, step
from logitless.errors import UnsupportedError
from logitless.transformers import _loss
from tiny import TEXT, VOCAB, inputs
from torch.nn.utils import parametrize

pytestmark = pytest.mark.slow


def count_losses(monkeypatch):
    calls, original = [], _loss.linear_cross_entropy
    counted = lambda *args, **kwargs: calls.append(kwargs) or original(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(_loss, "linear_cross_entropy", counted)
    return calls


def test_the_original_path_serves_what_needs_logits(llama, monkeypatch):
    batch, calls = inputs(llama), count_losses(monkeypatch)
    ids = batch["input_ids"]
    stock = llama(input_ids=ids).logits
    logitless.transformers.patch(llama)
    assert torch.equal(llama(input_ids=ids).logits, stock)
    assert llama(**batch | {"labels": batch["labels"][:, -2:]}, logits_to_keep=2).logits.shape == (TEXT[0], 2, VOCAB)
    places = torch.tensor([1, 3])
    assert llama(**batch | {"labels": batch["labels"][:, :2]}, logits_to_keep=places).logits.shape[1] == 2
    with torch.no_grad():
        assert llama(**batch).logits.shape == (*TEXT, VOCAB)
    llama.eval()
    assert llama.generate(ids, max_new_tokens=3, do_sample=False).shape == (TEXT[0], TEXT[1] + 3)
    assert not calls
    logitless.transformers.patch(llama, evaluate=True)
    with torch.no_grad():
        assert llama(**batch).logits is None
    assert len(calls) == 1


def test_labels_may_be_positional_and_outputs_a_tuple(llama):
    batch = inputs(llama)
    stock = llama(**batch, return_dict=False)
    logitless.transformers.patch(llama)
    fused = llama(**batch, return_dict=False)
    assert fused[1] is None and len(fused) == len(stock)
    torch.testing.assert_close(fused[0], stock[0], atol=1e-5, rtol=0)
    place = list(type(llama).forward.__annotations__).index("labels")
    positional = [batch["input_ids"], *[None] * (place - 1), batch["labels"]]
    assert llama(*positional).logits is None


@pytest.mark.parametrize("items", [7, torch.tensor(7), torch.tensor(7.0)])
def test_num_items_in_batch(llama, items):
    check_patched(llama, inputs(llama) | {"num_items_in_batch": items})


def test_shift_labels(llama):
    batch = inputs(llama)
    batch["shift_labels"] = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    check_patched(llama, batch)


def test_gradient_checkpointing_and_autocast(llama):
    batch = inputs(llama)
    llama.gradient_checkpointing_enable()
    stock = check_patched(llama, batch).stock
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert abs(float(step(llama, batch)[0] - stock[0])) < 0.1
        logitless.transformers.patch(llama)  # with a self-check under autocast
        assert abs(float(step(llama, batch)[0] - stock[0])) < 0.1


def test_compiled_models_have_the_same_loss_and_gradients(llama):
    batch = inputs(llama)
    reference = Reference.of(llama, batch)
    logitless.transformers.patch(llama)
    compiled = torch.compile(llama, backend="eager")
    compiled(**batch).loss.backward()
    assert reference.share(step(llama, batch)) <= 1
    assert reference.share(step(compiled, batch)) <= 1
    assert compiled(input_ids=batch["input_ids"]).logits.shape == (*TEXT, VOCAB)


def test_a_compiled_model_is_patched(llama):
    batch, compiled = inputs(llama), torch.compile(llama, backend="eager")
    reference = Reference.of(llama, batch)
    compiled(**batch)
    assert logitless.transformers.patch(compiled) is compiled
    assert reference.share(step(compiled, batch)) <= 1
    assert compiled(**batch).logits is None
    logitless.transformers.unpatch(compiled)
    assert compiled(**batch).logits is not None


def test_a_compiled_backbone_stays_compiled(llama):
    batch, graphs = inputs(llama), []

    def backend(graph, examples):
        graphs.append(graph)
        return graph.forward

    reference = Reference.of(llama, batch)
    logitless.transformers.patch(llama)
    llama.model.compile(backend=backend)
    assert reference.share(step(llama, batch)) <= 1
    assert reference.share(step(torch.compile(llama, backend="eager"), batch)) <= 1
    assert len(graphs) == 1


def test_hooks_of_the_head_and_the_model_stay(llama):
    seen = []
    llama.lm_head.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    llama.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    llama.register_forward_hook(lambda module, args, output: seen.append("model"))
    batch = inputs(llama)
    reference = Reference.of(llama, batch)
    del seen[:]
    assert reference.share(step(logitless.transformers.patch(llama), batch)) <= 1
    assert seen == ["pre", "model"]


@pytest.mark.parametrize("context", [contextlib.nullcontext, parametrize.cached])
def test_a_parametrized_head(llama, context):
    """The self-check makes logits without gradients, and must not be the first to use a cached weight."""
    torch.nn.utils.parametrizations.weight_norm(llama.lm_head)
    batch = inputs(llama)
    reference = Reference.of(llama, batch)
    logitless.transformers.patch(llama)
    for _ in range(2):
        with context():
            assert reference.share(step(llama, batch)) <= 1


def test_label_smoothing_class_weights_and_a_loss_of_ones_own(llama):
    def loss_function(logits, labels, vocab_size, **kwargs):
        weight = torch.linspace(0.5, 1.5, vocab_size)
        shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
        return torch.nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)(shifted, labels[..., 1:].reshape(-1))

    llama.loss_function = loss_function
    check_patched(llama)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda z: z.masked_fill(z > 0, 0.0), "gt"),
        (lambda z: z.softmax(-1), "softmax"),
        (lambda z: z[..., ::2], "vocabulary"),
        (lambda z: z * torch.ones(VOCAB), "mul"),
        (lambda z: z + torch.ones(8, 1), "bias"),
        (lambda z: z + 1, "add"),
        (lambda z: torch.tanh(z) + torch.ones(VOCAB), "after tanh"),
        (lambda z: torch.tanh(torch.tanh(z)), "second tanh"),
        (lambda z: -1.0 * torch.tanh(z), "after tanh"),
        (lambda z: z.mul_(2.0), "mul_"),
        (lambda z: z.transpose(1, 2), "transpose"),
        (lambda z: z.detach(), "detach"),
        (lambda z: 1.0 / z, "div"),
        (lambda z: torch.cat([z, z]), "cat"),
        (lambda z: z.view(torch.int32), "view"),
        (lambda z: z.int(), "int"),
        (lambda z: z * torch.tensor(2.0, requires_grad=True), "learned"),
    ],
)
def test_a_transform_that_is_not_known_is_refused_by_name(llama, change, name):
    llama.lm_head.register_forward_hook(lambda module, args, output: change(output))
    logitless.transformers.patch(llama)
    with pytest.raises(UnsupportedError, match=f"LlamaForCausalLM.*{name}"):
        llama(**inputs(llama))
    assert "forward" not in llama.lm_head.__dict__


@pytest.mark.parametrize(
    "change",
    [
        lambda z: torch.tanh(z / 3.0) * 3.0,
        lambda z: 5.0 * torch.tanh((z * 0.5 + torch.linspace(-1, 1, VOCAB)) / 3.0),
        lambda z: torch.tanh(z),
        lambda z: (2.0 * z + torch.linspace(-1, 1, VOCAB)) / 4.0 + torch.linspace(0, 1, VOCAB)[None, None],
        lambda z: torch.linspace(-1, 1, VOCAB) + z.float().to(torch.float64).to(torch.float32) * torch.tensor(-0.5),
        lambda z: z.flatten(0, 1).unsqueeze(0).squeeze(0).reshape(TEXT[0], TEXT[1], VOCAB),
        lambda z: z[:, torch.arange(TEXT[1])][..., None, :, :][:, 0],
    ],
)
def test_transforms_that_are_known_are_exact(llama, change):
    llama.lm_head.register_forward_hook(lambda module, args, output: change(output))
    check_patched(llama)


def of_changed_hidden_states(model, logits, labels):
    logits.logits.terms[0].hidden.mul_(1.0)
    return torch.nn.functional.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))


@pytest.mark.parametrize(("loss_of", "message"), [
    (of_changed_hidden_states, "in place"),
    (lambda model, logits, labels: model.model.norm.weight.sum(), "is not made of the logits"),
])  # fmt: skip
def test_a_loss_that_is_not_of_the_head_is_refused(llama, loss_of, message):
    llama.loss_function = lambda logits, labels, vocab_size, **kwargs: loss_of(llama, logits, labels)
    logitless.transformers.patch(llama)
    with pytest.raises(UnsupportedError, match=message):
        llama(**inputs(llama))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_labels_that_are_no_indices_are_named(llama, dtype):
    batch = inputs(llama)
    logitless.transformers.patch(llama)
    with pytest.raises(TypeError, match=f"(labels|target): expected int64 or int32 class indices, got {dtype}"):
        llama(**batch | {"labels": batch["labels"].to(dtype)})


def test_a_head_that_is_no_plain_linear_layer_is_refused(llama):
    class Linear4bit(torch.nn.Linear):
        def forward(self, input):
            return super().forward(input)

    with pytest.raises(TypeError, match="got int"):
        logitless.transformers.patch(3)
    with pytest.raises(TypeError, match="got Linear"):
        logitless.transformers.patch(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="takes labels, got LlamaModel"):
        logitless.transformers.patch(llama.model)
    llama.lm_head = Linear4bit(32, VOCAB)
    with pytest.raises(UnsupportedError, match="Linear4bit"):
        logitless.transformers.patch(llama)
    assert "forward" not in llama.__dict__


def test_a_weight_that_is_gone_is_refused(llama):
    def free(module, args, output):
        module.weight.untyped_storage().resize_(0)

    batch = inputs(llama)
    logitless.transformers.patch(llama)
    llama.lm_head.register_forward_hook(free)
    with pytest.raises(UnsupportedError, match="freed before the loss"):
        llama(**batch)


def test_patching_twice_replaces_the_options_and_keeps_a_forward_of_ones_own(llama, monkeypatch):
    own = types.MethodType(
        lambda self, input_ids=None, labels=None: type(self).forward(self, input_ids, labels=labels), llama
    )
    llama.forward = own
    calls = count_losses(monkeypatch)
    logitless.transformers.patch(llama)
    logitless.transformers.patch(
        llama, max_workspace_bytes=1 << 20, gradient="sparsified", threshold=2**-8, screen="fp8"
    )
    batch = {key: value for key, value in inputs(llama).items() if key != "attention_mask"}
    llama(**batch).loss.backward()
    assert calls[-1]["max_workspace_bytes"] == 1 << 20 and calls[-1]["gradient"] == "sparsified"
    assert calls[-1]["screen"] == "fp8"
    logitless.transformers.unpatch(llama)
    logitless.transformers.unpatch(llama)
    assert llama.forward is own and "_logitless_patch" not in llama.__dict__


def test_a_second_thread_gets_logits_and_is_refused_a_loss(llama):
    batch = inputs(llama)
    ids = batch["input_ids"]
    stock = llama(input_ids=ids).logits
    logitless.transformers.patch(llama)
    entered, done, results = threading.Event(), threading.Event(), {}

    def hold(module, arguments):
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            done.wait(60)

    handle = llama.lm_head.register_forward_pre_hook(hold)
    thread = threading.Thread(target=lambda: results.update(loss=llama(**batch).loss.detach()))
    thread.start()
    try:
        assert entered.wait(60)
        assert torch.equal(llama(input_ids=ids).logits, stock)
        with pytest.raises(UnsupportedError, match="computing another loss"):
            llama(**batch)
    finally:
        done.set()
        thread.join()
    handle.remove()
    assert torch.equal(results["loss"], llama(**batch).loss.detach())
    logitless.transformers.unpatch(llama)
    assert "forward" not in llama.lm_head.__dict__
    assert torch.equal(llama(**batch).logits, stock)


def test_batch_invariant_reaches_the_operator(llama, monkeypatch):
    calls = count_losses(monkeypatch)
    with pytest.raises(ValueError, match="batch_invariant"):
        logitless.transformers.patch(llama, gradient="sparsified", batch_invariant=True)
    logitless.transformers.patch(llama, batch_invariant=True)
    llama(**inputs(llama))
    assert calls[-1]["batch_invariant"] is True
