"""Arguments of ``logitless.linear_cross_entropy``, refused by name, with what was expected and what was got."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ._dtypes import FLOATS, FLOATS_TEXT, INTEGERS, INTEGERS_TEXT
from ._options import check_sizes, check_targets_shape, dense_message, shape_text
from .errors import UnsupportedError

_FLOATS = tuple(getattr(torch, name) for name in FLOATS)
_INTEGERS = tuple(getattr(torch, name) for name in INTEGERS)


def check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
    if tensor.device.type == "meta":
        raise ValueError(
            f"{name}: expected a tensor on the CPU or a CUDA device, got device meta: it holds no values, as of a "
            "model made on meta or whose weights are offloaded (accelerate loads those of a module around its own "
            "forward only); load it first"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: expected a tensor on the CPU or a CUDA device, got device {tensor.device}")
    if not torch.compiler.is_compiling():
        check_plain(name, tensor)


def check_plain(name: str, tensor: Tensor) -> None:
    if hasattr(tensor, "full_tensor") and hasattr(tensor, "placements"):
        raise TypeError(f"{name}: expected a plain torch.Tensor, got a DTensor {_how_to_gather(name, tensor)}")
    if hasattr(type(tensor), "__tensor_flatten__"):  # quantised weights and other wrappers
        raise TypeError(
            f"{name}: expected a plain torch.Tensor, got {type(tensor).__name__} (unwrap or dequantise it first)"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise NotImplementedError(
            f"{name}: logitless.linear_cross_entropy does not support the transforms of torch.func (vmap, grad, jvp); "
            'use leading batch dimensions, reduction="none" and torch.autograd instead'
        )
    if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        raise NotImplementedError(
            f"{name}: logitless.linear_cross_entropy does not support forward-mode differentiation"
        )


def _how_to_gather(name: str, tensor: Tensor) -> str:
    """Of a DTensor: its placements, and what to pass instead."""
    placements = tuple(tensor.placements)  # type: ignore[attr-defined]
    if all(placement.is_replicate() for placement in placements):
        call, part = "to_local", "which is all of it"
    else:
        call, part = "full_tensor", "as to_local() is a part of it"
    text = f"of placements {placements}: pass {name}.{call}(), {part}"
    if name not in ("linear_weight", "linear_bias", "scale", "temperature", "student_weight", "student_bias"):
        return text
    text += (
        f"; where ranks hold tokens of their own, as under FSDP, {call}(grad_placements=[Partial()]), or its gradient "
        "is that of this rank's tokens"
    )
    if call == "full_tensor":
        text += ". A head sharded over the vocabulary is for logitless.linear_cross_entropy"
    return text


def check_devices(device: torch.device, tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, as input is, got device {tensor.device}")


def check_float(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{name}: expected {FLOATS_TEXT}, got {tensor.dtype}")


def check_integers(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _INTEGERS:
        raise TypeError(f"{name}: expected {INTEGERS_TEXT}, got {tensor.dtype}")


def check_real(name: str, tensor: Tensor) -> None:
    if tensor.dtype.is_complex:
        raise TypeError(f"{name}: expected real numbers, got {tensor.dtype}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int], meaning: str) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {shape_text(shape)} ({meaning}), got {shape_text(tensor.shape)}")


def check_constant(name: str, tensor: Tensor, hint: str) -> None:
    if tensor.requires_grad:
        raise ValueError(f"{name}: expected a tensor that does not require grad, got one that does ({hint})")


def check_head(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, several: bool = False
) -> None:
    """several: targets a row."""
    check_operands(input, linear_weight, linear_bias, target)
    check_targets_shape("target", target.shape, input.shape[:-1], several)


def check_operands(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, *, least_vocab: int = 1
) -> None:
    """All of it but the shape of target."""
    tensors = {"input": input, "linear_weight": linear_weight}
    if linear_bias is not None:
        tensors["linear_bias"] = linear_bias
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        check_float(name, tensor)
    check_tensor("target", target)
    if target.dtype not in _INTEGERS:
        if target.dtype.is_floating_point and target.dim() == input.dim():
            raise TypeError(dense_message(target.dtype))
        check_integers("target", target)
    if linear_weight.dim() != 2:
        raise ValueError(f"linear_weight: expected shape [V, D], got {shape_text(linear_weight.shape)}")
    check_sizes(linear_weight.shape, least_vocab)
    if input.dim() < 1 or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            f"input: expected shape [..., D] with D = {linear_weight.shape[1]} of linear_weight, "
            f"got {shape_text(input.shape)}"
        )
    if linear_bias is not None:
        check_shape("linear_bias", linear_bias, linear_weight.shape[:1], "V")


def check_main_grad(main_grad: Tensor, linear_weight: Tensor, stats: torch.dtype) -> None:
    check_tensor("main_grad", main_grad)
    if main_grad.dtype != stats:
        raise TypeError(f"main_grad: expected {stats}, got {main_grad.dtype}")
    check_shape("main_grad", main_grad, linear_weight.shape, "that of linear_weight")
    check_constant("main_grad", main_grad, "it is a buffer that gradients are added to")
    if not torch.compiler.is_compiling() and main_grad.is_neg():
        raise ValueError("main_grad: expected a buffer that holds its values, got a view that negates them")
    rows, columns = main_grad.shape
    if (columns > 1 and main_grad.stride(1) != 1) or (rows > 1 and main_grad.stride(0) < columns):
        raise ValueError(f"main_grad: expected contiguous rows, got strides {shape_text(main_grad.stride())}")


def check_linear(linear: nn.Module) -> None:
    """The layer whose weight a loss takes: an adapter's around it would have no part in the loss, and no gradient."""
    if type(linear).forward is not nn.Linear.forward:
        kind = f"{type(linear).__module__}.{type(linear).__name__}"
        raise UnsupportedError(
            f"linear: expected a torch.nn.Linear, got a {kind}, of which the loss has the weight alone"
        )
