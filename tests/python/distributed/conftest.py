"""Fixtures for tests on several processes: each runs a function on its ranks; see ranks.py."""

import pytest
import torch


@pytest.fixture
def two(ranks_of):
    return ranks_of(2)


@pytest.fixture
def three(ranks_of):
    return ranks_of(3)


@pytest.fixture
def four(ranks_of):
    return ranks_of(4)


@pytest.fixture
def two_gpus(ranks_of):
    """Gives each rank a GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return ranks_of(2, "cuda")


@pytest.fixture
def ranks(request):
    """Returns the fixture that client_oracle.on() names."""
    return request.getfixturevalue(request.param)
