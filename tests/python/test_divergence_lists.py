"""logitless.linear_divergence over a list of ids for each row, beside float64 over whole logits."""

import math

import divergence_oracle as oracle
import logitless
import pytest
import torch
from logitless.candidates import forward_kl, generalized_jsd, reverse_kl
from support import DTYPES, SHORT

ROWS, VOCAB, COUNT = (4, 6), 60, 9
BETAS = [0.0, 0.3, 1.0]
OPTIONS = {
    "plain": {},
    "all": {"student_scale": 0.5, "teacher_scale": -2.0, "student_softcap": 8.0, "temperature": 1.7},
}


def lists_of(kind, rows=ROWS):
    """Returns the arguments of a kind of lists, and for each row whether an id is in its list, ``[N, V]``."""
    generator, count = torch.Generator().manual_seed(4), math.prod(rows)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:COUNT] for _ in range(count)])
    lengths = torch.randint(1, COUNT + 1, (count,), generator=generator)
    if kind == "shared":
        return {"ids": ids[0]}, membership(ids[:1]).expand(count, -1)
    if kind == "rows":
        return {"ids": ids.reshape(*rows, COUNT).int()}, membership(ids)
    is_none = torch.arange(COUNT) >= lengths[:, None]
    padded = ids.masked_fill(is_none, -7)
    if kind == "padded":
        return {"ids": padded.reshape(*rows, COUNT), "ignore_id": -7}, membership(padded)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return {"ids": ids[~is_none], "offsets": offsets}, membership(padded)


def membership(ids):
    has = torch.zeros(len(ids), VOCAB + 1, dtype=torch.bool)
    return has.scatter_(1, torch.where(ids < 0, VOCAB, ids), True)[:, :VOCAB]


def expected(case, members, normalize, dtype, upstream=None, constant_lse=False):
    """Returns results by name, from whole logits in a dtype. constant_lse: without the gradient through lse."""
    leaves, beta = case.leaves(), case.options.get("beta", 0.5)
    every, pair = [], []
    for head in ("student", "teacher"):
        z = oracle.log_probs(case, leaves, head, dtype)
        own = z.masked_fill(~members, -math.inf)
        lse = (own if normalize == "candidates" else z).logsumexp(-1, keepdim=True)
        log_p = own - (lse.detach() if constant_lse else lse)
        if normalize == "vocabulary":
            log_p = torch.cat([log_p, torch.log1p(-log_p.exp().sum(-1, keepdim=True))], -1)
        every.append(own - lse if normalize == "candidates" else z - lse)
        pair.append(log_p)
    is_none = (pair[0] == -math.inf) & (pair[1] == -math.inf)
    p, q = (log_p.exp() for log_p in pair)
    log_p, log_q = (torch.where(is_none, 0, log_p) for log_p in pair)
    if beta in (0, 1):
        rows = (q * (log_q - log_p) if beta == 0 else p * (log_p - log_q)).sum(-1)
    else:
        log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
        rows = (beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)).sum(-1)
    entropy = torch.special.entr(every[0].exp()).sum(-1).detach()
    if case.options.get("mask") is not None:
        valid = case.options["mask"].reshape(-1) != 0
        rows, entropy = torch.where(valid, rows, 0), torch.where(valid, entropy, 0)
    loss = rows * oracle.row_weights(case, rows)
    loss = loss if case.options.get("reduction", "mean") == "none" else loss.sum()
    factor = torch.ones_like(loss) if upstream is None else upstream.reshape(-1).to(loss.dtype)
    (loss * factor).sum().backward()
    values = {"loss": loss, "divergence": rows, "entropy": entropy}
    gradients = {f"d_{n}": oracle.gradient_of(leaves[n]) for n in oracle.STUDENT}
    return {n: v.detach() for n, v in values.items()} | gradients


