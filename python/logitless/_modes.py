"""Whether PyTorch only computes, so that a run needs no operator: nothing traces, counts, replaces or transforms it.

Else torch.ops.logitless.* are called, which PyTorch's tools see.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# What tensors in memory of a device have; others are sparse, nested, batched, functional, negated views, ...
_PLAIN_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA", "ADInplaceOrView")


def _bits(names: Iterable[str]) -> int:
    bits = 0
    for name in names:
        key = torch._C._parse_dispatch_key(name)
        bits |= 0 if key is None else torch._C.DispatchKeySet(key).raw_repr()
    return bits


_dispatch_keys: Any = torch._C._dispatch_keys
_OTHER_BITS = ~_bits(_PLAIN_KEYS)


def _are_default_devices() -> bool:
    """Whether all modes of functions are of torch.set_default_device, which changes nothing that names its device."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return all(type(mode) is DeviceContext for mode in modes)


def are_off() -> bool:
    """No compiler, mode, transform, trace or level of forward-mode differentiation is on in this thread."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or (torch._C._len_torch_function_stack() and not _are_default_devices())
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or getattr(forward_ad, "_current_level", 0) >= 0
    )


def are_plain(tensors: Iterable[object]) -> bool:
    """Tensors of no subclass, whose memory holds their values; None is left out."""
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN_TYPES or _dispatch_keys(tensor).raw_repr() & _OTHER_BITS):
            return False
    return True


def has_dtensor(values: Iterable[object]) -> bool:
    """Whether one of them is a torch.distributed.tensor.DTensor, which is not imported for this."""
    return any(isinstance(value, Tensor) and hasattr(type(value), "placements") for value in values)
