"""Divergences of heads that ranks share, against float64 over whole logits and the single-process function."""

import math

import divergence_oracle as oracle
import logitless
import pytest
import torch
from logitless._divergence.problem import Problem
from support import SHORT

from groups.common import ROWS, shard_sizes
from groups.ranks import sizes

OPTIONS = {
    "plain": {},
    "all": {"student_scale": 0.5, "teacher_scale": -2.0, "student_softcap": 8.0, "temperature": 1.7},
}
OF_SHARD = ("student_weight", "student_bias", "teacher_weight", "teacher_bias")


def columns_of(ranks):
    counts = shard_sizes(ranks)
    start = sum(counts[: ranks.rank])
    return slice(start, start + counts[ranks.rank])


def make(ranks, **options):
    return oracle.make((ROWS,), sum(shard_sizes(ranks)), **options)


def shard_of(ranks, case):
    columns = columns_of(ranks)
    cut = {name: t[columns] if name in OF_SHARD and t is not None else t for name, t in case.tensors.items()}
    return oracle.Case(cut, case.options)


def run(ranks, case, upstream=None, **more):
    """Returns the oracle's results for this rank's shard."""
    given = shard_of(ranks, case).tensors | case.options | more
    given = {name: value.to(ranks.device) if torch.is_tensor(value) else value for name, value in given.items()}
    for name in oracle.STUDENT:
        given[name] = None if given[name] is None else given[name].clone().requires_grad_()
    result = logitless.distributed.linear_divergence(**given, group=ranks.group, return_stats=True)
    factor = torch.ones_like(result.loss) if upstream is None else upstream.to(result.loss)
    (result.loss * factor).sum().backward()
    values = {name: getattr(result, name).detach() for name in ("loss", "divergence", "entropy")}
    values |= {f"d_{name}": oracle.gradient_of(given[name]) for name in oracle.STUDENT}
    return {name: None if value is None else value.cpu() for name, value in values.items()}


def whole(ranks, got):
    """Returns results with the gradients of all ranks' rows. Others must be the same on all ranks."""
    every = ranks.gather(got)
    for name in ("loss", "divergence", "entropy", "d_student_hidden"):
        assert all(torch.equal(other[name], got[name]) for other in every), (name, "between ranks")
    gathered = {}
    for name in ("d_student_weight", "d_student_bias"):
        gathered[name] = None if got[name] is None else torch.cat([other[name] for other in every])
    return got | gathered


def check(ranks, case, upstream=None, **more):
    """Compares with float64.

    A 16-bit gradient of hidden states is rounded on each rank, and in each sum. On CUDA gradients of logits are rounded
    as well. These gradients are compared by their norms.
    """
    got = whole(ranks, run(ranks, case, upstream, **more))
    dtype, truth = case.tensors["student_hidden"].dtype, oracle.evaluate(case, torch.float64, upstream)
    rounded = oracle.STUDENT if ranks.device.type == "cuda" else oracle.STUDENT[:1]
    for name in [f"d_{name}" for name in rounded] if dtype in SHORT else ():
        if got[name] is not None:
            exact = truth[name].double()
            stored = (exact.to(dtype).double() - exact).norm()  # mostly float16 numbers below its normal ones
            bound = (ranks.size + 1) * (torch.finfo(dtype).eps * exact.norm() + stored)
            assert (got[name].double() - exact).norm() <= bound, name
            got[name] = exact
    oracle.compare(case, got, upstream)


def case_divergence(ranks):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for beta in (0.0, 0.3, 1.0):
            for options in OPTIONS.values():
                check(ranks, make(ranks, dtype=dtype, beta=beta, **options))
        case = make(ranks, dtype=dtype, beta=0.5, bias=False, reduction="none")
        check(ranks, case, torch.randn(ROWS, generator=torch.Generator().manual_seed(1)))


@sizes(2, 3, 4)
def case_divergence_of_rows_that_count(ranks):
    for reduction in ("mean", "none"):
        case = make(ranks, beta=0.4, reduction=reduction)
        generator = torch.Generator().manual_seed(2)
        case.options["mask"] = torch.rand(ROWS, generator=generator) < 0.6
        case.options["token_weight"] = torch.rand(ROWS, generator=generator)
        check(ranks, case)
        case.tensors["teacher_hidden"][~case.options["mask"]] = math.nan
        assert all(value.isfinite().all() for value in run(ranks, case).values())
        case.options["mask"] = torch.zeros(ROWS)
        case.options |= {"num_items": 3} if reduction == "mean" else {}
        assert not any(value.any() for value in run(ranks, case).values())


def case_divergence_in_any_budget(ranks):
    for reduction in ("mean", "none"):
        case = make(ranks, beta=0.4, reduction=reduction, student_softcap=9.0)
        with pytest.raises(logitless.BudgetTooSmallError) as refused:
            run(ranks, case, max_workspace_bytes=1)
        least = refused.value.required_bytes
        assert ranks.gather(least) == [least] * ranks.size
        with pytest.raises(logitless.BudgetTooSmallError):
            run(ranks, case, max_workspace_bytes=least - 1)
        for budget in (least, 2 * least, 5 * least):
            check(ranks, case, max_workspace_bytes=budget)


