"""DTensors passed to logitless.linear_cross_entropy, for each pair of placements, against PyTorch on one process."""

import logitless
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from client_oracle import check_values, factors, loss_and_gradients, on
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.slow

BATCH, LENGTH, D = 4, 3, 8


def problem(vocab, ignored=5):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(BATCH, LENGTH, D, generator=generator)
    weight, bias = torch.randn(vocab, D, generator=generator), torch.randn(vocab, generator=generator)
    target = torch.randint(0, vocab, (BATCH, LENGTH), generator=generator)
    target.view(-1)[:ignored] = -100  # ranks have different counts of valid rows
    return hidden, weight, bias, target, torch.rand(vocab, generator=generator) + 0.5


def placement(text):
    return Replicate() if text == "R" else Shard(int(text))


def leaf(tensor, mesh, text):
    """Returns a DTensor, possibly uneven, that requires a gradient."""
    return distribute_tensor(tensor, mesh, [placement(part) for part in text]).detach().requires_grad_()


def ours(mesh, hidden_at, weight_at, vocab, reduction, with_target=True, **options):
    hidden, weight, bias, target, class_weight = (t.to(mesh.device_type) for t in problem(vocab))
    bias_at = weight_at.replace("1", "R")
    leaves = [leaf(t, mesh, at) for t, at in ((hidden, hidden_at), (weight, weight_at), (bias, bias_at))]
    if with_target:
        target = leaf(target.float(), mesh, hidden_at.replace("2", "R")).detach().long()
    loss = logitless.linear_cross_entropy(
        leaves[0], leaves[1], target, bias=leaves[2], class_weight=class_weight, reduction=reduction, **options
    )
    whole = loss.full_tensor()
    (whole * factors(whole)).sum().backward()
    placements = [str(tensor.placements) for tensor in (loss, *(leaf.grad for leaf in leaves))]
    return [whole.detach(), *(leaf.grad.full_tensor() for leaf in leaves)], placements


def alone(vocab, reduction, with_class_weight=False):
    """Returns loss and gradients of hidden, weight and bias in both precisions."""
    hidden, weight, bias, target, class_weight = problem(vocab)
    options = {"reduction": reduction} | ({"class_weight": class_weight} if with_class_weight else {})
    dtypes = torch.float32, torch.float64
    return [loss_and_gradients(hidden, weight, target, bias, dtype=dtype, **options) for dtype in dtypes]


def check(ranks, *arguments, vocab, reduction, **options):
    by_rank = ranks(ours_of, arguments, vocab, reduction, options)
    check_values([values for values, _ in by_rank], *alone(vocab, reduction, with_class_weight=True))
    assert all(torch.equal(a, b) for a, b in zip(by_rank[0][0], by_rank[1][0], strict=True))
    return by_rank[0][1]


def ours_of(mesh, arguments, vocab, reduction, options):
    return ours(mesh, *arguments, vocab, reduction, **options)


PAIRS = [("R", "R"), ("0", "R"), ("1", "R"), ("R", "0"), ("0", "0"), ("1", "0"), ("R", "1"), ("2", "0"), ("2", "R")]


@on("two")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("hidden", "weight"), PAIRS)
def test_each_pair_of_placements(ranks, hidden, weight, reduction):
    check(ranks, hidden, weight, vocab=13, reduction=reduction)


@pytest.mark.parametrize(("hidden", "weight"), [("R", "0"), ("0", "0"), ("0", "R")])
def test_uneven_and_empty_shards(three, hidden, weight):
    """Three ranks share 4 sequences and 4 entries as 2, 2 and 0."""
    check(three, hidden, weight, vocab=4, reduction="mean")
    check(three, hidden, weight, vocab=4, reduction="none")


def test_placements_of_what_is_returned(two):
    """Gradients are placed like those of PyTorch's own products. A loss is a number on all ranks, or one per token."""
    R, P, S0 = "(Replicate(),)", "(Partial(sum),)", "(Shard(dim=0),)"
    assert check(two, "R", "0", vocab=13, reduction="mean") == [R, R, S0, S0]
    assert check(two, "0", "R", vocab=13, reduction="mean") == [R, S0, P, P]
    assert check(two, "0", "0", vocab=13, reduction="none") == [S0, S0, S0, S0]


def test_a_plain_target_holds_all_tokens(two):
    check(two, "R", "0", vocab=13, reduction="mean", with_target=False)
    check(two, "0", "R", vocab=13, reduction="none", with_target=False)


