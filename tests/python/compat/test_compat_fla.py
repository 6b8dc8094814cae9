"""logitless.compat.fla beside FLA's formulas over whole logits, and as the criterion of a model with FLA's loss."""

import itertools
from copy import copy

import pytest
import torch
import torch.nn.functional as F
from exactness import check, head, logits_of
from logitless.compat.fla import FusedLinearCrossEntropyLoss, fused_linear_cross_entropy_loss
from torch import nn


def reference(
    logits,
    target,
    *,
    ignore_index=-100,
    label_smoothing=0.0,
    logit_scale=1.0,
    logit_softcapping=None,
    reduction="mean",
    use_l2warp=False,
    l2_penalty_factor=1e-4,
):
    """The scale comes after the bias; the largest logits of L2Warp are those before scale and softcap, of all rows."""
    z = logits * logit_scale
    if logit_softcapping is not None:
        z = logit_softcapping * torch.tanh(z / logit_softcapping)
    loss = F.cross_entropy(z, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum")
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum().clamp_min(1)
    if use_l2warp:
        penalty = l2_penalty_factor / (2 * len(target)) * logits.amax(-1).square().sum()
        loss = loss + (penalty - penalty.detach())
    return loss


def compare(leaves, target, dtypes=(torch.float64, torch.float32), **options):
    check(
        lambda input, weight, bias=None: fused_linear_cross_entropy_loss(input, target, weight, bias, **options),
        lambda input, weight, bias=None: reference(logits_of(input, weight, bias), target, **options),
        leaves,
        dtypes,
    )


L2WARP = {"use_l2warp": True, "l2_penalty_factor": 3.0}


@pytest.mark.parametrize("l2warp", [{}, L2WARP], ids=["", "l2warp"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.3, -1.5])
def test_every_option(scale, softcap, smoothing, reduction, l2warp):
    leaves, target = head()
    options = {"logit_scale": scale, "logit_softcapping": softcap, "label_smoothing": smoothing}
    compare(leaves, target, reduction=reduction, **options, **l2warp)


@pytest.mark.parametrize("l2warp", [{}, L2WARP], ids=["", "l2warp"])
def test_bfloat16(l2warp):
    leaves, target = head(64)
    compare(leaves, target, [torch.bfloat16], logit_scale=0.5, **l2warp)


@pytest.mark.parametrize("l2warp", [{}, L2WARP], ids=["", "l2warp"])
@pytest.mark.parametrize("rows, vocab, hidden", list(itertools.product([1, 2], [1, 2], [1, 3])))
def test_tiny_shapes(rows, vocab, hidden, l2warp):
    leaves, target = head(rows, vocab, hidden, ignored=())
    compare(leaves, target, **l2warp)


def test_without_bias():
    leaves, target = head()
    del leaves["bias"]
    compare(leaves, target, logit_scale=2.0, **L2WARP)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("l2warp", [{}, L2WARP], ids=["", "l2warp"])
@pytest.mark.parametrize("rows", [0, 5])
def test_every_row_ignored(rows, reduction, l2warp):
    """The loss is 0, not NaN; L2Warp is of ignored rows, too."""
    leaves, _ = head(rows)
    target = torch.full((rows,), 3)
    if rows == 0:
        input, weight = (leaves[name].float().requires_grad_() for name in ("input", "weight"))
        loss = fused_linear_cross_entropy_loss(input, target, weight, reduction=reduction, **l2warp)
        loss.backward()
        assert loss == 0 and (weight.grad == 0).all()
        return
    compare(leaves, target, ignore_index=3, reduction=reduction, **l2warp)


@pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
def test_l2warp_of_frozen_tensors(frozen):
    leaves, target = head()
    fixed = leaves.pop(frozen)

    def with_fixed(function):
        return lambda **given: function(**given, **{frozen: fixed.to(next(iter(given.values())).dtype)})

    check(
        with_fixed(lambda input, weight, bias: fused_linear_cross_entropy_loss(input, target, weight, bias, **L2WARP)),
        with_fixed(lambda input, weight, bias: reference(logits_of(input, weight, bias), target, **L2WARP)),
        leaves,
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_l2warp_adds_up_rows_of_one_class_in_float32(device):
    """4096 equal terms: a sum in bfloat16, as PyTorch's index_add_ makes on a GPU, stops after 256 of them."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    rows = 4096
    input = torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16, device=device).repeat(rows, 1)
    weight = torch.tensor([[1.0, 0.0], [-30.0, 0.0]], dtype=torch.bfloat16, device=device, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.long, device=device)
    fused_linear_cross_entropy_loss(input, target, weight, use_l2warp=True, l2_penalty_factor=1.0).backward()
    torch.testing.assert_close(weight.grad[0].float().cpu(), torch.tensor([1.0, 0.5]), rtol=2**-8, atol=0)


def test_a_label_out_of_range_beside_l2warp():
    leaves, target = head()
    input, weight, _ = leaves.values()
    target[2] = len(weight)
    with pytest.raises(IndexError, match=f"or ignore_index -100, got {len(weight)}"):
        fused_linear_cross_entropy_loss(input, target, weight, **L2WARP)


def test_l2warp_keeps_the_loss_and_may_be_run_again():
    leaves, target = head()
    input, weight, bias = (leaf.float().requires_grad_() for leaf in leaves.values())
    plain = fused_linear_cross_entropy_loss(input, target, weight, bias)
    loss = fused_linear_cross_entropy_loss(input, target, weight, bias, **L2WARP)
    torch.testing.assert_close(loss, plain)
    first = torch.autograd.grad(loss, weight, torch.tensor(0.5), retain_graph=True)[0]
    again = torch.autograd.grad(loss, weight)[0]
    torch.testing.assert_close(again, 2 * first)


class Model(nn.Module):
    """A head and the loss of FLA 0.6.0's models, as their contract with a criterion is."""

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
    torch.manual_seed(0)
    stock = Model(nn.CrossEntropyLoss(), fused="never", bias=bias)
    model = Model(FusedLinearCrossEntropyLoss(), fused=fused, bias=bias)
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
    leaves, target = head()
    input, weight, bias = leaves.values()
    loss = FusedLinearCrossEntropyLoss(label_smoothing=0.1, logit_scale=0.3, logit_softcapping=2.0, reduction=reduction)
    torch.testing.assert_close(loss(logits_of(input, weight, bias), target), loss(input, target, weight, bias))
    nothing = torch.full_like(target, -100)
    assert loss(logits_of(input, weight, bias), nothing) == 0


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"reduction": "none"}, AssertionError, "reduction: expected"),
        ({"logit_softcapping": 0.0}, ValueError, "logit_softcapping: expected"),
    ],
    ids=["reduction", "softcap"],
)
def test_refusals(options, error, message):
    leaves, target = head()
    with pytest.raises(error, match=message):
        fused_linear_cross_entropy_loss(leaves["input"], target, leaves["weight"], **options)
    with pytest.raises(error, match=message):
        FusedLinearCrossEntropyLoss(**options)


def test_a_process_group_of_more_ranks_is_refused(monkeypatch):
    leaves, target = head()
    for ranks in (1, 2):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: ranks)
        if ranks == 1:
            fused_linear_cross_entropy_loss(leaves["input"], target, leaves["weight"], process_group="tp")
        else:
            with pytest.raises(NotImplementedError, match="process_group: expected None or a group of one rank"):
                fused_linear_cross_entropy_loss(leaves["input"], target, leaves["weight"], process_group="tp")


def test_compiled():
    leaves, target = head()
    input, weight, bias = (leaf.float().requires_grad_() for leaf in leaves.values())

    def step(input, weight, bias, target):
        return fused_linear_cross_entropy_loss(input, target, weight, bias, logit_scale=0.5, **L2WARP)

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(input, weight, bias, target)
    expected = step(input, weight, bias, target)
    torch.testing.assert_close(got, expected)
    for g, e in zip(torch.autograd.grad(got, (input, weight)), torch.autograd.grad(expected, (input, weight))):
        torch.testing.assert_close(g, e)
