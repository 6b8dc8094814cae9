"""Tests over TRL, skipped without it."""

import logging
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

try:
    import transformers
    import trl

    assert trl.__version__ == "1.16.0"
    transformers.logging.set_verbosity_error()
except (ImportError, AssertionError):
    trl = None


def pytest_collection_modifyitems(items):
    folder = str(Path(__file__).resolve().parent)
    for item in items:
        if trl is None and str(item.path).startswith(folder):
            item.add_marker(pytest.mark.skip(reason="trl 1.16.0 is not installed"))


@pytest.fixture
def trainers():
    """Returns the module, which needs TRL."""
    import trainers

    return trainers


@pytest.fixture(autouse=True)
def _unpatched():
    """Sets one thread, silences loggers, and undoes the patch afterwards."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    import logitless.trl

    logitless.trl.unpatch()