def several_targets(mesh, hidden_at, weight_at, reduction, as_dtensors):
    hidden, weight, bias, target, _ = problem(13)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 13, (BATCH, LENGTH, 3), generator=generator)
    ids[target == -100] = -100
    q = torch.rand(BATCH, LENGTH, 3, generator=generator)
    options = {"reduction": reduction, "shift": 0 if "1" in hidden_at else 1}
    plain = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    expected = logitless.linear_cross_entropy(plain[0], plain[1], ids, bias=plain[2], target_weight=q, **options)
    (expected * factors(expected)).sum().backward()
    leaves = [leaf(t, mesh, at) for t, at in ((hidden, hidden_at), (weight, weight_at), (bias, weight_at))]
    if as_dtensors:
        ids, q = (leaf(t.float(), mesh, hidden_at).detach() for t in (ids, q))
        ids = ids.long()
    loss = logitless.linear_cross_entropy(
        leaves[0], leaves[1], ids, bias=leaves[2], target_weight=q, **options
    ).full_tensor()
    (loss * factors(loss)).sum().backward()
    torch.testing.assert_close(loss, expected)
    for one, whole in zip(leaves, plain, strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("as_dtensors", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("hidden", "weight"), [("R", "R"), ("0", "R"), ("1", "R"), ("R", "0"), ("0", "0"), ("1", "0")])
def test_several_targets(two, hidden, weight, reduction, as_dtensors):
    two(several_targets, hidden, weight, reduction, as_dtensors)


def on_a_mesh_of_two_dimensions(mesh, reduction, hidden_at, vocab_at):
    """Shards tokens and the vocabulary over different dimensions of a mesh."""
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    hidden, weight, bias, target, _ = problem(13)
    leaves = [leaf(t, grid, at) for t, at in ((hidden, hidden_at), (weight, vocab_at), (bias, vocab_at))]
    loss = logitless.linear_cross_entropy(*leaves[:2], target, bias=leaves[2], reduction=reduction)
    whole = loss.full_tensor()
    (whole * factors(whole)).sum().backward()
    return [whole.detach(), *(leaf.grad.full_tensor() for leaf in leaves)]


@pytest.mark.parametrize(("hidden_at", "vocab_at"), [("0R", "R0"), ("R0", "0R"), ("00", "0R"), ("00", "R0")])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_data_and_tensor_parallel(four, reduction, hidden_at, vocab_at):
    check_values(four(on_a_mesh_of_two_dimensions, reduction, hidden_at, vocab_at), *alone(13, reduction))


def statistics(mesh, hidden_at, weight_at):
    hidden, weight, _, target, _ = problem(13)
    options = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3}
    options |= {"temperature": torch.linspace(0.5, 2, 12).view(4, 3)}
    options |= {"token_weight": torch.linspace(0.1, 1, 12).view(4, 3), "return_stats": True}
    one = logitless.linear_cross_entropy(hidden, weight, target, **options)
    leaves = [leaf(hidden, mesh, hidden_at), leaf(weight, mesh, weight_at)]
    made = logitless.linear_cross_entropy(*leaves, target, **options)
    return [
        (name, getattr(one, name).detach(), getattr(made, name).full_tensor().detach())
        for name in ("loss", "nll", "lse", "entropy", "argmax", "correct_count", "valid_count")
    ]


@pytest.mark.parametrize(("hidden", "weight"), [("R", "0"), ("0", "0"), ("0", "R"), ("1", "R")])
def test_statistics_and_options(two, hidden, weight):
    for values in two(statistics, hidden, weight):
        for name, one, made in values:
            torch.testing.assert_close(made, one, msg=name)


def learned(mesh, hidden_at, weight_at):
    hidden, weight, _, target, _ = problem(13)
    one = torch.tensor(0.7, requires_grad=True)
    logitless.linear_cross_entropy(hidden, weight, target, scale=one).backward()
    made = leaf(torch.tensor(0.7), mesh, "R")
    leaves = [leaf(hidden, mesh, hidden_at), leaf(weight, mesh, weight_at)]
    logitless.linear_cross_entropy(*leaves, target, scale=made).backward()
    return one.grad, made.grad.full_tensor()


@pytest.mark.parametrize(("hidden", "weight"), [("R", "0"), ("0", "0"), ("0", "R")])
def test_a_learned_scale(two, hidden, weight):
    for one, made in two(learned, hidden, weight):
        torch.testing.assert_close(made, one)


def refusals(mesh):
    hidden, weight, bias, target, _ = problem(14)
    shard, everywhere, parts = leaf(weight, mesh, "0"), leaf(hidden, mesh, "R"), leaf(hidden, mesh, "0")

    def refused(error, message, *arguments, **options):
        with pytest.raises(error, match=f"(?s)^{message}"):
            logitless.linear_cross_entropy(*arguments, **options)

    plain = "weight: expected a plain tensor or an FSDP parameter"
    refused(TypeError, plain + r".*logitless\.distributed\.linear_cross_entropy\(", hidden, shard, target)
    refused(TypeError, plain, hidden, shard.detach(), target)
    refused(TypeError, "weight: expected a DTensor on the mesh of hidden", everywhere, weight, target)
    refused(ValueError, r"targets: expected shape \[4, 3\]", parts, shard, target[:2])
    bias.requires_grad_()
    refused(TypeError, "bias: expected a DTensor", everywhere, shard, target, bias=bias)
    unsupported = logitless.UnsupportedError
    refused(unsupported, "shift: expected 0", leaf(hidden, mesh, "1"), shard, target, shift=1)
    several = {"targets": target[..., None], "target_weight": torch.ones(*target.shape, 2)}
    refused(ValueError, r"target_weight: expected shape \[4, 3, 1\]", everywhere, shard, **several)
    whole, main_grad = leaf(weight, mesh, "R"), torch.zeros(14, D)
    refused(unsupported, "main_grad: expected None", parts, whole, target, main_grad=main_grad)
    partial = DTensor.from_local(hidden / 2, mesh, [Partial()])
    loss = logitless.linear_cross_entropy(partial, shard.detach(), target).full_tensor()
    assert (loss - F.cross_entropy((hidden @ weight.T).flatten(0, 1), target.flatten())).abs() < 1e-5


def test_what_is_not_known_is_refused(two):
    two(refusals)
