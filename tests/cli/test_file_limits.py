"""A limit on the size of files, and inputs that are cut while they are read: an error, and nothing half-written."""

import os
import resource
import signal
import subprocess
import time

import numpy as np
import pytest

TOKENS, VOCAB, DIM = 512, 65536, 512  # some seconds of work


@pytest.fixture
def head(tmp_path):
    """Files of a head, sparse; the arguments that name them."""

    def call(tokens, vocab, dim):
        np.lib.format.open_memmap(tmp_path / "c.npy", mode="w+", dtype=np.float32, shape=(vocab, dim))
        np.save(tmp_path / "h.npy", np.zeros((tokens, dim), np.float32))
        np.save(tmp_path / "y.npy", np.zeros(tokens, np.int64))
        return ["loss", "--hidden", "h.npy", "--classifier", "c.npy", "--targets", "y.npy"]

    return call


def limited(binary, folder, limit, *arguments, stdout=subprocess.PIPE):
    def limit_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [binary, *arguments], cwd=folder, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60,
        preexec_fn=limit_files,
    )  # fmt: skip


@pytest.mark.parametrize("option, file", [("--gradients", "g.safetensors"), ("--per-token", "t.safetensors"),
                                          ("--per-token", "t.npy")])  # fmt: skip
def test_a_file_beyond_the_limit(binary, tmp_path, head, option, file):
    before = {path.name for path in tmp_path.iterdir()}
    arguments = head(300, 50, 8)
    done = limited(binary, tmp_path, 1000, *arguments, option, file)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"logitless: error: {file}: cannot be written: File too large\n"
    assert {path.name for path in tmp_path.iterdir()} - before == {"c.npy", "h.npy", "y.npy"}


def test_a_result_beyond_the_limit(binary, tmp_path):
    with open(tmp_path / "out", "w") as out:
        done = limited(binary, tmp_path, 100, "info", "--json", stdout=out)
    assert done.returncode == 1 and "stdout: cannot be written" in done.stderr


def reading(binary, folder, arguments):
    """A run that has begun to read its inputs."""
    process = subprocess.Popen(
        [binary, *arguments, "--quiet", "--gradients", "g.safetensors"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while "c.npy" not in open(f"/proc/{process.pid}/maps").read():
        assert time.monotonic() < end
    return process


def test_the_signal_of_such_a_cut_sent_by_another_process_ends_it(binary, tmp_path, head):
    process = reading(binary, tmp_path, head(TOKENS, VOCAB, DIM))
    process.send_signal(signal.SIGBUS)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGBUS


@pytest.mark.parametrize("file, cut", [("c.npy", 4096 * 100), ("c.npy", 4 * VOCAB * DIM), ("c.npy", 4), ("h.npy", 7)])
def test_an_input_that_is_cut_while_it_is_read(binary, tmp_path, head, file, cut):
    arguments = head(TOKENS, VOCAB, DIM)
    process = reading(binary, tmp_path, arguments)
    os.truncate(tmp_path / file, (tmp_path / file).stat().st_size - cut)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == "", (process.returncode, err)
    assert f"logitless: error: {file}: " in err and "cut" in err
    assert not list(tmp_path.glob("g.safetensors*"))
