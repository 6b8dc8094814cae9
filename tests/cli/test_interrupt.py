"""Ctrl-C: nothing half-written stays behind, and training ends soon and writes what it has."""

import os
import signal
import subprocess
import time

import numpy as np
import pytest


def heed_interrupts():
    """A test run in the background ignores Ctrl-C, and what it starts would as well."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start(binary, tmp_path):
    """start(*arguments) -> a running process in an empty folder; stdout and stderr in one pipe."""
    processes = []

    def call(*arguments, threads=None, preexec=heed_interrupts):
        process = subprocess.Popen(
            [binary, *map(str, arguments)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=preexec,
            env=os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        )
        processes.append(process)
        return process

    yield call
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.0005)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_writing_leaves_no_partial_file(start, tmp_path, number):
    vocab, dim = 65536, 512  # 128 MiB of zeros, of which the file system stores none
    np.lib.format.open_memmap(tmp_path / "c.npy", mode="w+", dtype=np.float32, shape=(vocab, dim))
    np.save(tmp_path / "h.npy", np.zeros((1, dim), np.float32))
    np.save(tmp_path / "y.npy", np.zeros(1, np.int64))
    process = start(
        "loss", "--hidden", "h.npy", "--classifier", "c.npy", "--targets", "y.npy", "--gradients", "g.safetensors"
    )
    wait_for(lambda: list(tmp_path.glob("g.safetensors*")))
    process.send_signal(number)
    process.communicate(timeout=60)
    # On a fast disk the file may have been whole before the signal came.
    assert process.returncode in (-number, 0)
    assert not list(tmp_path.glob("*.partial-*"))
    assert (tmp_path / "g.safetensors").exists() == (process.returncode == 0)


@pytest.fixture
def train(start, run, tmp_path):
    """train(*arguments) -> a process that has begun to train a small model, and what it has printed."""
    if run("train", "--help").code != 0:
        pytest.skip("this build has no train command")
    (tmp_path / "text.txt").write_text("".join(f"{k} is a number, {k * k} its square.\n" for k in range(4000)))

    def call(*arguments, **keywords):
        process = start(
            "train", "text.txt", "--device", "cpu", "--minutes", 5, "--vocab", 400, "-o", "out", *arguments, **keywords
        )
        lines = []
        for line in process.stdout:  # until the first row of the table: training has begun
            lines.append(line)
            if line.split()[:2] == ["0", "-"]:
                break
        return process, "".join(lines)

    return call


SMALL = ["--dim", 16, "--inner", 16, "--batch", 2]


def test_training_interrupted_writes_what_it_has(train, tmp_path):
    process, before = train(*SMALL, "--compare-steps", 1)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130, before + rest
    assert "stopping" in rest and "interrupted" in rest
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"model.safetensors", "figures.json", "loss.svg"}
    assert not list(tmp_path.rglob("*.partial-*"))


def test_an_interrupt_at_any_moment_of_training_corrupts_nothing(train):
    """A handler's frame would overwrite the buffers into which oneDNN's sgemm points the stack register: it did so in a
    third of such tries."""
    tries = 30
    for k in range(tries):
        process, before = train("--dim", 64, "--inner", 512, "--layers", 1, "--batch", 2, "--compare-steps", 0,
                                "--validation-batches", 1, threads=1)  # fmt: skip
        time.sleep(0.2 * k / tries)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 130, f"try {k}: {process.returncode}\n{before}{rest}"


def test_a_second_interrupt_quits_at_once(train, tmp_path):
    """Before the step at hand has ended, after which the exit code would be 130."""
    process, _ = train("--batch", 16, "--sequence-length", 1024, "--compare-steps", 0, "--validation-batches", 1)
    process.send_signal(signal.SIGINT)
    for line in process.stdout:
        if "stopping" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_signal_that_is_ignored_from_the_start_stays_so(train):
    process, _ = train(*SMALL, "--compare-steps", 0, preexec=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, rest
