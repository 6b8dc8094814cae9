"""logitless.compat.liger_kernel beside Liger's formulas over whole logits."""

import itertools

import pytest
import torch
from exactness import check, head, logits_of
from logitless.compat.liger_kernel import (
    CrossEntropyOutput,
    LigerFusedLinearCrossEntropyFunction,
    LigerFusedLinearCrossEntropyLoss,
    liger_fused_linear_cross_entropy,
)

EVERY_OUTPUT = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}


def reference(
    logits,
    target,
    *,
    ce_weight=None,
    ignore_index=-100,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    use_token_scaling=False,
):
    """All four outputs: mean of weighted losses over their weights, of z-losses over rows; nothing of no row."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    vocab = logits.shape[1]
    valid = target != ignore_index
    y = torch.where(valid, target, 0)
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


def compare(leaves, target, dtypes=(torch.float64, torch.float32), **options):
    def ours(input, weight, bias):
        found = liger_fused_linear_cross_entropy(input, weight, target, bias, **options, **EVERY_OUTPUT)
        assert isinstance(found, CrossEntropyOutput)
        assert found.loss.requires_grad and not found.z_loss.requires_grad
        return vars(found)

    def theirs(input, weight, bias):
        return reference(logits_of(input, weight, bias), target, **options)

    check(ours, theirs, leaves, dtypes)


OPTIONS = [
    {},
    {"lse_square_scale": 0.01},
    {"label_smoothing": 0.1},
    {"softcap": 3.0},
    {"lse_square_scale": 0.01, "label_smoothing": 0.1, "softcap": 3.0},
]


@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_every_option(options, reduction, weighted, scaling):
    leaves, target = head()
    ce_weight = torch.rand(29).double() + 0.1 if weighted else None
    compare(leaves, target, reduction=reduction, ce_weight=ce_weight, use_token_scaling=scaling, **options)


@pytest.mark.parametrize("scaling", [False, True])
def test_bfloat16(scaling):
    leaves, target = head()
    compare(leaves, target, [torch.bfloat16], lse_square_scale=0.01, softcap=3.0, use_token_scaling=scaling)


@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [0, 5])
def test_every_row_ignored(rows, reduction, weighted, scaling):
    """Loss and gradients are 0, where Liger's kernel writes nothing; the accuracy is that of no row."""
    leaves, _ = head(rows)
    input, weight = (leaves[name].float().requires_grad_() for name in ("input", "weight"))
    target = torch.full((rows,), 3)
    found = liger_fused_linear_cross_entropy(
        input,
        weight,
        target,
        ignore_index=3,
        ce_weight=torch.rand(29) if weighted else None,
        lse_square_scale=0.1,
        reduction=reduction,
        use_token_scaling=scaling,
        **EVERY_OUTPUT,
    )
    assert (found.loss == 0).all() and (found.z_loss == 0).all() and (found.predicted_tokens == -1).all()
    assert (found.token_accuracy == 0).all() if reduction == "none" else found.token_accuracy.isnan()
    found.loss.sum().backward()
    assert (input.grad == 0).all() and (weight.grad == 0).all()


def test_weights_of_zero_have_no_mean():
    leaves, target = head()
    input, weight = leaves["input"], leaves["weight"]
    assert liger_fused_linear_cross_entropy(input, weight, target, ce_weight=torch.zeros(29).double()).isnan()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("scaling", [False, True])
def test_weights_below_zero(scaling, reduction, options):
    """Liger's tests draw class weights from the normal distribution: their sum may be below zero."""
    leaves, target = head()
    ce_weight = torch.linspace(-2.0, 1.0, 29).double()
    assert ce_weight[target[target != -100]].sum() < -1
    compare(leaves, target, reduction=reduction, ce_weight=ce_weight, use_token_scaling=scaling, **options)


@pytest.mark.parametrize("rows, vocab, hidden", list(itertools.product([1, 2], [1, 2], [1, 3])))
def test_tiny_shapes(rows, vocab, hidden):
    leaves, target = head(rows, vocab, hidden, ignored=())
    compare(leaves, target, lse_square_scale=0.01, use_token_scaling=True)


def test_an_ignored_class_is_not_a_correct_one():
    """The place of the largest logit of an ignored row is -1, as this ignore_index is."""
    leaves, target = head(ignore_index=-1)
    compare(leaves, target, ignore_index=-1, reduction="none")


