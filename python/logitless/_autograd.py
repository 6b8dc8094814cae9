"""The gradients' formulas, of the operators (_ops.py) and of the autograd functions without them (_eager.py) alike.

Both save the same tensors: a forward pass that is computed again, by torch.utils.checkpoint, may go the other way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _modes, _stats, _vmap
from ._flags import Flags, Wants
from ._run import run_backward, scale_in_place
from ._saved import SAVED
from ._torch import GRADIENTS, Inputs, resolved

Gradients = tuple[Tensor | None, ...]  # as Wants has them
NONE: Gradients = (None,) * len(GRADIENTS)


def refuse_double_backward(function: str = "linear_cross_entropy") -> None:
    # Grad mode is on in a backward pass exactly with create_graph=True.
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"logitless.{function}: double backward is not supported (its gradients are not differentiable); "
            "call backward or autograd.grad without create_graph=True"
        )


def save_learned(ctx: Any, scale: Tensor | None, temperature: Tensor | None) -> None:
    if scale is not None or temperature is not None:
        learned = (scale, temperature)
        ctx.learned_places = [None if tensor is None else (tensor.device, tensor.dtype) for tensor in learned]


def as_learned(ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Of scale and temperature, where these are."""
    d_scale, d_temperature = gradients
    if d_scale is None and d_temperature is None:
        return [None, None]
    places = ctx.learned_places
    return [None if gradient is None else gradient.to(*place) for gradient, place in zip(gradients, places)]


# ---- after a forward pass


def save_forward(
    ctx: Any, inputs: Inputs, main_grad: Tensor | None, options: dict[str, Any], saved: Sequence[Tensor | None]
) -> None:
    """saved: in the order of SAVED; options: as the operators take them."""
    ctx.options = options
    # Not among the saved tensors: other backward passes may add to it before this one does.
    ctx.main_grad = main_grad
    save_learned(ctx, inputs.scale, inputs.temperature)
    ctx.save_for_backward(*inputs, *saved)
    ctx.set_materialize_grads(False)


def _by_operator(
    inputs: Inputs, saved: dict[str, Any], main_grad: Any, options: dict[str, Any], flags: Flags, operators: Any
) -> Any:
    """operators: backward and backward_into; None: those of the whole vocabulary."""
    plain, into_main_grad = operators or (torch.ops.logitless.backward, torch.ops.logitless.backward_into)
    operator, into = (plain, ()) if main_grad is None else (into_main_grad, (main_grad,))
    return operator(*inputs, *saved.values(), *into, **options, flags=flags.packed())


def _asks_for_weight(ctx: Any) -> bool:
    """Whether the running backward pass leads to the weight, as that of autograd.grad(loss, input) does not; true when
    in doubt."""
    will_run: Any = getattr(torch._C, "_will_engine_execute_node", None)
    edges = getattr(ctx, "next_functions", ())
    node = edges[Inputs._fields.index("weight")][0] if len(edges) > 1 else None
    if will_run is None or node is None:
        return True
    try:
        return bool(will_run(node))
    except RuntimeError:  # of a leaf whose gradient autograd.grad returns
        return True


