"""scripts/quickstart in a folder where stand-ins of its commands record their arguments."""

import os
import pathlib
import shutil
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "quickstart"
HAS_DEVICE = any(pathlib.Path("/dev").glob("nvidia[0-9]*"))
NONE = "No devices were found"
ONE = "GPU 0: NVIDIA H200 (UUID: GPU-0)"
FAILED = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


def stand_in(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def configured(folder, nvidia_smi, code):
    (folder / "scripts").mkdir()
    shutil.copy(SCRIPT, folder / "scripts")
    stand_in(folder / "scripts" / "setup", "exit 0")
    stand_in(folder / "bin" / "cmake", f'echo "$@" >> {folder}/asked')
    stand_in(folder / ".venv" / "bin" / "python", f'echo "$LOGITLESS_LIBRARY $@" >> {folder}/asked')
    if nvidia_smi is not None:
        stand_in(folder / "bin" / "nvidia-smi", f'echo "{nvidia_smi}"\nexit {code}')
    environment = os.environ | {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
    subprocess.run([folder / "scripts" / "quickstart"], env=environment, check=True, capture_output=True)
    asked = (folder / "asked").read_text()
    assert f"{folder}/build/quickstart/src/liblogitless.so examples/train_language_model.py" in asked
    return asked


@pytest.mark.skipif(HAS_DEVICE or shutil.which("nvidia-smi", path="/usr/bin:/bin"), reason="a driver is here")
@pytest.mark.parametrize("nvidia_smi, code", [(None, 0), (NONE, 6), (FAILED, 9)])
def test_without_a_driver_no_kernels_are_built(tmp_path, nvidia_smi, code):
    assert "-DLOGITLESS_CUDA=OFF" in configured(tmp_path, nvidia_smi, code)


def test_with_a_gpu_they_are(tmp_path):
    assert "-DLOGITLESS_CUDA=AUTO" in configured(tmp_path, ONE, 0)