def check(case, given, members, normalize="candidates", upstream=None):
    """Compares with float64, each number within twice the naive computation's error and units of rounding.

    Logits are below 8, and a row's terms have errors of up to 8 of their units, as in divergence_oracle.units(). Some
    products round gradients of logits to 16 bits, those through the candidates and those through lse on their own. Such
    gradients are compared by the norms of these parts.
    """
    got = oracle.run(case, upstream, **given, normalize=normalize)
    dtype = case.tensors["student_hidden"].dtype
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    arguments = members, normalize
    truth, naive = (expected(case, *arguments, kind, upstream) for kind in (torch.float64, stats))
    direct = expected(case, *arguments, torch.float64, upstream, constant_lse=normalize == "vocabulary")
    unit = 64 * torch.finfo(stats).eps
    for name, exact in truth.items():
        if exact is None:
            continue
        value, exact = got[name].double().reshape(-1), exact.double().reshape(-1)
        if name.startswith("d_") and dtype in SHORT:
            part = direct[name].double().reshape(-1)
            stored = (exact.to(dtype).double() - exact).norm()  # mostly float16 numbers below its normal ones
            bound = 2 * torch.finfo(dtype).eps * (part.norm() + (exact - part).norm()) + stored
            assert (value - exact).norm() <= bound, (name, (value - exact).norm(), bound)
            continue
        naive_error = (naive[name].double().reshape(-1) - exact).abs().max()
        least = 0.0 if name.startswith("d_") else 1.0
        bound = 2 * naive_error + unit * exact.abs().max().clamp(min=least)
        assert ((value - exact).abs() <= bound).all(), (name, (value - exact).abs().max(), bound)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("normalize", ["candidates", "vocabulary"])
@pytest.mark.parametrize("kind", ["rows", "padded", "offsets", "shared"])
@pytest.mark.parametrize("beta", BETAS)
def test_against_float64(beta, kind, normalize, options, dtype):
    given, members = lists_of(kind)
    case = oracle.make(ROWS, VOCAB, dtype=dtype, beta=beta, reduction="none", **options)
    got = check(case, given, members, normalize, torch.randn(ROWS))
    assert got["loss"].shape == ROWS and got["entropy"].shape == ROWS


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("normalize", ["candidates", "vocabulary"])
@pytest.mark.parametrize("kind", ["rows", "offsets", "shared"])
def test_rows_that_do_not_count(kind, normalize, reduction):
    given, members = lists_of(kind)
    case = oracle.make(ROWS, VOCAB, reduction=reduction, beta=0.3)
    mask = torch.rand(ROWS, generator=torch.Generator().manual_seed(5)) < 0.6
    case.options |= {"mask": mask, "token_weight": torch.rand(ROWS)}
    check(case, given, members, normalize, torch.tensor(-1.7))
    for name in ("student_hidden", "teacher_hidden"):
        case.tensors[name][~mask] = math.nan
    got = oracle.run(case, **given, normalize=normalize)
    assert all(value.isfinite().all() for value in got.values())
    assert not got["d_student_hidden"][~mask].any() and not got["divergence"][~mask].any()
    case.options |= {"mask": torch.zeros(ROWS), "reduction": "sum"}
    assert not any(value.any() for value in oracle.run(case, **given, normalize=normalize).values())


@pytest.mark.parametrize("beta", BETAS)
def test_lists_of_all_ids_are_the_vocabulary(beta):
    case = oracle.make(ROWS, VOCAB, dtype=torch.float64, beta=beta, reduction="none")
    whole = oracle.run(case)
    for normalize in ("candidates", "vocabulary"):
        got = oracle.run(case, ids=torch.randperm(VOCAB), normalize=normalize)
        for name, value in whole.items():
            torch.testing.assert_close(got[name], value)


@pytest.mark.parametrize("of", ["student", "teacher"])
@pytest.mark.parametrize("beta", BETAS)
def test_on_the_largest_logits_of_a_head(of, beta):
    case = oracle.make(ROWS, VOCAB, beta=beta, bias=False)
    ids = logitless.linear_top_k(case.tensors[f"{of}_hidden"], case.tensors[f"{of}_weight"], 5).ids
    for normalize in ("candidates", "vocabulary"):
        check(case, {"ids": ids}, membership(ids.reshape(-1, 5)), normalize)


