"""How the native library was built, as far as that is told without asking CUDA."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from . import native
from .errors import LibraryNotFoundError

_DEVICES = Path("/dev")  # with a file nvidia0 for the first GPU


def why_no_cuda() -> str:
    """Why the library has no CUDA kernels, and what to do; empty where it has, or nothing is known."""
    try:
        return native.library_path().with_name("no_cuda.txt").read_text(encoding="utf-8").strip()
    except (OSError, LibraryNotFoundError):  # the latter is said where the library is used
        return ""


def _has_gpu() -> bool:
    """Whether there is one that CUDA would show; without a call of CUDA, which no process may fork after."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not is_hidden and any(_DEVICES.glob("nvidia[0-9]*"))


def warn_without_cuda() -> None:
    why = why_no_cuda() if _has_gpu() else ""
    if why:
        warnings.warn(f"logitless: this machine has an NVIDIA GPU, but {why}", RuntimeWarning, stacklevel=3)
