"""logitless.linear_candidates and its losses beside float64 over whole logits."""

import math
import re
import runpy
import sys

import candidates_oracle as oracle
import logitless
import pytest
import torch
from logitless.candidates import (
    Sampler,
    forward_kl,
    in_batch_negatives,
    reverse_kl,
    soft_cross_entropy,
    with_negatives,
)
from support import DEVICES, DTYPES, EXAMPLES, Recorder
from torch.utils.checkpoint import checkpoint

OPTIONS = {
    "plain": {},
    "all": {"scale": -1.3, "softcap": 2.0, "temperature": 0.7},
    "rows": {"temperature": torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0])},
}
LISTS = oracle.random_lists(5, 8, 30, least=8)
UNEVEN = [[3, 7, 7], [], [0, 29, 5, 3, 1, 2, 4], [11], [9, 9]]


def log_probs(hidden, weight, ids, *more, **options):
    return logitless.linear_candidates(hidden, weight, ids, *more, **options).log_probs


def operands(rows=5, vocab=30, width=12, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    shapes = (rows, width), (vocab, width), (vocab,)
    return [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("normalize", ["candidates", "vocabulary"])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_against_float64(device, offsets, normalize, options, dtype):
    lists = UNEVEN if offsets else LISTS
    case = oracle.make(lists, dtype=dtype, offsets=offsets, normalize=normalize, **options)
    upstream = oracle.weighted("log_probs", "lse")
    got = oracle.run(case, upstream, device)
    compare = oracle.compare_norms if normalize == "vocabulary" and dtype.itemsize == 2 else oracle.compare
    compare(case, got, upstream)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(got[name].dtype == stats for name in ("log_probs", "logits", "lse"))
    assert got["d_hidden"].dtype == got["d_weight"].dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_one_list_for_all_rows(device, options, dtype):
    """16-bit operands round the logits' gradient to their format, as in the products of a loss."""
    case = oracle.make([4, 9, 2, 2, 17], rows=5, dtype=dtype, **options)
    upstream = oracle.weighted("log_probs")
    compare = oracle.compare_norms if dtype.itemsize == 2 else oracle.compare
    compare(case, oracle.run(case, upstream, device), upstream)


@pytest.mark.parametrize("factor,size", [(1e-7, 1e4), (1e7, 1e-3)])
@pytest.mark.parametrize("ids", [[4, 9, 2, 2, 17], LISTS], ids=["shared", "rows"])
def test_small_and_large_gradients_in_float16(ids, factor, size):
    """The gradients of logits leave float16's range, and hidden states bring the weight's gradient back."""
    hidden, weight, _ = (t.detach() for t in operands(dtype=torch.float16))
    hidden, weight, ids = hidden * size, (weight / size).clamp(-4, 4).requires_grad_(), torch.tensor(ids)
    exact = weight.detach().double().requires_grad_()
    got, expected = (
        torch.autograd.grad(log_probs(h, w, ids)[:, 1].sum() * factor, w)[0]
        for h, w in ((hidden, weight), (hidden.double(), exact))
    )
    error = (got.double() - expected).norm() / expected.norm()
    assert got.isfinite().all() and error < 2 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("vocab,width,rows", [(1, 1, 1), (7, 33, 4), (300, 65, 3), (5, 8, 0)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_shapes(vocab, width, rows, index):
    for count in (0, 1, 9, 70):
        lists = oracle.random_lists(rows, count, vocab, least=count)
        case = oracle.make(lists, vocab=vocab, width=width)
        case.tensors["ids"] = case.tensors["ids"].reshape(rows, count).to(index)
        oracle.check(case)
    uneven = oracle.make(oracle.random_lists(rows, 40, vocab), vocab=vocab, width=width, offsets=True)
    uneven.tensors["ids"] = uneven.tensors["ids"].to(index)
    oracle.check(uneven)


def test_leading_dimensions_and_strides():
    hidden, weight, bias = operands(rows=6)
    ids = torch.randint(0, 30, (2, 3, 4))
    expected = log_probs(hidden, weight, ids.reshape(6, 4), bias=bias)
    got = log_probs(hidden.reshape(2, 3, 12), weight, ids, bias=bias)
    assert got.shape == (2, 3, 4) and torch.equal(got.reshape(6, 4), expected)
    strided = [torch.cat([t, t], -1)[:, :12] for t in (hidden, weight)]
    assert torch.equal(log_probs(*strided, ids.reshape(6, 4), bias=bias), expected)
    transposed = [t.mT.contiguous().mT for t in (hidden, weight)]
    every_other = ids.reshape(6, 4).repeat_interleave(2, -1)[:, ::2]
    torch.testing.assert_close(log_probs(*transposed, every_other, bias=bias), expected)


def test_all_columns_in_any_order_are_the_softmax():
    hidden, weight, bias = operands()
    order = torch.stack([torch.randperm(30) for _ in range(5)])
    expected = torch.log_softmax(hidden @ weight.T + bias, -1).gather(1, order)
    for normalize in ("candidates", "vocabulary"):
        got = logitless.linear_candidates(hidden, weight, order, bias=bias, normalize=normalize, return_entropy=True)
        torch.testing.assert_close(got.log_probs, expected)
        torch.testing.assert_close(got.entropy, -(expected.exp() * expected).sum(-1))


def test_a_shift_of_logits_changes_no_probability():
    hidden, weight, bias = operands()
    ids = torch.tensor(LISTS)
    torch.testing.assert_close(log_probs(hidden, weight, ids, bias=bias + 5), log_probs(hidden, weight, ids, bias=bias))


def test_a_permutation_of_a_list_permutes_its_results():
    hidden, weight, _ = operands()
    ids, order = torch.tensor(LISTS), torch.randperm(8)
    got, expected = (log_probs(hidden, weight, i) for i in (ids[:, order], ids))
    torch.testing.assert_close(got, expected[:, order])


@pytest.mark.parametrize("normalize", ["candidates", "vocabulary"])
def test_padded_lists_are_those_with_offsets(normalize):
    longest = max(map(len, UNEVEN))
    padded = [ids + [-7] * (longest - len(ids)) for ids in UNEVEN]
    one = oracle.make(UNEVEN, offsets=True, normalize=normalize)
    other = oracle.make(padded, normalize=normalize, ignore_id=-7)
    upstream = oracle.weighted("lse")
    got, expected = oracle.run(one, upstream), oracle.run(other, upstream)
    kept = other.tensors["ids"] != -7
    torch.testing.assert_close(expected["log_probs"][kept], got["log_probs"])
    assert (expected["log_probs"][~kept] == -math.inf).all() and (expected["logits"][~kept] == -math.inf).all()
    for name in ("lse", "d_hidden", "d_weight", "d_bias"):
        torch.testing.assert_close(got[name], expected[name])


def test_empty_lists():
    case = oracle.make([[], []], offsets=True)
    got = oracle.run(case, oracle.weighted("lse"))
    assert (got["lse"] == -math.inf).all() and not got["d_hidden"].any() and not got["d_weight"].any()
    output = logitless.linear_candidates(*operands(2)[:2], torch.empty(2, 0, dtype=torch.int64), return_entropy=True)
    assert (output.lse == -math.inf).all() and not output.entropy.any() and output.log_probs.shape == (2, 0)


def test_rows_of_none_alone_have_no_gradient():
    hidden, weight, _ = operands(2)
    got = logitless.linear_candidates(hidden, weight, torch.tensor([[1, 2], [-1, -1]]), return_entropy=True)
    (got.log_probs[0].sum() + got.entropy.sum()).backward()
    assert not hidden.grad[1].any() and hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("offsets", [False, True])
def test_log_weights(offsets):
    case = oracle.make(UNEVEN if offsets else LISTS, offsets=offsets)
    case.tensors["log_weights"] = torch.randn(case.tensors["ids"].shape)
    oracle.check(case, "log_probs", "lse")


def test_log_weights_of_ids_make_a_sampled_softmax_unbiased():
    """Ids that are drawn in proportion to q, with -log q, give the whole softmax' lse on average."""
    torch.manual_seed(1)
    hidden, weight, _ = (t.detach() for t in operands(rows=1))
    log_q = torch.log_softmax(torch.randn(30), -1)
    ids = torch.multinomial(log_q.exp(), 200_000, replacement=True)[None]
    lse = logitless.linear_candidates(hidden, weight, ids, log_weights=-log_q[ids]).lse - math.log(200_000)
    assert abs(lse - torch.logsumexp(hidden @ weight.T, -1)) < 0.02


def test_huge_logits():
    case = oracle.make(LISTS, scale=1e4)
    got = oracle.check(case)
    assert got["log_probs"].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_stays_where_it_is(bad):
    hidden, weight, _ = operands()
    with torch.no_grad():
        weight[29] = bad
    ids = torch.tensor(LISTS).clamp(max=28)
    ids[2, 3] = 29
    got = logitless.linear_candidates(hidden, weight, ids)
    got.lse.sum().backward()
    assert got.lse.isfinite().tolist() == [True, True, False, True, True]
    assert hidden.grad.isfinite().all(-1).tolist() == [True, True, False, True, True]


# ---- targets


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_targets(reduction, offsets):
    lists = [ids or [4] for ids in UNEVEN] if offsets else LISTS
    targets = torch.tensor([ids[-1] for ids in lists])
    targets[3] = -100
    case = oracle.make(lists, offsets=offsets)
    leaves = case.leaves()
    got = logitless.linear_candidates(**leaves, targets=targets, reduction=reduction)
    z = oracle.all_logits(case, leaves, torch.float32)
    rows = []
    for i, ids in enumerate(lists):
        log_p = torch.log_softmax(z[i, ids], -1)
        same = torch.tensor([j == int(targets[i]) for j in ids])
        rows.append(-torch.logsumexp(log_p[same], -1) if i != 3 else z.sum() * 0)
    expected = torch.stack(rows)
    torch.testing.assert_close(-got.target_log_probs, expected)
    expected = {"mean": expected.sum() / 4, "sum": expected.sum(), "none": expected}[reduction]
    torch.testing.assert_close(got.loss, expected)
    for value, exact in zip(*(torch.autograd.grad(x.sum(), list(leaves.values())[:3]) for x in (got.loss, expected))):
        torch.testing.assert_close(value, exact)


def test_a_target_that_is_not_in_its_list():
    hidden, weight, _ = operands(2)
    ids = torch.tensor([[1, 2], [3, 4]])
    got = logitless.linear_candidates(hidden, weight, ids, targets=torch.tensor([5, 3]), reduction="none")
    assert got.target_log_probs[0] == -math.inf and got.loss[0] == math.inf and got.loss[1].isfinite()
    got.loss.sum().backward()
    assert not hidden.grad[0].any() and hidden.grad[1].any() and weight.grad.isfinite().all()


# ---- the gradient of the weight by rows


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
@pytest.mark.parametrize("kind", ["padded", "offsets", "shared"])
def test_rows_of_the_gradient(kind, options):
    lists = {"padded": [ids[:7] + [-1] for ids in LISTS], "offsets": UNEVEN, "shared": [3, 8, 3]}[kind]
    case = oracle.make(lists, rows=5 if kind == "shared" else None, offsets=kind == "offsets", **options)
    upstream = oracle.weighted("log_probs")
    dense, rows = (oracle.run(case, upstream, weight_gradient=way) for way in ("dense", "rows"))
    sparse = rows["d_weight"]
    assert sparse.is_sparse and sparse._indices().unique().numel() <= len({j for ids in case.lists for j in ids} - {-1})
    torch.testing.assert_close(sparse.to_dense(), dense["d_weight"])
    for name in ("d_hidden", "d_bias"):
        torch.testing.assert_close(rows[name], dense[name])
    optimizer = torch.optim.SparseAdam([torch.nn.Parameter(case.tensors["weight"])])
    optimizer.param_groups[0]["params"][0].grad = sparse
    optimizer.step()


# ---- learned numbers


LEARNED = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "rows": {"softcap": 2.0, "temperature": torch.tensor([0.5, 2.0], dtype=torch.float64)},
    "vocabulary": {"normalize": "vocabulary"},
}


@pytest.mark.parametrize("options", LEARNED.values(), ids=LEARNED)
@pytest.mark.parametrize("kind", ["padded", "offsets", "shared"])
def test_gradients_of_scale_and_temperature(kind, options):
    """Padding, repeated ids and empty lists stay out of the sums."""
    lists = {"padded": [[0, 5, 5], [2, -1, 1]], "offsets": [[0, 5, 5, -1], []], "shared": [3, -1, 3]}[kind]
    rows = 2 if kind == "shared" else None
    case = oracle.make(lists, vocab=6, width=4, dtype=torch.float64, rows=rows, offsets=kind == "offsets")
    leaves = case.leaves()
    fixed = {name: leaves[name] for name in ("ids", "offsets") if name in leaves}
    numbers = {"scale": -1.3} | ({} if "temperature" in options else {"temperature": 0.7})

    def function(hidden, weight, bias, *given):
        learned = dict(zip(numbers, given))
        out = logitless.linear_candidates(hidden, weight, **fixed, bias=bias, **options | learned)
        return [torch.where(values.isfinite(), values, 0) for values in (out.log_probs, out.lse, out.logits)]

    operands = [leaves[name] for name in ("hidden", "weight", "bias")]
    learned = [torch.tensor(number, dtype=torch.float64, requires_grad=True) for number in numbers.values()]
    assert torch.autograd.gradcheck(function, [*operands, *learned])
    for value, exact in zip(function(*operands, *learned), function(*operands, *numbers.values())):
        torch.testing.assert_close(value, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["padded", "offsets", "shared"])
@pytest.mark.parametrize("device", DEVICES)
def test_learned_numbers_in_other_dtypes(device, kind, dtype):
    """Each has the dtype of its gradient, and any shape of one element."""
    lists = {"padded": LISTS, "offsets": UNEVEN, "shared": [3, 8, 3]}[kind]
    case = oracle.make(lists, rows=5 if kind == "shared" else None, dtype=dtype, offsets=kind == "offsets")
    results = []
    for wide in (False, True):
        given = {n: t.double() if wide and t.is_floating_point() else t for n, t in case.leaves(device).items()}
        scale = torch.tensor([[0.75]], dtype=torch.float64 if wide else dtype, device=device, requires_grad=True)
        temperature = torch.tensor([1.25], dtype=torch.float64 if wide else None, device=device, requires_grad=True)
        out = logitless.linear_candidates(**given, scale=scale, temperature=temperature, return_entropy=True)
        results.append(torch.autograd.grad(out.entropy.sum(), (scale, temperature)))
    for value, exact, leaf in zip(*results, (scale, temperature)):
        assert value.shape == leaf.shape
        rounding = 64 * torch.finfo(torch.float32).eps * 20  # of 20 terms below 64
        torch.testing.assert_close(value.double(), exact, rtol=torch.finfo(value.dtype).eps, atol=rounding)


@pytest.mark.parametrize("kind", ["rows", "offsets", "shared"])
def test_learned_numbers_beside_an_excluded_id(kind):
    """Gradients are those of the other ids alone where a bias is -inf."""
    lists = {"rows": [[0, 5, 2], [2, 3, 1]], "offsets": [[0, 5], [2, 3, 1]], "shared": [3, 2, 0]}[kind]
    rows = 2 if kind == "shared" else None
    case = oracle.make(lists, vocab=6, width=4, dtype=torch.float64, rows=rows, offsets=kind == "offsets")
    results = []
    for biased, ignore_id in ((-math.inf, -1), (0.0, 2)):
        leaves = case.leaves()
        numbers = [torch.tensor(number, dtype=torch.float64, requires_grad=True) for number in (-1.3, 0.7)]
        leaves["bias"] = leaves["bias"].detach().index_fill(0, torch.tensor(2), biased)
        learned = {"scale": numbers[0], "temperature": numbers[1]}
        out = logitless.linear_candidates(**leaves, **learned, ignore_id=ignore_id, return_entropy=True)
        gradients = torch.autograd.grad((out.lse + out.entropy).sum(), (leaves["hidden"], leaves["weight"], *numbers))
        results.append((out.log_probs, *gradients))
    for value, exact in zip(*results):
        torch.testing.assert_close(value, exact)


def test_learned_numbers_in_compiled_code():
    hidden, weight, bias = operands()

    def gradients(function):
        numbers = [torch.tensor(0.7, requires_grad=True), torch.tensor([1.5], requires_grad=True)]
        value = function(torch.tensor(LISTS), *numbers)
        return value.detach(), *torch.autograd.grad(value, (hidden, weight, bias, *numbers))

    def loss(ids, scale, temperature):
        return log_probs(hidden, weight, ids, bias=bias, scale=scale, temperature=temperature)[:, 0].sum()

    compiled = gradients(torch.compile(loss, fullgraph=True, backend="aot_eager"))
    for value, exact in zip(compiled, gradients(loss)):
        torch.testing.assert_close(value, exact)


# ---- PyTorch's modes


@pytest.mark.parametrize("options", [{}, {"scale": 0.7, "temperature": 1.5, "max_workspace_bytes": "1MiB"}])
def test_compiled_with_plain_numbers(options):
    hidden, weight, _ = operands()
    ids = torch.tensor(LISTS)

    def loss(hidden, weight):
        return log_probs(hidden, weight, ids, **options)[:, 0].sum()

    torch._dynamo.reset()
    values = [f(hidden, weight) for f in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager"))]
    gradients = [torch.autograd.grad(value, (hidden, weight)) for value in values]
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("kind", ["padded", "offsets", "shared"])
def test_compiled(kind):
    lists = {"padded": LISTS, "offsets": UNEVEN, "shared": [3, 8, 3]}[kind]
    case = oracle.make(lists, rows=5 if kind == "shared" else None, offsets=kind == "offsets", softcap=3.0)

    def loss(leaves):
        got = logitless.linear_candidates(**leaves, softcap=3.0, temperature=torch.ones(5) * 2)
        return (torch.where(got.log_probs.isfinite(), got.log_probs, 0) * 0.5).sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = case.leaves()
        value = function(leaves)
        value.backward()
        results.append([value.detach(), *(leaves[name].grad for name in ("hidden", "weight", "bias"))])
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager)


def test_operators_pass_pytorchs_checks():
    hidden, weight, bias = operands(rows=3, vocab=6, width=4, dtype=torch.float64)
    ids, offsets = torch.tensor([0, 5, 5, 2, -1]), torch.tensor([0, 2, 2, 5])
    arguments = (hidden, weight, bias, ids, offsets, None, [0.7, 2.0, 1.5], -1, 0, 0)
    torch.library.opcheck(torch.ops.logitless.candidate_logits.default, arguments)
    rows = torch.tensor([0, 0, 2, 2, 2])
    torch.library.opcheck(torch.ops.logitless.segment_sum.default, (torch.randn(5, requires_grad=True), offsets, rows))
    of_rows = torch.randn(3, requires_grad=True)
    torch.library.opcheck(torch.ops.logitless.segment_spread.default, (of_rows, offsets, rows))
    torch.library.opcheck(torch.ops.logitless.dense_logits.default, (hidden, weight, torch.float64))


@pytest.mark.parametrize("kind", ["padded", "offsets", "shared"])
def test_gradcheck(kind):
    lists = {"padded": [[0, 5, 5], [2, 2, 1]], "offsets": [[0, 5, 5], []], "shared": [3, 4, 3]}[kind]
    rows = 2 if kind == "shared" else None
    case = oracle.make(lists, vocab=6, width=4, dtype=torch.float64, rows=rows, offsets=kind == "offsets", softcap=2.0)
    leaves = case.leaves()

    def function(hidden, weight, bias):
        got = logitless.linear_candidates(hidden, weight, **fixed, bias=bias, return_entropy=True, **case.options)
        return got.log_probs, torch.where(got.lse.isfinite(), got.lse, 0), got.entropy

    fixed = {name: leaves[name] for name in ("ids", "offsets") if name in leaves}
    assert torch.autograd.gradcheck(function, [leaves[name] for name in ("hidden", "weight", "bias")])


def test_checkpoint_no_grad_and_double_backward():
    hidden, weight, _ = operands()
    ids = torch.tensor(LISTS)
    expected = torch.autograd.grad(log_probs(hidden, weight, ids).square().sum(), (hidden, weight))
    kept = checkpoint(log_probs, hidden, weight, ids, use_reentrant=False)
    for got, exact in zip(torch.autograd.grad(kept.square().sum(), (hidden, weight)), expected):
        assert torch.equal(got, exact)
    with torch.no_grad():
        assert not log_probs(hidden, weight, ids).requires_grad
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(log_probs(hidden, weight, ids).sum(), hidden, create_graph=True)


@pytest.mark.parametrize("kind", ["padded", "shared"])
def test_autocast(kind):
    hidden, weight, _ = operands()
    ids = torch.tensor(LISTS if kind == "padded" else LISTS[0])
    with torch.autocast("cpu", torch.bfloat16):
        got = log_probs(hidden, weight, ids)
    rounded = [t.detach().bfloat16().float().requires_grad_() for t in (hidden, weight)]
    expected = log_probs(*rounded, ids)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected)
    upstream = torch.randn(got.shape)
    got, expected = (
        torch.autograd.grad((x * upstream).sum(), of) for x, of in ((got, (hidden, weight)), (expected, rounded))
    )
    for value, exact in zip(got, expected):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, exact, **({} if kind == "padded" else {"rtol": 2e-2, "atol": 2e-2}))


def test_only_the_wanted_gradients_are_made():
    hidden, weight, bias = operands()
    with Recorder() as recorder:
        log_probs(hidden, weight.detach(), torch.tensor(LISTS), bias=bias.detach()).sum().backward()
    made = [arguments for function, arguments, _ in recorder.calls if "gradients" in str(function)]
    assert len(made) == 1 and made[0][4:7] == (-1, True, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_budget_is_kept_or_refused(device):
    """The call raises where a later backward pass needs more; on the CPU the logits need no workspace."""
    hidden, weight, _ = (tensor.detach().to(device).requires_grad_() for tensor in operands())
    ids = torch.tensor([[1, 2, 3]] * 5, device=device)

    def value(budget):
        return log_probs(hidden, weight, ids, max_workspace_bytes=budget).square().sum()

    def gradients(budget):
        return torch.autograd.grad(value(budget), (hidden, weight))

    with pytest.raises(logitless.BudgetTooSmallError) as refused:
        value(1)
    least = refused.value.required_bytes
    if device == "cpu":
        with torch.no_grad():
            value(1)
    with pytest.raises(logitless.BudgetTooSmallError, match=f"at least {least} bytes"):
        value(least - 1)
    for one, other in zip(gradients(least), gradients(None)):
        torch.testing.assert_close(one, other)


def test_the_gradient_has_the_same_bits_on_any_number_of_threads():
    case = oracle.make(oracle.random_lists(60, 90, 30, least=1), offsets=True, width=40)
    threads, results = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        results.append(oracle.run(case, oracle.weighted("log_probs")))
    torch.set_num_threads(threads)
    assert all(torch.equal(results[0][name], results[1][name]) for name in ("logits", "d_hidden", "d_weight", "d_bias"))


# ---- losses over lists


def losses_case(offsets):
    lists = [[1, 4, 2], [0, 3, 5], [5, 2, 4]]
    case = oracle.make(lists, vocab=6, width=4, dtype=torch.float64, offsets=offsets, normalize="vocabulary")
    teacher = torch.log_softmax(torch.randn(3, 6, dtype=torch.float64), -1)
    own = torch.stack([teacher[i, ids] for i, ids in enumerate(lists)])
    leaves = case.leaves()
    got = logitless.linear_candidates(**leaves, **case.options)
    whole = torch.log_softmax(oracle.all_logits(case, leaves, torch.float64), -1)
    log_p = torch.stack([whole[i, ids] for i, ids in enumerate(lists)])
    more = (case.tensors["offsets"],) if offsets else ()
    return got.log_probs, own.reshape(got.log_probs.shape), more, log_p, own, leaves


def with_other(log_probs):
    rest = torch.log1p(-log_probs.exp().sum(-1, keepdim=True))
    return torch.cat([log_probs, rest], -1)


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("name", ["soft_cross_entropy", "renormalized", "forward_kl", "reverse_kl"])
def test_losses(name, other, offsets):
    got_p, got_q, more, log_p, log_q, leaves = losses_case(offsets)
    if other:
        log_p, log_q = with_other(log_p), with_other(log_q)
    p, q = log_p.exp(), log_q.exp()
    if name == "renormalized":
        if other:
            with pytest.raises(ValueError, match="renormalize: expected False with other"):
                soft_cross_entropy(got_p, got_q.exp(), *more, other=True, renormalize=True)
            return
        got, expected = (
            soft_cross_entropy(got_p, got_q.exp(), *more, renormalize=True),
            -(q / q.sum(-1, True) * log_p).sum(-1),
        )
    elif name == "soft_cross_entropy":
        got, expected = soft_cross_entropy(got_p, got_q.exp(), *more, other=other), -(q * log_p).sum(-1)
    elif name == "forward_kl":
        got, expected = forward_kl(got_p, got_q, *more, other=other), (q * (log_q - log_p)).sum(-1)
    else:
        got, expected = reverse_kl(got_p, got_q, *more, other=other), (p * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(got, expected)
    wanted = [leaves[name] for name in ("hidden", "weight", "bias")]
    for value, exact in zip(*(torch.autograd.grad(x.sum(), wanted, retain_graph=True) for x in (got, expected))):
        torch.testing.assert_close(value, exact)


def test_the_other_class_with_nothing_left():
    """A list of all ids has a rest of 0: losses stay finite, and gradients too."""
    hidden, weight, _ = operands(rows=2, vocab=4)
    got = log_probs(hidden, weight, torch.arange(4).expand(2, 4), normalize="vocabulary")
    for loss in (soft_cross_entropy(got, got.detach().exp(), other=True), reverse_kl(got, got.detach(), other=True)):
        (gradient,) = torch.autograd.grad(loss.sum(), hidden, retain_graph=True)
        assert loss.isfinite().all() and gradient.isfinite().all()


# ---- negatives


def test_samplers_draw_with_their_probabilities():
    counts = torch.tensor([3.0, 0.0, 1.0, 6.0, 0.0])
    for sampler in (Sampler(counts), Sampler.uniform(5), Sampler.log_uniform(5)):
        q, draws = sampler.log_q.exp(), 100_000
        ids = sampler.sample((draws // 10, 10), torch.Generator().manual_seed(0))
        assert ids.shape == (draws // 10, 10) and abs(q.sum() - 1) < 1e-12
        share = torch.bincount(ids.reshape(-1), minlength=5) / draws
        assert ((share - q).abs() <= 5 * (q * (1 - q) / draws).sqrt()).all() and (share[q == 0] == 0).all()


def test_negatives_estimate_the_sum_over_the_vocabulary():
    """The estimate of exp(lse) is unbiased, with shared and with own negatives; hits do not count twice."""
    torch.manual_seed(0)
    hidden, weight, _ = (t.detach() for t in operands(rows=2))
    exact = torch.logsumexp(hidden @ weight.T, -1).exp()
    sampler, targets = Sampler.log_uniform(30), torch.tensor([0, 4])
    for shape in ((20,), (2, 20)):
        estimates = []
        for _ in range(400):
            ids, log_weights = with_negatives(targets, sampler.sample(shape), sampler.log_q)
            assert ((ids[:, 1:] == targets[:, None]).sum() == 0) and ids.shape == (2, 21)
            estimates.append(logitless.linear_candidates(hidden, weight, ids, log_weights=log_weights).lse.exp())
        estimates = torch.stack(estimates)
        assert ((estimates.mean(0) - exact).abs() < 5 * estimates.std(0) / 20).all()


def test_negatives_of_the_batch():
    hidden, weight, _ = operands(rows=4)
    targets, log_q = torch.tensor([7, 3, 7, 9]), torch.log_softmax(torch.randn(30), 0)
    ids, log_weights = in_batch_negatives(targets, log_q)
    got = logitless.linear_candidates(hidden, weight, ids, log_weights=log_weights, targets=targets, reduction="none")
    z = hidden @ weight[targets].T
    for i in range(4):
        others = [j for j in range(4) if targets[j] != targets[i]]
        rest = z[i, others] - log_q[targets[others]] - math.log(3)
        expected = torch.logsumexp(torch.cat([z[i, i : i + 1], rest]), 0) - z[i, i]
        torch.testing.assert_close(got.loss[i], expected)
    got.loss.sum().backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


# ---- CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [5, 60, 400])
def test_repeats_bitwise(count, dtype):
    """Lists are gathered in wide and in narrow slices, and multiplied whole."""
    case = oracle.make(oracle.random_lists(130, count, 300, least=count // 2), 300, 72, dtype, offsets=True)
    first, *others = (oracle.run(case, oracle.weighted("log_probs"), "cuda") for _ in range(4))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.gpu
def test_wrong_ids_and_offsets_of_a_device():
    hidden, weight, _ = (t.detach().cuda().requires_grad_() for t in operands())
    ids = torch.tensor(LISTS, device="cuda")
    ids[1, 2], ids[3, 0], ids[4, 7] = 30, -2, 2**40
    for kind in ("rows", "shared"):
        given = ids if kind == "rows" else ids[1]
        got = logitless.linear_candidates(hidden, weight, given)
        assert torch.equal(got.logits.isnan(), ((given < 0) | (given >= 30)).expand(5, 8))
        got.logits.nansum().backward()
        assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
    offsets = torch.tensor([0, 3, 10**15, -1, 2, 40], device="cuda")
    assert logitless.linear_candidates(hidden, weight, ids.reshape(-1) % 30, offsets).logits.isnan().all()


@pytest.mark.gpu
def test_graph_capture():
    hidden, weight, _ = (t.detach().cuda() for t in operands())
    ids = torch.tensor(LISTS, device="cuda")
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

    def step():
        return torch.autograd.grad(log_probs(*leaves, ids).square().sum(), leaves)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            got = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(g, e) for g, e in zip(got, expected))


# ---- the example


@pytest.mark.slow
@pytest.mark.parametrize("task,least", [("replay", 0), ("distill", 0.3), ("drafter", 0.5)])
def test_example(task, least, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["candidate_sets.py", "--task", task, "--steps", "40"])
    torch.set_num_threads(1)
    runpy.run_path(str(EXAMPLES / "candidate_sets.py"), run_name="__main__")
    line = capsys.readouterr().out
    first, last = map(float, re.search(r"(?:reward|loss) ([\d.]+) -> ([\d.]+)$", line.strip()).groups())
    if task == "replay":
        assert last > first + 0.1
        assert float(re.search(r"within (\S+) of 1", line)[1]) < 1e-5
    else:
        assert last < first - least


# ---- refusals

X, W, IDS = torch.ones(3, 4), torch.ones(6, 4), torch.zeros(3, 2, dtype=torch.int64)
BAD = [
    ({"ids": IDS.float()}, TypeError, "ids: expected"),
    (
        {"ids": IDS[:2]},
        ValueError,
        "ids: expected shape [3, 2] (hidden without its last dimension, with K ids a row), got",
    ),
    ({"ids": IDS + 6}, logitless.InvalidTargetError, "ids: expected 0 <= id < 6 or ignore_id -1, got 6 at ids[0, 0]"),
    ({"ids": torch.tensor([0, 9])}, logitless.InvalidTargetError, "got 9 at ids[1]"),
    ({"ids": torch.tensor([0, 1]), "offsets": torch.tensor([0, 2])}, ValueError, "offsets: expected shape [4] (N + 1)"),
    (
        {"ids": torch.tensor([0, 1]), "offsets": torch.tensor([0, 2, 1, 2])},
        ValueError,
        "offsets[2]: expected at least 2",
    ),
    ({"offsets": torch.tensor([0, 2, 4, 6])}, ValueError, "ids: expected shape [6] ([E] with offsets), got [3, 2]"),
    ({"targets": torch.zeros(2, dtype=torch.int64)}, ValueError, "targets: expected shape [3]"),
    ({"normalize": "all"}, ValueError, 'normalize: expected one of "candidates", "vocabulary"'),
    ({"reduction": "most"}, ValueError, "reduction: expected one of"),
    ({"weight_gradient": "rows", "normalize": "vocabulary"}, ValueError, 'weight_gradient: expected "dense" with'),
    ({"weight_gradient": "some"}, ValueError, 'weight_gradient: expected one of "dense", "rows"'),
    ({"log_weights": torch.zeros(6)}, ValueError, "log_weights: expected shape [3, 2]"),
    ({"log_weights": torch.zeros(3, 2), "normalize": "vocabulary"}, ValueError, "log_weights: expected None unless"),
    ({"temperature": 0.0}, ValueError, "temperature: expected a number in [2^-126, 2^126], got 0"),
    ({"temperature": torch.ones(2)}, ValueError, "temperature: expected one element, got shape [2]"),
    ({"temperature": -1.0, "ids": IDS[0]}, ValueError, "temperature: expected a number in [2^-126, 2^126], got -1"),
    ({"temperature": torch.ones(3, requires_grad=True)}, ValueError, "one element may, one for each row is a constant"),
    ({"temperature": torch.zeros(1, requires_grad=True)}, ValueError, "temperature: expected a number in [2^-126"),
    ({"scale": torch.ones(2, requires_grad=True)}, ValueError, "scale: expected one element, got shape [2]"),
    ({"scale": math.inf}, ValueError, "scale: expected a finite number, got inf"),
    ({"softcap": -1.0}, ValueError, "softcap: expected 0, or a number in [2^-126, 2^126], got -1"),
    ({"weight": W.double()}, TypeError, "weight: expected float64 for all"),
    ({"weight": W[:, :3]}, ValueError, "hidden: expected shape [..., D] with D = 3"),
    ({"ignore_id": 0.5}, TypeError, "ignore_id: expected an integer"),
]


@pytest.mark.parametrize("changes,error,message", BAD)
def test_refusals(changes, error, message):
    with pytest.raises(error) as raised:
        logitless.linear_candidates(**({"hidden": X, "weight": W, "ids": IDS} | changes))
    assert message in str(raised.value)
