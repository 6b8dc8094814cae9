"""Finds the package.

With LOGITLESS_LIBRARY set, it is this tree's Python over that library. Otherwise it is the installed package, even an
editable one. Without either it is this tree's Python over a library built here.
"""

import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[2]
if not os.environ.get("LOGITLESS_LIBRARY") and importlib.util.find_spec("logitless") is None:
    builds = [ROOT / "build" / name / "src" / "liblogitless.so" for name in ("test", "dev", "quick")]
    newest = max((path for path in builds if path.exists()), key=lambda path: path.stat().st_mtime, default=None)
    if newest is not None:
        os.environ["LOGITLESS_LIBRARY"] = str(newest)
if os.environ.get("LOGITLESS_LIBRARY"):
    sys.path.insert(0, str(ROOT / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

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
