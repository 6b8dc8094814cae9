"""Predictions of a head whose vocabulary ranks share."""

import pytest
from logitless.cost_model import groups


def test_the_formula_says_what_was_measured_at_two_ranks():
    fitted = groups.fitted()
    for name, measured in groups.MEASURED.items():
        for predicted, ms in zip(fitted[name], measured):
            assert abs(predicted - ms) <= 0.15 * ms, name


def test_more_ranks_have_fewer_columns_and_more_to_exchange():
    costs = [groups.group_cost(4096, 256_000, 2304, ranks) for ranks in (1, 2, 8, 64)]
    assert costs[0].seconds == costs[0].product_seconds
    products = [cost.product_seconds for cost in costs]
    assert products == sorted(products, reverse=True)
    exchanges = [cost.seconds - cost.product_seconds for cost in costs]
    assert exchanges == sorted(exchanges)


def test_a_sequence_parallel_head_gathers_and_scatters_what_the_other_adds_up():
    plain = groups.group_cost(8192, 131_072, 4096, 8)
    shared = groups.group_cost(8192, 131_072, 4096, 8, sequence_parallel=True)
    more_calls = shared.gather_seconds + shared.reduction_seconds - plain.reduction_seconds
    assert more_calls == pytest.approx(groups.CALL_SECONDS)


def test_budgets_and_refusals():
    cost = groups.group_cost(8192, 131_072, 4096, 2, max_workspace_bytes=512 << 20)
    assert cost.workspace_bytes <= 512 << 20
    with pytest.raises(ValueError, match="ranks: expected a number in .1, 128. .at most one for each column., got 129"):
        groups.group_cost(16, 128, 64, 129)
    for device in ("abacus", "a100"):
        with pytest.raises(ValueError, match=f"device: expected one of h100, h200 .their links .* got {device}"):
            groups.group_cost(16, 128, 64, 2, device=device)
    assert groups.table([1, 2]).count("\n") == 7
