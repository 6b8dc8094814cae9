"""The wheel LOGITLESS_WHEEL as its users get it: from an index, in a new environment, alone and beside PyTorch."""

import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
WHEEL = pathlib.Path(os.environ["LOGITLESS_WHEEL"]).resolve()
LARGEST = 25_000_000
# A GPU runs the code of its own compute capability, or that of a lower one with the same major number. Hopper's engine
# is for 90a alone. Newer GPUs compile the PTX.
KERNELS = {"80", "90", "90a", "100", "120"}
PTX = {"90", "120"}
LOSS = """
import numpy, logitless.numpy
loss = logitless.numpy.linear_cross_entropy(numpy.zeros((4, 8), "f4"), numpy.zeros((5, 8), "f4"), numpy.arange(4))
assert abs(float(loss.loss) - numpy.log(5)) < 1e-6, loss
"""
BESIDE_TORCH = """
import {first}, {second}
import torch
hidden, weight = torch.randn(600, 64, requires_grad=True), torch.randn(5000, 64, requires_grad=True)
target = torch.arange(600)
loss = logitless.linear_cross_entropy(hidden, weight, target)
loss.backward()
expected = torch.nn.functional.cross_entropy(hidden @ weight.T, target)
torch.testing.assert_close(loss, expected)
maps = open("/proc/self/maps").read().split()
print("\\n".join(sorted({{path for path in maps if "libgomp" in path}})))
"""


def run(*command, **options):
    """Returns the output of a command that must succeed, without this process's settings of pip and of the library."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("PIP_", "PYTHON", "LOGITLESS_"))}
    environment["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Returns the folder of the programs of an environment that has installed logitless by name, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    project = folder / "index" / "logitless"
    project.mkdir(parents=True)
    shutil.copy(WHEEL, project)
    (project / "index.html").write_text(f'<a href="{WHEEL.name}">{WHEEL.name}</a>')
    run(sys.executable, "-m", "venv", folder / "environment")
    programs = folder / "environment" / "bin"
    run(programs / "pip", "install", "--index-url", project.parent.as_uri(), "logitless")
    return programs


@pytest.fixture(scope="module")
def beside(installed):
    """Returns a function that runs lines in that environment, with the packages of this process's behind its own."""

    def run_beside(package, lines):
        found = importlib.util.find_spec(package)
        if found is None:
            pytest.skip(f"{package} is not installed")
        others = pathlib.Path(found.origin).parents[1]
        lines = f"import sys\nsys.path.append({str(others)!r})\n{lines}"
        return run(installed / "python", "-c", lines)

    return run_beside


def version():
    header = (ROOT / "include/logitless/logitless.h").read_text()
    return ".".join(re.findall(r"^#define LOGITLESS_VERSION_\w+ (\d+)", header, re.M))


def test_file_name_has_version_any_python_and_glibc_2_28():
    assert WHEEL.name == f"logitless-{version()}-py3-none-manylinux_2_28_{platform.machine()}.whl"


def test_size():
    assert WHEEL.stat().st_size <= LARGEST


def test_kernels(tmp_path):
    with zipfile.ZipFile(WHEEL) as archive:
        if "logitless/no_cuda.txt" in archive.namelist():
            pytest.skip("the wheel has no CUDA backend")
        library = archive.extract("logitless/liblogitless.so", tmp_path)
    nvidia = pytest.importorskip("nvidia", reason="nvidia-cuda-cuobjdump is not installed")
    cuobjdump = pathlib.Path(nvidia.__path__[0], "cu13", "bin", "cuobjdump")
    kernels, ptx = (run(cuobjdump, f"--list-{kind}", library) for kind in ("elf", "ptx"))
    assert set(re.findall(r"sm_(\w+)\.cubin", kernels)) == KERNELS
    assert set(re.findall(r"sm_(\w+)\.ptx", ptx)) == PTX


def test_versions_agree(installed):
    assert run(installed / "logitless", "--version") == f"logitless {version()}\n"
    lines = (
        "from importlib.metadata import version; import logitless; print(logitless.__version__, version('logitless'))"
    )
    assert run(installed / "python", "-c", lines).split() == [version()] * 2


def test_command_line(installed):
    assert "usable yes" in run(installed / "logitless", "info")
    plan = ["plan", "--model", "gemma-2-2b", "--tokens", "8192", "--budget", "256MiB"]
    assert "chosen plan" in run(installed / "python", "-m", "logitless", *plan)
    run(installed / "logitless", "model", "--help")


def test_beside_numpy(beside):
    beside("numpy", LOSS)


@pytest.mark.parametrize("first, second", [("torch", "logitless"), ("logitless", "torch")])
def test_one_openmp_runtime_beside_torch_whichever_is_imported_first(beside, first, second):
    runtimes = beside("torch", BESIDE_TORCH.format(first=first, second=second)).split()
    assert len(runtimes) == 1, runtimes
