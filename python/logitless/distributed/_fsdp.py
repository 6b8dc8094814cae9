"""Weights sharded by FSDP2 (``fully_shard``, ``replicate``) that are read outside their module's call.

Such a parameter is a DTensor with the placements of a vocabulary-parallel one, but means something else: ranks hold
tokens of their own, so its gradient is the mean over ranks. PyTorch does not mark it. Only the state of its module
knows it, and nothing is assumed about a DTensor that no state knows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..errors import UnsupportedError

_REMEDY = (
    "call unshard() of its FSDP module before reading it, or make the head a logitless.nn.FusedHead, whose own call "
    "computes the loss"
)


class Owner(NamedTuple):
    """FSDP's own records of a parameter: instances of private classes of PyTorch, as in 2.13."""

    group: Any
    parameter: Any


def owner_of(tensor: Tensor) -> Owner | None:
    """Returns the records of the FSDP unit that has this very tensor as a sharded parameter, or None."""
    for state in _states():
        for group in _groups(state):
            for parameter in group.fsdp_params:
                if getattr(parameter, "sharded_param", None) is tensor:
                    return Owner(group, parameter)
    return None


def _states() -> list[Any]:
    from torch.distributed import _composable_state

    references = list(getattr(_composable_state, "_module_state_mapping", {}).values())
    return [state for state in (reference() for reference in references) if state is not None]


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before PyTorch 2.12
        one = getattr(state, "_fsdp_param_group", None)
        groups = [] if one is None else [one]
    return list(groups)


def gathered(name: str, tensor: DTensor, owner: Owner) -> Tensor:
    """Returns the whole of a sharded parameter as a plain tensor in FSDP's ``param_dtype``, by one all-gather.

    Its gradient is reduced over ranks as in FSDP, in FSDP's dtype and with its divisor, and added to the sharded
    parameter's: one reduce-scatter in every backward pass.

    Raises:
        UnsupportedError: FSDP treats this parameter in a way that is not supported here.
    """
    group, parameter = owner
    if parameter.is_dtensor:
        raise _refusal(name, "that is also sharded over a tensor-parallel mesh")
    if getattr(parameter, "offload_to_cpu", False):
        raise _refusal(name, "that is offloaded to the CPU")
    if hasattr(tensor._local_tensor, "fsdp_pre_all_gather"):
        raise _refusal(name, f"of {type(tensor._local_tensor).__name__} with an all-gather of its own")
    if getattr(group, "_all_reduce_hook", None) is not None:
        raise _refusal(name, "whose gradients an all-reduce hook changes")
    policy = parameter.mp_policy
    divisor = getattr(group, "gradient_divide_factor", None) or tensor.device_mesh.size()
    apply: Any = _Gathered.apply
    full: Tensor = apply(tensor, policy.param_dtype or tensor.dtype, policy.reduce_dtype, float(divisor))
    return full


def _refusal(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(f"{name}: an FSDP parameter {what} cannot be read outside its module's call: {_REMEDY}")


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, dtype: torch.dtype, reduce_dtype: torch.dtype | None, divisor: float) -> Any:
        ctx.spec, ctx.dtype = tensor._spec, tensor.dtype
        ctx.reduce_dtype, ctx.divisor = reduce_dtype or dtype, divisor
        mesh = tensor.device_mesh
        part = _from_local(tensor._local_tensor.to(dtype), tensor)
        full = part.redistribute(mesh, [Replicate()] * mesh.ndim).to_local()
        return full.view_as(full) if full is tensor._local_tensor else full

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mesh, placements = ctx.spec.mesh, ctx.spec.placements
        partial = gradient.to(ctx.reduce_dtype) / ctx.divisor  # before the sum, which may overflow in 16 bits
        parts = DTensor.from_local(partial, mesh, [Partial()] * mesh.ndim, run_check=False)
        reduced = parts.redistribute(mesh, placements)
        return reduced.to(ctx.dtype), None, None, None


def _from_local(local: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
