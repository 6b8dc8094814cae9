"""Batches of upstream gradients: torch.autograd.grad(is_grads_batched=True), and torch.vmap over autograd.grad.

The former has a vmap of its own, which calls an operator without mutated arguments once for each element of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def is_batched(tensor: Tensor | None) -> bool:
    """Whether a tensor stands for one element of a batch."""
    if type(tensor) is not torch.Tensor:  # None, or traced
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    keys = torch._C._dispatch_keys(tensor)
    return not any(keys.has(device) for device in _DEVICES)


def one_by_one(operator: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """A rule of torch.vmap: the operator for one element of the batch after the other."""

    def batched(info: Any, in_dims: tuple[int | None, ...], *args: Any, **keywords: Any) -> Any:
        def of(index: int) -> tuple[Tensor, ...]:
            return operator(*(a if d is None else a.select(d, index) for a, d in zip(args, in_dims)), **keywords)

        found = [of(index) for index in range(info.batch_size)]
        return tuple(torch.stack(outputs) for outputs in zip(*found)), (0,) * len(found[0])

    return batched
