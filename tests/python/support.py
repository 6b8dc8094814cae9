"""Helpers that several files of tests share."""

import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import logitless
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

lce = logitless.linear_cross_entropy

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", CUDA]
SHORT = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float64, *SHORT)


def python(code, **more):
    """Runs the code with this package in another Python process, and returns its output."""
    done = process("-c", code, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment(**more):
    """Returns the environment of another Python process with this package."""
    return dict(os.environ, PYTHONPATH=str(Path(logitless.__file__).parents[1])) | more


def process(*words, **more):
    """Runs another Python process with this package to its end, and returns it."""
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=300)


def stand_in_module(monkeypatch, name, **members):
    """Makes a module that the test imports, and the packages that it is in."""
    packages = name.split(".")
    for end in range(1, len(packages)):
        package = ".".join(packages[:end])
        monkeypatch.setitem(sys.modules, package, sys.modules.get(package, types.ModuleType(package)))
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def in_threads(work, *arguments):
    """Calls work with each of the arguments in its own thread, all at once."""
    workers = [threading.Thread(target=work, args=(argument,)) for argument in arguments]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def head(tokens=9, vocab=13, hidden=6, dtype=torch.float32, device="cpu", seed=0):
    """Returns leaves input, weight and bias, and a target whose first row is ignored."""
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(*shape, generator=g) for shape in ((tokens, hidden), (vocab, hidden), (vocab,))]
    target = torch.randint(0, vocab, (tokens,), generator=g)
    target[0] = -100
    return *(t.to(device, dtype).requires_grad_() for t in tensors), target.to(device)


def results(input, weight, target, **options):
    """Returns the loss, and the gradients of its sum."""
    leaves = [t for t in (input, weight) if t.requires_grad]
    loss = lce(input, weight, target, **options)
    return [loss.detach(), *(torch.autograd.grad(loss.sum(), leaves) if leaves else ())]


def peak_of(call):
    """Returns a call's peak of CUDA memory beyond what existed; the call's kernels are loaded before."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def assert_same(got, expected):
    for f, e in zip(got, expected, strict=True):
        assert torch.equal(f, e)


class Recorder(TorchDispatchMode):
    """Records the logitless operators called within the block, which makes calls use operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    @property
    def names(self):
        return [str(function) for function, _, _ in self.calls]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "logitless" in str(function):
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))
