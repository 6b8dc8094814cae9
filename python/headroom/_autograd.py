"""The gradients' formulas, of the operators (_ops.py) and of the autograd functions without them (_eager.py) alike.

Both save the same tensors: a forward pass that is computed again, by torch.utils.checkpoint, may go the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _modes, _vmap
from ._flags import Flags, Wants
from ._run import run_backward, scale_in_place
from ._torch import GRADIENTS, Inputs

Gradients = tuple[Tensor | None, ...]  # of hidden, weight, bias and scale
NONE: Gradients = (None,) * len(GRADIENTS)


def _refuse_double_backward() -> None:
    # Grad mode is on in a backward pass exactly with create_graph=True.
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "headroom.linear_cross_entropy: double backward is not supported (its gradients are not differentiable); "
            "call backward or autograd.grad without create_graph=True"
        )


def _save_scale(ctx: Any, scale: Tensor | None) -> None:
    ctx.scale_place = None if scale is None else (scale.device, scale.dtype)


def _as_scale(ctx: Any, d_scale: Tensor | None) -> Tensor | None:
    return None if d_scale is None else d_scale.to(*ctx.scale_place)


# ---- after a forward pass


def save_forward(
    ctx: Any, inputs: Inputs, main_grad: Tensor | None, options: dict[str, Any], saved: Sequence[Tensor | None]
) -> None:
    """saved: lse, lse_low, entropy and draws; options: as the operators take them."""
    ctx.options = options
    # Not among the saved tensors: other backward passes may add to it before this one does.
    ctx.main_grad = main_grad
    _save_scale(ctx, inputs.scale)
    ctx.save_for_backward(*inputs, *saved)
    ctx.set_materialize_grads(False)


def _by_operator(inputs: Inputs, saved: dict[str, Any], main_grad: Any, options: dict[str, Any], flags: Flags) -> Any:
    operators = torch.ops.headroom
    operator, into = (operators.backward, ()) if main_grad is None else (operators.backward_into, (main_grad,))
    return operator(*inputs, *saved.values(), *into, **options, flags=flags.packed())


def backward_of_forward(
    ctx: Any, wants: Wants, loss: Tensor | None, nll: Tensor | None, lse: Tensor | None, entropy: Tensor | None
) -> Gradients:
    _refuse_double_backward()
    *tensors, saved_lse, lse_low, saved_entropy, draws = ctx.saved_tensors
    inputs = Inputs(*tensors)
    upstream = (loss, nll, lse, entropy)
    if not any(wants) or all(gradient is None for gradient in upstream):
        return NONE
    if loss is None:
        loss = saved_lse.new_zeros(inputs.hidden.shape[:1] if ctx.options["reduction"] == "none" else ())
    if ctx.main_grad is not None and any(_vmap.is_batched(gradient) for gradient in upstream):
        raise NotImplementedError("main_grad: expected None with a batch of upstream gradients, got a tensor")
    flags = Flags(*wants)
    saved = {
        "lse": saved_lse,
        "lse_low": lse_low,
        "entropy": saved_entropy,
        "draws": draws,
        "grad_loss": loss,
        "grad_nll": nll,
        "grad_lse": lse,
        "grad_entropy": entropy if saved_entropy is not None else None,
    }
    if _modes.are_off() and _modes.are_plain((*inputs, *saved.values(), ctx.main_grad)):
        found = run_backward(inputs, saved, ctx.main_grad, ctx.options, flags)
        gradients = [found.get(name) for name in GRADIENTS]
    else:
        found = _by_operator(inputs, saved, ctx.main_grad, ctx.options, flags)
        returned = wants._replace(weight=wants.weight and ctx.main_grad is None)
        gradients = [gradient if wanted else None for gradient, wanted in zip(found, returned)]
    return *gradients[:3], _as_scale(ctx, gradients[3])


# ---- after a forward pass that has made gradients


def save_gradients(ctx: Any, scale: Tensor | None, gradients: Sequence[Tensor | None]) -> None:
    _save_scale(ctx, scale)
    ctx.save_for_backward(*gradients)
    ctx.set_materialize_grads(False)


def _graph_is_kept() -> bool:
    """Whether the running backward pass keeps the graph's saved tensors (retain_graph=True); true when in doubt."""
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if kept is None else bool(kept())


def _scaled_in_place(gradient: Tensor, factor: Tensor) -> Tensor:
    dense = gradient.is_cuda and gradient.is_contiguous()  # a hook of saved tensors may return another layout
    return scale_in_place(gradient, factor) if dense else gradient * factor


def _scaled(gradients: Sequence[Tensor | None], factor: Tensor) -> list[Tensor | None]:
    if _vmap.is_batched(factor):
        return [None if gradient is None else gradient * factor for gradient in gradients]
    if type(factor) is not torch.Tensor:  # traced
        scale = torch.ops.headroom.scale_gradient
        return [None if gradient is None else scale(gradient, factor) for gradient in gradients]
    # The saved tensor itself may become somebody's .grad, to be added to in place: only when nobody reads it again.
    if not _graph_is_kept():
        if factor.is_cuda:  # without waiting for the device
            return [None if gradient is None else _scaled_in_place(gradient, factor) for gradient in gradients]
        if factor.item() == 1:
            return list(gradients)
    return [None if gradient is None else gradient * factor for gradient in gradients]


def backward_of_forward_backward(ctx: Any, loss: Tensor | None) -> Gradients:
    _refuse_double_backward()
    if loss is None:
        return NONE
    *gradients, d_scale = ctx.saved_tensors
    scaled = _scaled(gradients, loss)
    return *scaled, _as_scale(ctx, None if d_scale is None else d_scale * loss)
