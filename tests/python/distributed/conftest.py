"""Fixtures of the tests on several processes."""

import pytest
import torch
from client_ranks import Ranks


def _ranks(world):
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("needs gloo")
    ranks = Ranks(world)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two():
    """Runs a function on two ranks: see client_ranks."""
    yield from _ranks(2)


@pytest.fixture(scope="session")
def two_gpus():
    """The same with a GPU for each rank."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(2, "cuda")
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def three():
    yield from _ranks(3)


@pytest.fixture(scope="session")
def four():
    yield from _ranks(4)
