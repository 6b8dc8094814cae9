"""Runs tests that say "cuda" on the CPU."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Substitutes the CPU for any CUDA device in calls that make or move a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value):
        return "cpu"
    return value


class Event:
    """Implements ``torch.cuda.Event`` by the CPU's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.seconds - self.seconds)


@contextlib.contextmanager
def cuda_on_cpu(compile: bool) -> Iterator[None]:
    """Runs CUDA code on the CPU.

    ``compile`` says whether ``torch.compile`` compiles; otherwise it runs functions unchanged. PyTorch claims to have
    CUDA only if nothing compiles, because the compiler would look for a device.
    """
    replaced = {
        "is_available": lambda: not compile,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": lambda seed: None,
        "get_device_capability": lambda device=None: (9, 0),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "Event": Event,
    }
    autocast = torch.autocast
    stance = contextlib.nullcontext() if compile else torch.compiler.set_stance("force_eager")
    with (
        mock.patch.multiple(torch.cuda, **replaced),
        mock.patch.object(torch, "autocast", lambda device_type, **options: autocast(_on_cpu(device_type), **options)),
        stance,
        OnCpu(),
    ):
        yield
