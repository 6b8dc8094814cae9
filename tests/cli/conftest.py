"""Runs the built `logitless` binary, which the environment variable LOGITLESS_CLI names."""

import json
import os
import subprocess

import numpy as np
import pytest


@pytest.fixture(scope="session")
def binary():
    path = os.environ.get("LOGITLESS_CLI")
    if not path:
        pytest.skip("LOGITLESS_CLI does not name the logitless binary")
    return path


class Result:
    def __init__(self, process):
        self.code = process.returncode
        self.out = process.stdout
        self.err = process.stderr

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def run(binary, tmp_path):
    """Returns run(*arguments) -> Result, which works in an empty folder. A crash or a hang fails the test."""

    def call(*arguments, timeout=120):
        process = subprocess.run(
            [binary, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True, timeout=timeout
        )
        assert process.returncode in (0, 1, 2), f"exit code {process.returncode}\n{process.stderr}"
        return Result(process)

    return call


@pytest.fixture
def ok(run):
    """Returns run() for a command that must succeed."""

    def call(*arguments, **keywords):
        result = run(*arguments, **keywords)
        assert result.code == 0, result.err
        return result

    return call


@pytest.fixture
def refused(run):
    """Returns run() for a command that must fail with a code and a message on stderr, and an empty stdout."""

    def call(code, message, *arguments):
        result = run(*arguments)
        assert result.code == code, (result.code, result.err)
        assert message in result.err, result.err
        assert result.out == ""
        return result

    return call


@pytest.fixture
def with_environment(binary):
    """Returns with_environment(arguments, VARIABLE=value) -> the process, which must succeed."""

    def call(arguments, **variables):
        return subprocess.run(
            [binary, *arguments], env=os.environ | variables, capture_output=True, text=True, timeout=60, check=True
        )

    return call


@pytest.fixture
def zero_head(tmp_path):
    """Returns zero_head(tokens, vocab, dim) -> arguments of `loss` for sparse files of zeros."""

    def call(tokens, vocab, dim):
        np.lib.format.open_memmap(tmp_path / "c.npy", mode="w+", dtype=np.float32, shape=(vocab, dim))
        np.save(tmp_path / "h.npy", np.zeros((tokens, dim), np.float32))
        np.save(tmp_path / "y.npy", np.zeros(tokens, np.int64))
        return ["loss", "--hidden", "h.npy", "--weight", "c.npy", "--targets", "y.npy"]

    return call


@pytest.fixture
def cuda_device(ok):
    """Returns the first usable CUDA device, as --device takes it."""
    facts = ok("--json", "info").json
    for device in facts["cuda_devices"]:
        if device["usable"]:
            return device["device"]
    whys = [device["why_unavailable"] for device in facts["cuda_devices"]] or [facts["why_no_cuda_devices"]]
    pytest.skip(f"no usable CUDA device: {whys[0]}")


@pytest.fixture
def random():
    return np.random.default_rng(7)
