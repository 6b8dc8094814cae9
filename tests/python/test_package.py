"""Inspection, import without PyTorch, memory, fork, and the library's place."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import logitless
import pytest
import torch
from logitless import native
from support import EXAMPLES, python

REASON = """
import logitless
try:
    logitless.version()
except logitless.LibraryNotFoundError as error:
    assert isinstance(error, ImportError)
    print(error)
"""


def test_version_and_backends():
    assert logitless.version() == logitless.__version__
    header = (EXAMPLES.parent / "include/logitless/logitless.h").read_text()
    numbers = re.findall(r"^#define LOGITLESS_VERSION_[A-Z]+ (\d+)$", header, re.MULTILINE)
    assert logitless.version() == ".".join(numbers)
    over_it = (EXAMPLES.parent / "include/logitless/logitless.hpp").read_text()
    assert f"inline namespace v{numbers[0]}_{numbers[1]} {{" in over_it
    names = [backend.name for backend in logitless.backends()]
    assert names[-1] == "reference" and logitless.backends()[-1].why_unavailable == ""


def test_plan_for_a_model_of_device():
    plan = logitless.plan(8192, 128256, 4096, dtype="bfloat16", device="h200")
    assert (plan.backend, plan.engine) == ("cuda", "sm90")
    top = logitless.plan(8192, 128256, 4096, dtype="bfloat16", device="h200", gradients=(), top_k=8)
    assert top.kind == "forward" and "lists of" in top.config
    assert logitless.plan(8192, 128256, 4096, dtype="bfloat16", device="H200") == plan


def test_the_device_of_a_plan():
    on_host = logitless.plan(64, 1000, 32)
    for device in ("cpu", torch.device("cpu"), torch.zeros(1).device):
        assert logitless.plan(64, 1000, 32, device=device) == on_host
    if torch.cuda.is_available():
        assert logitless.plan(64, 1000, 32, device="cuda:0") == logitless.plan(64, 1000, 32, device=0)
    else:
        with pytest.raises((logitless.BackendUnavailableError, logitless.UnsupportedError), match="cuda"):
            logitless.plan(64, 1000, 32, device=torch.device("cuda", 0))


def test_plan():
    plan = logitless.plan(64, 1000, 32, dtype=torch.bfloat16)
    assert plan.kind in ("whole", "token_chunks", "vocab_chunks") and plan.workspace_bytes > 0
    assert 1 <= plan.threads <= torch.get_num_threads()
    assert logitless.plan(4096, 32000, 1024).threads == torch.get_num_threads()
    asked = logitless.plan(64, 1000, 32, dtype=torch.bfloat16, backend=f"cpu:{plan.engine}")
    assert asked.reason == "requested" and plan.reason in repr(plan)
    assert asked.config == plan.config
    assert logitless.plan(64, 1000, 32, gradients=()).kind == "forward"
    assert logitless.plan(64, 1000, 32, threads=1, backend="reference").backend == "reference"
    assert logitless.plan(64, 1000, 32, dtype="float64").backend == "reference"
    considered = logitless.plans(64, 1000, 32, dtype=torch.bfloat16)
    assert plan.choice and dataclasses.replace(plan, choice="") in considered
    with pytest.raises(logitless.BudgetTooSmallError) as error:
        logitless.plan(64, 1000, 32, max_workspace_bytes=1)
    fits = logitless.plan(64, 1000, 32, max_workspace_bytes=error.value.required_bytes)
    assert fits.workspace_bytes == error.value.required_bytes


def test_plans_of_the_largest_logits_and_of_several_targets():
    size = (64, 1000, 32)
    loss = logitless.plan(*size, gradients=())
    top = logitless.plan(*size, gradients=(), top_k=8)
    assert top.kind == "forward" and top.workspace_bytes > loss.workspace_bytes
    assert logitless.plans(*size, gradients=(), top_k=8)[0].kind == "forward"
    several = logitless.plan(*size, targets_per_row=8)
    assert several.workspace_bytes > logitless.plan(*size).workspace_bytes


def test_without_torch():
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import logitless
assert logitless.plan(5, 6, 7).workspace_bytes > 0
for name in ("linear_cross_entropy", "LinearCrossEntropyLoss"):
    try:
        getattr(logitless, name)
    except ImportError as error:
        assert "needs PyTorch" in str(error), error
    else:
        raise AssertionError(name)
import numpy as np
result = logitless.numpy.linear_cross_entropy(np.ones((2, 3), "f"), np.ones((4, 3), "f"), np.array([0, 1]))
assert abs(result.loss - np.log(4)) < 1e-6
"""
    python(code)


