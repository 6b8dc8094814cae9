"""Fixtures of the tests that need PyTorch."""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import find_package  # noqa: F401

torch = pytest.importorskip("torch")

settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items):
    """Skips tests marked gpu on machines without one."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_not_searched():
    """Trainers collect garbage several times each, and millions of objects are alive: this leaves out those so far."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_state():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ranks_of():
    """Returns ranks_of(size, device): processes that run a function; see ranks.py."""
    from ranks import Ranks

    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("needs gloo")
    started = {}

    def ranks(size, device="cpu"):
        return started.setdefault((size, device), Ranks(size, device))

    yield ranks
    for each in started.values():
        each.close()
