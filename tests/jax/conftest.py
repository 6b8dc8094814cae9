"""Fixtures of the tests that need jax, and run without PyTorch."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import find_package  # noqa: F401

# XLA reads these when jax first needs a device. Without its optimizations small programs compile faster.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=4 " + os.environ.get("XLA_FLAGS", "")
)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
try:
    import jax
except ImportError:
    jax, collect_ignore_glob = None, ["test_*.py"]


def _has_gpu():
    return any(device.platform == "gpu" for device in jax.devices())


def pytest_collection_modifyitems(items):
    """Skips tests marked gpu on machines without one. All others run on the CPU."""
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="jax sees no CUDA device"))


@pytest.fixture(autouse=True)
def _on_its_device(request):
    kind = "gpu" if request.node.get_closest_marker("gpu") else "cpu"
    with jax.default_device(jax.local_devices(backend=kind)[0]):
        yield


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu"))