@pytest.mark.parametrize("beta", BETAS)
def test_an_id_that_one_head_excludes(beta):
    """It is infinite where the formula says so, and else finite with finite gradients."""
    for head, infinite_at in (("student", 0), ("teacher", 1)):
        case = oracle.make(ROWS, VOCAB, beta=beta, reduction="none")
        case.tensors[f"{head}_bias"][7] = -math.inf
        got = oracle.run(case, ids=torch.tensor([3, 7, 11]))
        assert got["divergence"].isinf().all() if beta == infinite_at else got["divergence"].isfinite().all()
        assert got["d_student_hidden"].isfinite().all() or beta == infinite_at


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("given", [None, "shared", "offsets"])
def test_a_row_of_weight_0_may_have_an_infinite_divergence(given, reduction):
    case = oracle.make((3,), VOCAB, beta=1.0, reduction=reduction, token_weight=torch.tensor([0.0, 1.0, 1.0]))
    case.tensors["teacher_bias"][7] = -math.inf
    offsets = torch.tensor([0, 3, 5, 7])
    options = {"ids": torch.tensor([3, 7, 11, 3, 11, 4, 5]), "offsets": offsets} if given == "offsets" else {}
    if given == "shared":
        options = {"ids": torch.tensor([3, 7, 11])}
    got = oracle.run(case, **options)
    assert got["divergence"][0].isinf() and not got["d_student_hidden"][0].any()
    if reduction == "none":
        assert got["loss"][0] == 0
    if given == "offsets":
        assert got["loss"].isfinite().all() and all(got[name].isfinite().all() for name in got if name[:2] == "d_")


def test_rows_without_ids():
    case = oracle.make((3,), VOCAB, reduction="none")
    given = {"ids": torch.tensor([1, 2, 5]), "offsets": torch.tensor([0, 2, 2, 3])}
    for normalize in ("candidates", "vocabulary"):
        got = oracle.run(case, **given, normalize=normalize)
        assert got["divergence"][1] == 0 and got["d_student_hidden"].isfinite().all()
        assert not got["d_student_hidden"][1].any()


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_ends_are_the_losses_of_lists(beta):
    log_p, log_q = (torch.randn(5, 7, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    loss = (forward_kl, reverse_kl)[int(beta)](log_p, log_q)
    assert torch.equal(generalized_jsd(log_p, log_q, beta=beta), loss)
    near = generalized_jsd(log_p, log_q, beta=2.0**-40 if beta == 0 else 1 - 2.0**-40)
    torch.testing.assert_close(near * 2.0**40, loss, rtol=1e-3, atol=0)


IDS = torch.zeros(7, 3, dtype=torch.int64)
BAD = {
    "offsets alone": ({"offsets": torch.zeros(8, dtype=torch.int64)}, "offsets: expected None without ids"),
    "normalize alone": ({"normalize": "vocabulary"}, "normalize: expected 'candidates' without ids"),
    "ignore_id alone": ({"ignore_id": 5}, "ignore_id: expected -1 without ids"),
    "normalize": ({"ids": IDS, "normalize": "rows"}, "normalize: expected one of"),
    "shape": ({"ids": IDS[:5]}, r"ids: expected shape \[7, 3\]"),
    "range": ({"ids": IDS + 50}, "ids: expected 0 <= id < 50"),
    "beta": ({"ids": IDS, "beta": -0.5}, r"beta: expected 0, or a number in \[2\^-100, 1\], got -0.5"),
    "offsets": (
        {"ids": IDS[0], "offsets": torch.tensor([0, 2, 1, 3, 3, 3, 3, 3]), "mask": torch.ones(7)},
        "offsets: expected to ascend from 0 to 3",
    ),
}


@pytest.mark.parametrize("changes, message", BAD.values(), ids=BAD)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        logitless.linear_divergence(**oracle.make().leaves() | changes)
