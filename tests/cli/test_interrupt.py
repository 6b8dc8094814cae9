"""Ctrl-C leaves no partial output."""

import signal
import subprocess
import time

import pytest


def heed_interrupts():
    """Restores SIGINT: a test run in the background ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start(binary, tmp_path):
    """Returns start(*arguments) -> a running process in an empty folder, with stdout and stderr in one pipe."""
    processes = []

    def call(*arguments):
        process = subprocess.Popen(
            [binary, *map(str, arguments)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=heed_interrupts,
        )
        processes.append(process)
        return process

    yield call
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_writing_leaves_no_partial_file(start, zero_head, tmp_path, number):
    process = start(*zero_head(1, 65536, 512), "--gradients", "g.safetensors")  # 128 MiB of zeros
    end = time.monotonic() + 60
    while not list(tmp_path.glob("g.safetensors*")):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.0005)
    process.send_signal(number)
    process.communicate(timeout=60)
    # On a fast disk the file may be complete before the signal arrives.
    assert process.returncode in (-number, 0)
    assert not list(tmp_path.glob("*.partial-*"))
    assert (tmp_path / "g.safetensors").exists() == (process.returncode == 0)
