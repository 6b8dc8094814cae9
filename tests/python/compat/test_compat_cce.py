"""logitless.compat.cut_cross_entropy beside Apple's formulas over whole logits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from exactness import check, head, logits_of
from logitless.compat.cut_cross_entropy import (
    LinearCrossEntropy,
    LinearCrossEntropyImpl,
    VocabParallelOptions,
    cce_patch,
    compute_z_loss,
    linear_cross_entropy,
)


def reference(logits, targets, *, softcap=None, shift=0, reduction="mean", ignore_index=-100):
    """logits [..., V] and targets [...]: loss, and lse that is 0 where rows are ignored."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    shift = int(shift)
    if shift:
        logits, targets = logits[..., :-shift, :], targets[..., shift:]
    flat, y = logits.flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(flat, y, ignore_index=ignore_index, reduction=reduction)
    lse = torch.where(targets != ignore_index, logits.logsumexp(-1), 0.0)
    return {"loss": loss.reshape(targets.shape) if reduction == "none" else loss, "lse": lse}


def compare(leaves, targets, dtypes=(torch.float64, torch.float32), **options):
    shape = (*targets.shape, -1)

    def ours(input, weight, bias):
        loss, lse = linear_cross_entropy(input.reshape(shape), weight, targets, bias, return_lse=True, **options)
        return {"loss": loss, "lse": lse}

    check(
        ours,
        lambda input, weight, bias: reference(logits_of(input.reshape(shape), weight, bias), targets, **options),
        leaves,
        dtypes,
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [0, 1, 3, False, True], ids=str)
@pytest.mark.parametrize("shape", [(24,), (4, 6), (2, 3, 4)], ids=str)
def test_every_option(shape, shift, reduction, softcap):
    leaves, targets = head(24)
    compare(leaves, targets.reshape(shape), shift=shift, reduction=reduction, softcap=softcap)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_bfloat16(reduction):
    leaves, targets = head(24)
    compare(leaves, targets.reshape(4, 6), [torch.bfloat16], shift=1, softcap=3.0, reduction=reduction)


@pytest.mark.parametrize("rows, vocab, hidden", list(itertools.product([1, 2], [1, 2], [1, 3])))
def test_tiny_shapes(rows, vocab, hidden):
    leaves, targets = head(rows, vocab, hidden, ignored=())
    compare(leaves, targets)


def test_without_bias_and_lse():
    leaves, targets = head()
    del leaves["bias"]
    check(
        lambda input, weight: linear_cross_entropy(input, weight, targets, softcap=3.0),
        lambda input, weight: reference(logits_of(input, weight), targets, softcap=3.0)["loss"],
        leaves,
    )


@pytest.mark.parametrize("shift", [0, 1])
def test_every_row_ignored(shift):
    e, c = torch.randn(2, 5, 7, requires_grad=True), torch.randn(11, 7, requires_grad=True)
    targets = torch.full((2, 5), 3)
    assert linear_cross_entropy(e, c, targets, ignore_index=3, shift=shift).isnan()
    assert linear_cross_entropy(e, c, targets, ignore_index=3, shift=shift, reduction="sum") == 0
    rows, lse = linear_cross_entropy(e, c, targets, ignore_index=3, shift=shift, reduction="none", return_lse=True)
    assert rows.shape == lse.shape == (2, 5 - shift) and (rows == 0).all() and (lse == 0).all()
    (rows.sum() + lse.sum()).backward()
    assert (e.grad == 0).all() and (c.grad == 0).all()


@pytest.mark.parametrize("impl", [*LinearCrossEntropyImpl, *(i.name.lower() for i in LinearCrossEntropyImpl)], ids=str)
@pytest.mark.parametrize("filter_eps", ["auto", "high", None, 0.001])
def test_what_steers_kernels_changes_nothing(impl, filter_eps):
    leaves, targets = head()
    e, c = leaves["input"].float(), leaves["weight"].float()
    got = linear_cross_entropy(
        e, c, targets, impl=impl, filter_eps=filter_eps, accum_e_fp32=True, accum_c_fp32=True, filter_e_grad=False
    )
    assert torch.equal(got, linear_cross_entropy(e, c, targets))


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_z_loss(reduction, shift):
    leaves, targets = head(24)
    targets = targets.reshape(4, 6)

    def ours(input, weight, bias):
        e = input.reshape(4, 6, -1)
        loss, lse = linear_cross_entropy(e, weight, targets, bias, reduction=reduction, shift=shift, return_lse=True)
        return loss + 0.1 * compute_z_loss(lse, targets, shift, reduction=reduction)

    def theirs(input, weight, bias):
        logits = logits_of(input.reshape(4, 6, -1), weight, bias)
        found = reference(logits, targets, shift=shift, reduction=reduction)
        rows = found["lse"] ** 2
        if reduction != "none":
            rows = rows.sum() / (1 if reduction == "sum" else (targets[..., shift:] != -100).sum())
        return found["loss"] + 0.1 * rows

    check(ours, theirs, leaves)
    lse = torch.rand(4, 6)
    assert compute_z_loss(lse) == lse.square().mean() and compute_z_loss(lse, reduction="sum") == lse.square().sum()
    with pytest.raises(ValueError, match="reduction"):
        compute_z_loss(lse, reduction="avg")