def backward_of_forward(
    ctx: Any,
    wants: Wants,
    upstream: Mapping[str, Tensor | None],
    options: dict[str, Any] | None = None,
    operators: Any = None,
) -> Gradients:
    """upstream: of the loss and of differentiable statistics, by name; options: those of ctx as resolved() returns
    them, if they are known; operators: as in _by_operator."""
    refuse_double_backward()
    tensors = ctx.saved_tensors
    inputs = Inputs(*tensors[: len(Inputs._fields)])
    kept = dict(zip(SAVED, tensors[len(Inputs._fields) :]))
    if ctx.main_grad is not None and wants.weight and not _asks_for_weight(ctx):
        wants = wants._replace(weight=False)
    if not any(wants) or all(gradient is None for gradient in upstream.values()):
        return NONE
    loss = upstream["loss"]
    if loss is None:
        lse = kept["lse"]
        loss = lse.new_zeros(lse.shape if ctx.options["reduction"] == "none" else ())
    if ctx.main_grad is not None and any(_vmap.is_batched(gradient) for gradient in upstream.values()):
        raise NotImplementedError("main_grad: expected None with a batch of upstream gradients, got a tensor")
    flags = Flags(*wants)
    saved = {
        **kept,
        "grad_loss": loss,
        **{f"grad_{name}": upstream.get(name) for name in _stats.DIFFERENTIABLE},
    }
    if kept["entropy"] is None:
        saved["grad_entropy"] = None
    if operators is None and _modes.are_off() and _modes.are_plain((*inputs, *saved.values(), ctx.main_grad)):
        found = run_backward(inputs, saved, ctx.main_grad, options or resolved(inputs, ctx.options), flags)
        gradients = [found.get(name) for name in GRADIENTS]
        if ctx.main_grad is not None and wants.weight and not ctx.main_grad.is_inference():
            torch.autograd.graph.increment_version(ctx.main_grad)  # as an operator that writes it does
    else:
        found = _by_operator(inputs, saved, ctx.main_grad, ctx.options, flags, operators)
        returned = wants._replace(weight=wants.weight and ctx.main_grad is None)
        gradients = [gradient if wanted else None for gradient, wanted in zip(found, returned)]
    return *gradients[:3], *as_learned(ctx, gradients[3:])


# ---- after a forward pass that has made gradients


def save_gradients(
    ctx: Any, scale: Tensor | None, temperature: Tensor | None, gradients: Iterable[Tensor | None]
) -> None:
    """scale and temperature: where their gradients are wanted."""
    save_learned(ctx, scale, temperature)
    ctx.save_for_backward(*gradients)
    ctx.set_materialize_grads(False)


# Whether the running backward pass keeps the graph's saved tensors (retain_graph=True); true when in doubt.
_graph_is_kept: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def _product(gradient: Tensor, factor: Tensor) -> Tensor:
    """What is 0 stays 0, of rows without a target where the factor is infinite or NaN."""
    return torch.where(gradient == 0, gradient, gradient * factor)


def scaled(gradients: Sequence[Tensor], factor: Tensor, in_place: bool = False) -> Sequence[Tensor]:
    """As _product; with in_place the very list of gradients, where that saves time."""
    if factor.is_cuda:  # without waiting for the device
        device = factor.device  # a hook of saved tensors may return them on another one, or in another layout
        if not all([gradient.device == device and gradient.is_contiguous() for gradient in gradients]):
            return [_product(gradient, factor) for gradient in gradients]
        found = gradients if in_place else [gradient.clone() for gradient in gradients]
        scale_in_place(found, factor)
        return found
    by = factor.item()
    if by == 1 and in_place:
        return gradients
    return [gradient * factor if math.isfinite(by) else _product(gradient, factor) for gradient in gradients]


def _scaled(gradients: Sequence[Tensor], factor: Tensor) -> Sequence[Tensor]:
    if _modes.are_plain((factor,)):
        # The saved tensor itself may become somebody's .grad, to be added to in place: when nobody reads it again.
        return scaled(gradients, factor, in_place=not _graph_is_kept())
    if type(factor) is not torch.Tensor:  # traced
        return [torch.ops.logitless.scale_gradient(gradient, factor) for gradient in gradients]
    return [_product(gradient, factor) for gradient in gradients]  # of a batch, or a view such as a negated one


def backward_of_forward_backward(ctx: Any, loss: Tensor | None) -> Gradients:
    refuse_double_backward()
    if loss is None:
        return NONE
    *gradients, d_scale, d_temperature = ctx.saved_tensors
    saved = [gradient for gradient in gradients if gradient is not None]
    found = _scaled(saved, loss)
    if found is not saved:
        left = iter(found)
        gradients = [gradient if gradient is None else next(left) for gradient in gradients]
    learned = [gradient if gradient is None else gradient * loss for gradient in (d_scale, d_temperature)]
    return *gradients, *as_learned(ctx, learned)