def case_divergence_of_equal_and_of_masked_heads(ranks):
    for beta in (0.0, 0.3, 1.0):
        case = make(ranks, student=16, teacher=16, beta=beta, reduction="none")
        for part in ("hidden", "weight", "bias"):
            case.tensors[f"teacher_{part}"] = case.tensors[f"student_{part}"]
        got = run(ranks, case)
        assert got["divergence"].abs().max() == 0 and not any(got[f"d_{name}"].any() for name in oracle.STUDENT)
        case = make(ranks, beta=beta)
        for name in ("student_bias", "teacher_bias"):  # the last rank with rows has no possible column
            case.tensors[name][-shard_sizes(ranks)[-1] :] = -math.inf
        expected, got = oracle.run(case), whole(ranks, run(ranks, case))
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value)


def case_divergence_of_a_nan(ranks):
    case = make(ranks, beta=0.5, reduction="none")
    case.tensors["student_weight"][-1] = math.nan  # of one rank
    assert run(ranks, case)["divergence"].isnan().all()
    case = make(ranks, beta=0.5, reduction="none")
    case.tensors["teacher_hidden"][2] = math.nan
    got = run(ranks, case)
    assert got["divergence"].isnan().tolist() == [row == 2 for row in range(ROWS)]
    assert got["d_student_hidden"].isnan().any(-1).tolist() == [row == 2 for row in range(ROWS)]


def case_divergence_over_lists_of_ids(ranks):
    vocab = sum(shard_sizes(ranks))
    ids = torch.stack([torch.randperm(vocab, generator=torch.Generator().manual_seed(row))[:7] for row in range(ROWS)])
    offsets = torch.arange(ROWS + 1) * 7
    for given in ({"ids": ids}, {"ids": ids.reshape(-1), "offsets": offsets}, {"ids": ids[0]}):
        for normalize in ("candidates", "vocabulary"):
            case = make(ranks, dtype=torch.float64, beta=0.3, **OPTIONS["all"])
            case.options |= {"mask": torch.arange(ROWS) % 3 != 0, "normalize": normalize} | given
            expected, got = oracle.run(case), whole(ranks, run(ranks, case))
            for name, value in expected.items():
                torch.testing.assert_close(got[name], value)
    with pytest.raises(ValueError, match="ids: expected the same on all ranks"):
        run(ranks, make(ranks), ids=ids.flip(1) if ranks.rank == 1 else ids)


def case_divergence_of_16_bit_products(ranks):
    """Gradients with a buffer of sums, as on CUDA, of a rank without columns too."""
    for reduction in ("mean", "none"):
        case = make(ranks, dtype=torch.bfloat16, beta=0.5, bias=False, reduction=reduction)
        check(ranks, case, max_workspace_bytes=30_000)


@sizes(2)
def case_compiled_divergence(ranks):
    case = make(ranks, beta=0.4)
    expected = run(ranks, case)
    leaves = shard_of(ranks, case).leaves()

    def step(**tensors):
        return logitless.distributed.linear_divergence(**tensors, beta=0.4, group=ranks.group) * 1

    loss = torch.compile(step, fullgraph=True, backend="aot_eager")(**leaves)
    loss.backward()
    assert torch.equal(loss, expected["loss"])
    for name in oracle.STUDENT:
        assert torch.equal(leaves[name].grad, expected[f"d_{name}"])


def case_divergences_that_ranks_call_otherwise(ranks):
    case = make(ranks, beta=0.5)
    mask, ids = torch.arange(ROWS) % 3 != 0, torch.tensor([1, 3, 4])
    for name, here, there in (
        ("beta", {"beta": 0.4}, {}),
        ("beta", {"ids": ids, "beta": 0.4}, {"ids": ids}),
        ("function", {"ids": ids}, {}),
        ("mask", {"ids": ids, "mask": mask}, {"ids": ids, "mask": mask.flip(0)}),
        ("temperature", {"temperature": 2.0}, {}),
        ("max_workspace_bytes", {"max_workspace_bytes": 1 << 20}, {}),
        ("mask", {"mask": mask}, {}),
        ("mask", {"mask": mask}, {"mask": mask.flip(0)}),
        ("rows that mask leaves", {"mask": mask}, {"mask": mask | (torch.arange(ROWS) == 0)}),
        ("teacher_bias", {"teacher_bias": None}, {}),
        ("gradients together with the loss", {"reduction": "none"}, {}),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected the same on all ranks"):
            run(ranks, case, **(here if ranks.rank == 1 else there))
        assert run(ranks, case)["loss"].isfinite()
    with pytest.raises(ValueError, match="reduction: expected" if ranks.rank == 1 else "refused its arguments"):
        run(ranks, case, reduction="most" if ranks.rank == 1 else "mean")
    with pytest.raises(ValueError, match=f"vocab_total: expected {sum(shard_sizes(ranks))} "):
        run(ranks, case, vocab_total=9)
    assert run(ranks, case)["loss"].isfinite()


def case_a_later_divergence_exchanges_gradients_alone(ranks):
    case = make(ranks, beta=0.5, reduction="none")
    exchanged = []
    with pytest.MonkeyPatch.context() as patch:
        plan = Problem.plan
        patch.setattr(Problem, "plan", lambda p, *rest: (exchanged.append(p.exchange is not None), plan(p, *rest))[1])
        run(ranks, case)
    assert exchanged == [True, False]
