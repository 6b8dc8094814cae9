"""logitless.nn.FusedHead: the linear layer that it replaces, and the loss that it computes."""

import copy
import io
import pickle

import logitless
import pytest
import torch
import torch.nn.functional as F
from logitless.nn import FusedHead
from torch import nn


class Model(nn.Module):
    """Has tied embeddings, a body and a head; with labels it returns the head's loss, which shifts them."""

    def __init__(self, bias=False):
        super().__init__()
        self.embed, self.body = nn.Embedding(19, 8), nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 19, bias)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids, labels=None):
        hidden = torch.tanh(self.body(self.embed(ids)))
        return self.lm_head(hidden) if labels is None else self.lm_head(hidden, labels)


def pair(bias=False, **options):
    """Returns a model with a linear head, a copy with a fused head, and a batch."""
    torch.manual_seed(0)
    stock = Model(bias)
    model = copy.deepcopy(stock)
    model.lm_head = FusedHead.from_linear(model.lm_head, **options)
    return stock, model, torch.randint(0, 19, (3, 7))


def reference_loss(stock, ids):
    return F.cross_entropy(stock(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def same_gradients(model, stock):
    theirs = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, msg=name)


@pytest.mark.parametrize("bias", [False, True])
def test_in_the_place_of_a_head(bias):
    stock, model, ids = pair(bias, shift=1)
    assert list(model.state_dict()) == list(stock.state_dict())
    assert model.lm_head.weight is model.embed.weight
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in stock.named_parameters()]
    model.load_state_dict(stock.state_dict())
    assert torch.equal(model(ids), stock(ids))
    got, expected = model(ids, ids), reference_loss(stock, ids)
    torch.testing.assert_close(got, expected)
    got.backward(), expected.backward()
    same_gradients(model, stock)
    stock.load_state_dict(model.state_dict())


def test_constructor_is_that_of_a_linear_layer():
    torch.manual_seed(3)
    linear = nn.Linear(5, 11, True, dtype=torch.float64)
    torch.manual_seed(3)
    head = FusedHead(5, 11, True, dtype=torch.float64)
    assert isinstance(head, nn.Linear) and (head.in_features, head.out_features) == (5, 11)
    for ours, theirs in zip(head.parameters(), linear.parameters()):
        assert torch.equal(ours, theirs)
    assert FusedHead(5, 11, device="meta").weight.is_meta and FusedHead(5, 11).bias is None
    assert repr(FusedHead(5, 11, softcap=4.0, shift=1)) == (
        "FusedHead(in_features=5, vocab=11, bias=False, softcap=4.0, shift=1)"
    )


OPTIONS = dict(
    reduction="sum", ignore_index=3, label_smoothing=0.1, scale=0.5, softcap=4.0, temperature=0.7, z_loss=0.01, shift=1
)


def test_every_option_and_call_argument():
    class_weight = torch.rand(11)
    head = FusedHead(5, 11, True, class_weight=class_weight, max_workspace_bytes=10**8, **OPTIONS)
    assert list(head.state_dict()) == ["weight", "bias"]
    hidden, labels = torch.randn(2, 7, 5), torch.randint(0, 11, (2, 7))
    for given in ({"token_weight": torch.rand(2, 7)}, {"temperature": torch.rand(2, 7) + 0.5}):
        options = OPTIONS | {"bias": head.bias, "class_weight": class_weight, "return_stats": ["nll", "argmax"]} | given
        expected = logitless.linear_cross_entropy(hidden, head.weight, labels, **options)
        for ours, theirs in zip(head(hidden, labels, **given, return_stats=["nll", "argmax"]), expected):
            assert ours is theirs is None or torch.equal(ours, theirs)
    main_grad = torch.zeros(11, 5)
    mean = FusedHead(5, 11)
    mean(hidden, labels, main_grad=main_grad, num_items=torch.tensor(3)).backward()
    assert mean.weight.grad is None and main_grad.abs().sum() > 0
    sparsified = FusedHead(5, 11, gradient="always-sparsified", threshold=0.1)
    assert torch.equal(sparsified(hidden, labels, seed=1), mean.train()(hidden, labels)) is False