def test_ties_are_of_the_first_class():
    weight = torch.tensor([[0.0], [1.0], [1.0], [1.0]])
    found = liger_fused_linear_cross_entropy(torch.ones(1, 1), weight, torch.tensor([1]), **EVERY_OUTPUT)
    assert found.predicted_tokens.tolist() == [1] and found.token_accuracy == 1


def test_large_logits_scale_by_their_probability():
    """A target whose probability underflows has a loss and a gradient of 0, not NaN."""
    input = torch.tensor([[300.0]], requires_grad=True)
    loss = liger_fused_linear_cross_entropy(
        input, torch.tensor([[1.0], [0.0]]), torch.tensor([1]), use_token_scaling=True
    )
    loss.backward()
    assert loss == 0 and input.grad == 0


def test_module_and_apply():
    leaves, target = head()
    input, weight, bias = (leaf.float().requires_grad_() for leaf in leaves.values())
    plain = LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, input, target, bias)
    assert isinstance(plain, torch.Tensor)
    module = LigerFusedLinearCrossEntropyLoss(
        torch.rand(29), lse_square_scale=0.1, use_token_scaling=True, accum_dtype=torch.float32, **EVERY_OUTPUT
    )
    found = module(weight, input, target, bias)
    order = (module.ce_weight, -100, 0.1, 0.0, "mean", None, True, None, True, True, True, None, None, 4)
    outputs = LigerFusedLinearCrossEntropyFunction.apply(input, weight, target, bias, *order)
    for value, other in zip(vars(found).values(), outputs, strict=True):
        assert torch.equal(value, other)
    alone = LigerFusedLinearCrossEntropyFunction.apply(input, weight, target)
    assert alone[1:] == (None, None, None) and alone[0].requires_grad
    accuracy = LigerFusedLinearCrossEntropyLoss(return_token_accuracy=True)(weight, input, target)
    assert accuracy.z_loss is None and accuracy.predicted_tokens is None and accuracy.token_accuracy is not None


def test_frozen_body_still_trains_the_head():
    leaves, target = head()
    weight, bias = (leaves[name].float().requires_grad_() for name in ("weight", "bias"))
    liger_fused_linear_cross_entropy(leaves["input"].float(), weight, target, bias).backward()
    assert weight.grad.abs().sum() > 0 and bias.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"label_smoothing": 1.5}, AssertionError, "label_smoothing: expected"),
        ({"reduction": "batchmean"}, AssertionError, "reduction: expected"),
        ({"softcap": 0.0}, AssertionError, "softcap: expected"),
        ({"return_z_loss": 1}, AssertionError, "return_z_loss: expected"),
        ({"return_token_accuracy": None}, AssertionError, "return_token_accuracy: expected"),
        ({"return_predicted_tokens": "yes"}, AssertionError, "return_predicted_tokens: expected"),
        ({"ce_weight": torch.rand(5)}, AssertionError, r"ce_weight: expected shape \[29\]"),
        ({"ce_weight": torch.ones(29, dtype=torch.long)}, AssertionError, "ce_weight: expected a floating"),
        ({"chunk_mem_const": 0}, ValueError, "chunk_mem_const: expected"),
        ({"chunk_mem_const": True}, ValueError, "chunk_mem_const: expected"),
        ({"accum_dtype": torch.float64}, NotImplementedError, "accum_dtype: expected"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_refusals(options, error, message):
    leaves, target = head()
    with pytest.raises(error, match=message):
        liger_fused_linear_cross_entropy(leaves["input"].float(), leaves["weight"].float(), target, **options)
    if list(options)[0] in ("label_smoothing", "reduction", "softcap"):
        with pytest.raises(error, match=message):
            LigerFusedLinearCrossEntropyLoss(**options)


def test_compiled_in_one_graph():
    leaves, target = head()
    input, weight, bias = (leaf.float().requires_grad_() for leaf in leaves.values())
    ce_weight = torch.rand(29)

    def step(input, weight, bias, target):
        return liger_fused_linear_cross_entropy(
            input, weight, target, bias, ce_weight, use_token_scaling=True, **EVERY_OUTPUT
        )

    got, expected = (
        torch.compile(step, fullgraph=True, backend="aot_eager")(input, weight, bias, target),
        step(input, weight, bias, target),
    )
    for value, other in zip(vars(got).values(), vars(expected).values(), strict=True):
        torch.testing.assert_close(value, other)