def test_importing_does_not_import_torch_or_numpy():
    python("import sys, logitless; assert not {'torch', 'numpy'} & set(sys.modules), 'imported too much'")


def test_an_import_of_all_names_needs_no_jax():
    python("""
import sys
sys.modules["jax"] = None  # as if it were not installed
from logitless import *
import logitless
try:
    logitless.jax
except ImportError as error:
    assert str(error) == "logitless.jax needs jax 0.10 or newer, which is not installed"
else:
    raise AssertionError
""")


def test_submodules_are_found_and_import_no_other_library():
    python("""
import sys, torch.utils.flop_counter  # PyTorch itself imports an installed Triton there
before = set(sys.modules)
import logitless
for name in logitless.compat.__all__:
    module = getattr(logitless.compat, name)
    assert all(hasattr(module, entry) for entry in module.__all__), name
assert logitless.transformers.patch and logitless.nn.FusedHead
assert set(logitless.compat.__all__) <= set(dir(logitless.compat))
assert not {"cut_cross_entropy", "fla", "liger_kernel", "quack", "transformers", "triton"} & (set(sys.modules) - before)
try:
    logitless.compat.unsloth
except AttributeError as error:
    assert "logitless.compat" in str(error)
else:
    raise AssertionError
""")


def test_a_library_that_cannot_be_loaded(tmp_path):
    assert "LOGITLESS_LIBRARY" in python(REASON, LOGITLESS_LIBRARY="/nowhere/liblogitless.so")
    path = tmp_path / "liblogitless.so"
    path.write_text("not a library")
    said = python(REASON, LOGITLESS_LIBRARY=str(path))
    assert f"the native library {path} cannot be loaded" in said and "file too short" in said


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler")
def test_a_library_that_lacks_another(tmp_path):
    """It acts as on a system without libgomp."""
    source, needed, path = tmp_path / "a.c", tmp_path / "libneeded.so.1", tmp_path / "liblogitless.so"
    source.write_text("int needed(void);\nint logitless_version(void) { return needed(); }\n")
    (tmp_path / "b.c").write_text("int needed(void) { return 1; }\n")
    shared = ["cc", "-shared", "-fPIC"]
    subprocess.run([*shared, str(tmp_path / "b.c"), "-Wl,-soname,libneeded.so.1", "-o", str(needed)], check=True)
    subprocess.run([*shared, str(source), "-Wl,--no-as-needed", str(needed), "-o", str(path)], check=True)
    needed.unlink()
    assert "libneeded.so.1: cannot open shared object file" in python(REASON, LOGITLESS_LIBRARY=str(path))


def editable(tmp_path, with_library):
    """Returns code that imports the package as an editable installation does: modules in one folder, library in
    another."""
    modules = Path(logitless.__file__).parent
    site = tmp_path / "site-packages" / "logitless"
    site.mkdir(parents=True)
    if with_library:
        shutil.copy(native.library_path(), site / "liblogitless.so")
    code = f"""
import importlib.util, os, sys
os.environ.pop("LOGITLESS_LIBRARY", None)
spec = importlib.util.spec_from_file_location(
    "logitless", {str(modules / "__init__.py")!r}, submodule_search_locations=[{str(modules)!r}, {str(site)!r}])
module = importlib.util.module_from_spec(spec)
sys.modules["logitless"] = module
spec.loader.exec_module(module)
"""
    return code, site


INSTALLED = (Path(logitless.__file__).parent / "liblogitless.so").exists()
from_a_tree = pytest.mark.skipif(INSTALLED, reason="this is an installed package")


@from_a_tree
def test_editable_installation(tmp_path):
    code, _ = editable(tmp_path, with_library=True)
    assert python(code + "print(module.version())").strip() == logitless.version()


@from_a_tree
def test_every_folder_that_was_searched_is_named(tmp_path):
    code, site = editable(tmp_path, with_library=False)
    said = python(code + REASON)
    assert str(site) in said and str(Path(logitless.__file__).parent) in said


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_data_loader_workers_can_compute():
    code = """
import torch, logitless
weight = torch.randn(300, 32)
def loss(rows):
    return logitless.linear_cross_entropy(rows, weight, torch.arange(len(rows)))
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return loss(torch.full((40, 32), float(i)))
expected = torch.stack([Data()[i] for i in range(4)])  # starts the threads of this process first
loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2, timeout=120, multiprocessing_context="fork")
assert torch.equal(next(iter(loader)), expected)
"""
    python(code)
