"""``logitless.warm_up``."""

from __future__ import annotations

import contextlib

import torch

from .errors import UnsupportedError
from .functional import linear_cross_entropy


def warm_up(device: torch.device | str | int | None = None) -> None:
    """Makes what the library and CUDA make at first use, so that the first run may be captured in a CUDA graph.

    A run makes nothing but its own work, except the first on a device: it opens cuBLASLt and creates its handle, which
    allocates memory of the device, and CUDA loads kernels when they are first called. This runs small problems of each
    dtype and kind of gradient, and waits for the device. A product of a shape that is new to cuBLASLt is looked up in
    its tables at its first run, which a capture allows.

    Args:
        device: a CUDA device, or the CPU, where there is little to make; None: PyTorch's current CUDA device, or the
            CPU where there is none.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected the CPU or a CUDA device, got {place}")
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(place.type, enabled=False):
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            with contextlib.suppress(UnsupportedError):  # of an implementation asked for by name
                _run(place, dtype)
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _run(device: torch.device, dtype: torch.dtype) -> None:
    input, weight = (torch.zeros(n, 64, dtype=dtype, device=device, requires_grad=True) for n in (256, 1024))
    target = torch.zeros(256, dtype=torch.int64, device=device)
    thins = dtype != torch.float64 or device.type == "cpu"
    for gradient, seed in (("exact", None), ("always-thinned", 0))[: 1 + thins]:
        for reduction in ("mean", "none"):
            loss = linear_cross_entropy(input, weight, target, reduction=reduction, gradient=gradient, seed=seed)
            torch.autograd.grad(loss.sum(), (input, weight))
