"""Fixtures of the tests on several processes."""

import pytest
import torch


@pytest.fixture
def two(ranks_of):
    """Runs a function on two ranks: see ranks.py."""
    return ranks_of(2)


@pytest.fixture
def three(ranks_of):
    return ranks_of(3)


@pytest.fixture
def four(ranks_of):
    return ranks_of(4)


@pytest.fixture
def two_gpus(ranks_of):
    """With a GPU for each rank."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return ranks_of(2, "cuda")
