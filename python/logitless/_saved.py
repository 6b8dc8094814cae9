"""The results of a forward pass that its backward pass reads, for every interface: fields of logitless_buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

LSE = ("lse", "lse_low")  # of all of them: a forward pass writes both or none
SAVED = (*LSE, "entropy", "draws")

T = TypeVar("T")


def read_by_backward(saved: Mapping[str, T | None]) -> dict[str, T]:
    """Those of SAVED, the upstream gradients and more that there are, as far as a backward pass reads them."""
    read = {name: value for name, value in saved.items() if value is not None}
    for name in LSE:
        if name not in read:
            raise RuntimeError(f"{name}: expected what the forward pass has saved, got None")
    if "grad_entropy" not in read:
        read.pop("entropy", None)
    return read
