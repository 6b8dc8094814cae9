"""Finds the package: with LOGITLESS_LIBRARY set, this tree's Python over that library; else the installed package."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

if os.environ.get("LOGITLESS_LIBRARY"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

torch = pytest.importorskip("torch")

settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _fixed_state():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)
