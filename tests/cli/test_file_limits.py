"""A file size limit, and inputs truncated during reading, give an error and no partial output."""

import contextlib
import os
import pathlib
import resource
import subprocess
import time

import pytest


def limited(binary, folder, limit, *arguments, stdout=subprocess.PIPE):
    def limit_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [binary, *arguments], cwd=folder, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60,
        preexec_fn=limit_files,
    )  # fmt: skip


@pytest.mark.parametrize("option, file", [("--gradients", "g.safetensors"), ("--per-token", "t.safetensors"),
                                          ("--per-token", "t.npy")])  # fmt: skip
def test_a_file_beyond_the_limit(binary, tmp_path, zero_head, option, file):
    before = {path.name for path in tmp_path.iterdir()}
    arguments = zero_head(300, 50, 8)
    done = limited(binary, tmp_path, 1000, *arguments, option, file)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"logitless: error: {file}: cannot be written: File too large\n"
    assert {path.name for path in tmp_path.iterdir()} - before == {"c.npy", "h.npy", "y.npy"}


def test_a_result_beyond_the_limit(binary, tmp_path):
    with open(tmp_path / "out", "w") as out:
        done = limited(binary, tmp_path, 100, "info", "--json", stdout=out)
    assert done.returncode == 1 and "stdout: cannot be written" in done.stderr


def open_files(pid):
    found = []
    for path in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            found.append(path.resolve())
    return found


def test_an_input_that_is_cut_while_it_is_read(binary, tmp_path, zero_head):
    arguments = [
        *zero_head(4096, 65536, 512),
        "--threads",
        "1",
        "--quiet",
        "--per-token",
        "t.npy",
    ]  # takes some seconds
    process = subprocess.Popen([binary, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)  # fmt: skip
    end = time.monotonic() + 60
    while (tmp_path / "h.npy") not in open_files(process.pid):
        assert time.monotonic() < end
    os.truncate(tmp_path / "h.npy", (tmp_path / "h.npy").stat().st_size - 7)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == "", (process.returncode, err)
    assert err.startswith("logitless: error: h.npy: was cut while it was read: ")
    assert not list(tmp_path.glob("t.npy*"))
