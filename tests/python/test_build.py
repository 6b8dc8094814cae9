"""A build without CUDA: the import warns on a machine with a GPU, and errors say what to install."""

import re
import shutil
import subprocess
import warnings
from pathlib import Path

import logitless
import pytest
from logitless import inspection, native
from support import process

WHY = "this build has no CUDA kernels, as no nvcc was found: install the CUDA toolkit"
TODO = r"install the CUDA toolkit, 12\.0 or newer, .*pip install \. -C cmake\.define\.LOGITLESS_CUDA=ON"


@pytest.fixture
def library(monkeypatch, tmp_path):
    """Returns a library in its own folder, and a folder of devices."""
    (tmp_path / "dev").mkdir()
    made = tmp_path / "liblogitless.so"
    made.symlink_to(native.library_path())
    monkeypatch.setenv("LOGITLESS_LIBRARY", str(made))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(inspection, "_DEVICES", tmp_path / "dev")
    return tmp_path


def said():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inspection.warn_without_cuda()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("device", ["", "nvidia0", "nvidia3", "nvidiactl", "nvidia-caps"])
@pytest.mark.parametrize("without", [False, True])
@pytest.mark.parametrize("visible", [None, "0", "", "-1"])
def test_a_warning_where_kernels_lack_and_a_gpu_is_seen(library, monkeypatch, device, without, visible):
    if device:
        (library / "dev" / device).touch()
    if without:
        (library / "no_cuda.txt").write_text(WHY + "\n")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    expected = without and device in ("nvidia0", "nvidia3") and visible not in ("", "-1")
    assert said() == [f"logitless: this machine has an NVIDIA GPU, but {WHY}"] * expected


def test_no_library_is_no_reason(library, monkeypatch):
    (library / "dev/nvidia0").touch()
    monkeypatch.setenv("LOGITLESS_LIBRARY", str(library / "none.so"))
    assert said() == []


def test_import_warns_once(library):
    (library / "no_cuda.txt").write_text(WHY)
    code = (
        "import pathlib\n"
        "pathlib.Path.glob = lambda self, pattern: [str(self) == '/dev' and pattern == 'nvidia[0-9]*']\n"
        "import logitless, logitless.numpy, logitless.functional, logitless\n"
        "import importlib; importlib.import_module('logitless')\n"
    )
    done = process("-W", "always", "-c", code)
    assert done.returncode == 0 and done.stderr.count(WHY) == 1, done.stderr
    assert "<string>:3: RuntimeWarning" in done.stderr


def test_the_build_says_what_its_file_says():
    """The file lies beside the library in its build folder, and in the package."""
    cuda = logitless.backends()[0]
    assert cuda.name == "cuda"
    why = inspection.why_no_cuda()
    if not why:
        assert "no CUDA kernels" not in cuda.why_unavailable
        return
    assert cuda.why_unavailable == why
    assert re.fullmatch(
        rf"this build has no CUDA kernels, as (no nvcc was found|LOGITLESS_CUDA was OFF): {TODO}\)", why
    )


@pytest.mark.skipif(logitless.backends()[0].why_unavailable == "", reason="there is a usable CUDA device")
def test_what_wants_a_gpu_is_told_of_cuda_alone():
    with pytest.raises(logitless.UnsupportedError) as error:
        logitless.plan(8, 8, 8, device=0)
    message = str(error.value)
    assert logitless.backends()[0].why_unavailable in message
    assert "cpu:" not in message and "reference:" not in message and "host memory" not in message


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
@pytest.mark.parametrize("asked, why", [("AUTO", "no nvcc was found"), ("OFF", "LOGITLESS_CUDA was OFF")])
def test_configuring_says_why(tmp_path, asked, why):
    """It runs cmake/cuda.cmake alone, with no nvcc on PATH but with all that CMake itself needs."""
    module = Path(__file__).resolve().parents[2] / "cmake/cuda.cmake"
    project = f"cmake_minimum_required(VERSION 3.25)\nproject(p NONE)\nset(LOGITLESS_CUDA {asked})\n"
    project += "set(CMAKE_CUDA_COMPILER NOTFOUND)\nset(SKBUILD 2)\nset(CMAKE_INSTALL_LIBDIR .)\n"  # as pip builds
    project += f'include("{module}")\n'
    (tmp_path / "CMakeLists.txt").write_text(project)
    run = ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "-- CUDA backend: OFF" in done.stdout
    written = (tmp_path / "build/src/no_cuda.txt").read_text()
    assert f"as {why}: " in written and re.search(TODO, written)
    package = tmp_path / "package"
    install = ["cmake", "--install", run[-1], "--component", "library", "--prefix", str(package)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    assert (package / "no_cuda.txt").read_text() == written