@pytest.mark.parametrize("return_lse", [False, True])
def test_module(return_lse):
    leaves, targets = head(24)
    e, c, bias = (leaf.float() for leaf in leaves.values())
    e, targets = e.reshape(4, 6, -1), targets.reshape(4, 6)
    module = LinearCrossEntropy(-100, 3.0, "none", True, return_lse=return_lse)
    got = module(e, c, targets, bias)
    expected = linear_cross_entropy(e, c, targets, bias, softcap=3.0, reduction="none", shift=1, return_lse=return_lse)
    assert all(torch.equal(a, b) for a, b in zip(*((got, expected) if return_lse else ([got], [expected]))))
    assert not module.state_dict()


REFUSED = {
    "impl": ({"impl": "flash"}, NotImplementedError, "impl: expected one of cce"),
    "filter_eps": ({"filter_eps": "low"}, RuntimeError, "filter_eps: expected"),
    "negative shift": ({"shift": -1}, ValueError, r"shift: expected an integer in \[0, 6\)"),
    "long shift": ({"shift": 6}, ValueError, r"shift: expected an integer in \[0, 6\)"),
    "bias": ({"bias": torch.randn(5)}, ValueError, r"bias: expected shape \[11\]"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap: expected a number > 0"),
    "reduction": ({"reduction": "avg"}, ValueError, "reduction: expected"),
    "targets": ({"targets": torch.zeros(2, 5, dtype=torch.long)}, AssertionError, "targets: expected shape"),
    "classifier": ({"c": torch.randn(11, 8)}, AssertionError, r"e: expected shape \[..., 8\]"),
    "shards": (
        {"vocab_parallel_options": VocabParallelOptions(0, 5)},
        ValueError,
        "c: expected 5 rows of vocab_parallel",
    ),
    "old order": ({"bias": -100}, TypeError, "cut-cross-entropy 25.1.1 has ignore_index in this place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    change, error, message = REFUSED[name]
    arguments = {"e": torch.randn(2, 6, 7), "c": torch.randn(11, 7), "targets": torch.zeros(2, 6, dtype=torch.long)}
    with pytest.raises(error, match=message):
        linear_cross_entropy(**arguments | change)


def test_the_old_order_is_refused_by_name():
    with pytest.raises(TypeError, match="cut-cross-entropy 25.1.1 has filter_eps in this place"):
        LinearCrossEntropy(-100, None, "mean", "high")


class Sharded(torch.Tensor):
    """With the names by which a DTensor is known."""

    placements = full_tensor = None


def test_a_distributed_tensor_is_refused():
    for name in ("e", "c", "targets"):
        given = {"e": torch.randn(2, 7), "c": torch.randn(11, 7), "targets": torch.zeros(2, dtype=torch.long)}
        given[name] = given[name].as_subclass(Sharded)
        with pytest.raises(ValueError, match=f"{name}: expected a plain torch.Tensor, got a DTensor"):
            linear_cross_entropy(**given)


def test_patch():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    stock, model = (transformers.LlamaForCausalLM(config) for _ in range(2))
    model.load_state_dict(stock.state_dict())
    assert cce_patch(model, LinearCrossEntropyImpl.CCE_EXACT, train_only=True) is model
    batch = torch.randint(0, 37, (2, 9))
    got, expected = model(batch, labels=batch), stock(batch, labels=batch)
    torch.testing.assert_close(got.loss, expected.loss)
    assert got.logits is None
    with torch.no_grad():
        assert model(batch, labels=batch).logits is not None
        cce_patch(model)
        assert model(batch, labels=batch).logits is None
    for refused, error, message in [
        (lambda: cce_patch("llama"), RuntimeError, "expected a model, got 'llama'"),
        (lambda: cce_patch(config), RuntimeError, "expected a model, got 'LlamaConfig'"),
        (lambda: cce_patch(model, reduction="sum"), NotImplementedError, 'reduction: expected "mean"'),
        (lambda: cce_patch(model, impl="flash"), ValueError, "impl: expected one of"),
    ]:
        with pytest.raises(error, match=message):
            refused()


def test_compiled_in_one_graph():
    e, c = torch.randn(2, 6, 7, requires_grad=True), torch.randn(11, 7, requires_grad=True)
    targets = torch.randint(0, 11, (2, 6))

    def step(e, c, targets):
        loss, lse = linear_cross_entropy(e, c, targets, shift=1, reduction="none", return_lse=True)
        return loss.mean() + compute_z_loss(lse, targets, 1)

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(e, c, targets)
    expected = step(e, c, targets)
    torch.testing.assert_close(got, expected)
    for g, x in zip(torch.autograd.grad(got, (e, c)), torch.autograd.grad(expected, (e, c))):
        torch.testing.assert_close(g, x)
