"""Lists of ids for a head that ranks share, against the single-process function."""

import logitless
import pytest
import torch

from groups.common import ROWS, Data

LISTS = {
    "rows": lambda data, ids: {"ids": ids},
    "offsets": lambda data, ids: {
        "ids": ids.reshape(-1),
        "offsets": torch.tensor([0] + [7] * (ROWS - 1) + [ids.numel()]),
    },
    "shared": lambda data, ids: {"ids": ids[0]},
}


def results(data, columns, given, **options):
    """Returns outputs and gradients. columns: the rows of the weight that this call has."""
    hidden, weight, bias = data.leaves(columns=columns)
    function = logitless.distributed.linear_candidates if "group" in options else logitless.linear_candidates
    out = function(hidden, weight, **given, bias=bias, return_entropy=True, **options)
    outputs = [out.log_probs, out.lse, out.logits, out.entropy, out.loss]
    generator = torch.Generator().manual_seed(3)
    total = 0
    for values in outputs[:2] + outputs[3:]:
        weights = torch.randn(values.shape, generator=generator, dtype=values.dtype)
        total = total + (torch.where(values.isfinite(), values, 0) * weights).sum()
    learned = [number for number in given.values() if isinstance(number, torch.Tensor) and number.requires_grad]
    gradients = torch.autograd.grad(total, (hidden, weight, bias, *learned))
    return [value.detach() for value in outputs], gradients


def case_candidates(ranks):
    for kind, make in LISTS.items():
        for normalize in ("candidates", "vocabulary"):
            data = Data(ranks)
            ids = torch.randint(0, data.vocab, (ROWS, 9), generator=torch.Generator().manual_seed(1))
            ids[:, 4] = -1
            given = make(data, ids) | {"normalize": normalize, "softcap": 3.0, "temperature": data.temperature}
            targets = given["ids"][..., 0] if kind == "rows" else given["ids"][0].expand(ROWS)
            given |= {"targets": targets, "reduction": "none"}
            expected, (d_hidden, d_weight, d_bias) = results(data, slice(None), given)
            got, gradients = results(data, data.shard, given, group=ranks.group)
            for value, exact in zip(got, expected):
                torch.testing.assert_close(value, exact)
            for value, exact in zip(gradients, (d_hidden, d_weight[data.shard], d_bias[data.shard])):
                torch.testing.assert_close(value, exact)
            every = ranks.gather((*got, gradients[0]))
            assert all(torch.equal(a, b) for other in every for a, b in zip(other, every[0])), "between ranks"


def case_learned_numbers_of_candidates(ranks):
    for kind, make in LISTS.items():
        for normalize in ("candidates", "vocabulary"):
            data = Data(ranks)
            ids = torch.randint(0, data.vocab, (ROWS, 9), generator=torch.Generator().manual_seed(1))
            ids[:, 4] = -1
            given = make(data, ids) | {"normalize": normalize, "targets": ids[:, 0].clone(), "reduction": "none"}
            for name, number in (("scale", 0.7), ("temperature", 1.5)):
                given[name] = torch.tensor(number, dtype=torch.float64, requires_grad=True)
            if kind != "rows":
                given["targets"] = given["ids"][0].expand(ROWS)
            expected, (d_hidden, d_weight, d_bias, *numbers) = results(data, slice(None), given)
            got, gradients = results(data, data.shard, given, group=ranks.group)
            shared = (d_hidden, d_weight[data.shard], d_bias[data.shard], *numbers)
            for value, exact in zip((*got, *gradients), (*expected, *shared)):
                torch.testing.assert_close(value, exact)


def case_batches_of_gradients_of_candidates(ranks):
    data = Data(ranks)
    hidden, weight, _ = data.leaves(columns=data.shard)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, data.vocab, (ROWS, 9), generator=torch.Generator().manual_seed(1))
    lse = logitless.distributed.linear_candidates(hidden, weight, ids, scale=scale, group=ranks.group).lse
    upstream, leaves = torch.eye(ROWS, dtype=lse.dtype), (hidden, weight, scale)
    batch = torch.autograd.grad(lse, leaves, upstream, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(lse, leaves, one, retain_graph=True) for one in upstream]
    for got, expected in zip(batch, zip(*each)):
        assert torch.equal(got, torch.stack(expected))


def case_a_budget_of_candidates_that_one_shard_exceeds(ranks):
    """The gradients of its many columns do not fit, so all ranks refuse the call that would make them later."""
    rows = 4_000 if ranks.rank == 0 else 1
    weight = torch.randn(rows, 8, dtype=torch.float64, requires_grad=True)
    hidden, ids = torch.ones(ROWS, 8, dtype=torch.float64), torch.zeros(ROWS, 3, dtype=torch.int64)

    def call(**options):
        return logitless.distributed.linear_candidates(hidden, weight, ids, group=ranks.group, **options).lse

    message = "at least" if ranks.rank == 0 else "rank 0 of the group refused its arguments: BudgetTooSmallError"
    with pytest.raises(ValueError, match=message):
        call(max_workspace_bytes="20KiB")
    with torch.no_grad():
        assert torch.equal(call(max_workspace_bytes="20KiB"), call())


def case_candidates_that_ranks_give_otherwise(ranks):
    data = Data(ranks)
    ids = torch.zeros(ROWS, 3, dtype=torch.int64)

    def call(**options):
        given = {"hidden": data.input, "weight": data.weight[data.shard], "ids": ids} | options
        return logitless.distributed.linear_candidates(**given, group=ranks.group)

    for name, other in (
        ("normalize", {"normalize": "vocabulary"}),
        ("ids", {"ids": ids + 1}),
        ("ids", {"ids": ids[:, :2]}),
        ("scale requires grad", {"scale": torch.ones(1, requires_grad=True)}),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected the same on all ranks"):
            call(**(other if ranks.rank == 1 else {}))
        assert call().log_probs.isfinite().all()
    with pytest.raises(ValueError, match="reduction: expected one of" if ranks.rank == 1 else "refused its arguments"):
        call(**({"reduction": "most"} if ranks.rank == 1 else {}))
    with pytest.raises(logitless.InvalidTargetError, match=f"0 <= id < {data.vocab} or ignore_id -1, got {data.vocab}"):
        call(ids=ids + data.vocab)
    assert call().log_probs.isfinite().all()