@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_those_of_the_loss(bias):
    head = FusedHead(5, 11, bias, scale=0.5, softcap=4.0, temperature=0.7)
    hidden, labels = torch.randn(2, 7, 5), torch.randint(0, 11, (2, 7))
    loss = F.cross_entropy(head.logits(hidden).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(head(hidden, labels), loss)
    torch.testing.assert_close(head(hidden), F.linear(hidden, head.weight, head.bias))
    rows = torch.rand(2, 7) + 0.5
    logits = head(hidden, transformed=True, temperature=rows)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(head(hidden, labels, temperature=rows), loss)


def test_logits_run_the_hooks_of_the_module():
    head, seen = FusedHead(5, 11), []
    head.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    head.logits(torch.randn(3, 5))
    assert seen == [(3, 11)]


def test_arguments_that_would_have_no_effect_are_refused():
    head = FusedHead(5, 11)
    hidden, labels = torch.randn(3, 5), torch.tensor([1, 2, 3])
    for name, value in {"temperature": 0.5, "token_weight": torch.ones(3), "num_items": 2, "seed": 1}.items():
        with pytest.raises(ValueError, match=f"{name}: expected None without labels, got "):
            head(hidden, **{name: value})
    with pytest.raises(ValueError, match="return_stats: expected False without labels"):
        head(hidden, return_stats=True)
    with pytest.raises(ValueError, match="transformed: expected False with labels"):
        head(hidden, labels, transformed=True)
    with pytest.raises(TypeError, match="recompute_logits: expected a bool, got int"):
        logitless.nn.FusedHead(8, 5, recompute_logits=1)
    with pytest.raises(ValueError, match="batch_invariant: expected False unless"):
        FusedHead(5, 11, gradient="sparsified", batch_invariant=True)


def test_several_targets_a_row_are_refused():
    head, hidden = FusedHead(5, 11), torch.randn(3, 5)
    labels = torch.tensor([[1, 2], [3, 4], [5, 6]])
    with pytest.raises(ValueError, match=r"labels: expected one for each row, got shape \[3, 2\]"):
        head(hidden, labels)
    with pytest.raises(TypeError, match="target_weight"):
        head(hidden, labels, target_weight=torch.ones(3, 2))


def test_learned_temperature():
    temperature = nn.Parameter(torch.tensor(1.5))
    head = FusedHead(5, 11, temperature=temperature)
    assert list(head.state_dict()) == ["weight", "temperature"]
    head(torch.randn(4, 5), torch.randint(0, 11, (4,))).backward()
    assert temperature.grad is not None
    assert "temperature" in repr(head)


def test_class_weight_moves_with_the_head_and_is_not_saved():
    head = FusedHead(5, 11, class_weight=torch.rand(11))
    assert list(head.state_dict()) == ["weight"] and head.double().class_weight.dtype == torch.float64


def test_copies():
    _, model, ids = pair(shift=1, softcap=3.0)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for made in copies:
        assert torch.equal(made(ids, ids), model(ids, ids)) and made.lm_head.weight is made.embed.weight


def test_a_frozen_head_and_the_mode_stay():
    linear = nn.Linear(5, 11).eval().requires_grad_(False)
    head = FusedHead.from_linear(linear)
    assert not head.training and not head.weight.requires_grad and head.bias is linear.bias
    hidden = torch.randn(4, 5, requires_grad=True)
    head(hidden, torch.randint(0, 11, (4,))).backward()
    assert hidden.grad is not None and head.weight.grad is None


class OtherLinear(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def hooked():
    linear = nn.Linear(5, 11)
    linear.register_forward_hook(lambda *_: None)
    return linear


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: nn.Embedding(5, 11), TypeError, "linear: expected a torch.nn.Linear, got a .*Embedding"),
        (lambda: OtherLinear(5, 11), TypeError, "OtherLinear"),
        (lambda: FusedHead(5, 11), TypeError, "FusedHead"),
        (hooked, ValueError, "linear: expected a layer without hooks"),
        (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(5, 11)), TypeError, "parametrization"),
    ],
)
def test_what_is_no_plain_linear_layer(make, error, message):
    with pytest.raises(error, match=message):
        FusedHead.from_linear(make())
