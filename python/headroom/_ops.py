"""The operators ``torch.ops.headroom.*``: schemas, kernels, fake kernels and autograd formulas.

forward           losses and statistics; saves lse in two parts, and the draws of thinned gradients; its gradient is
                  the operator backward.
backward          gradients from a saved lse and any upstream gradients.
backward_into     the same with dC added to main_grad.
forward_backward  losses, statistics (not differentiable) and the gradients of the reduced loss in one run.
scale_gradient    a saved gradient times the upstream gradient of the loss.

The public function chooses between forward and forward_backward; the choice and the conversions around it are plain
traceable code, so a compiled graph runs exactly these kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _c, _flops, _vmap
from ._flags import Flags, Wants, unpacked
from ._torch import Call, Inputs, Losses, draws_size, new_losses, scale_in_place, stats_dtype

_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, Tensor? token_weight, "
    "Tensor? num_items_tensor, Tensor? seed, Tensor? scale_tensor, Tensor? numbers_tensor"
)
# numbers are those of _numbers.NAMES, flags those of _flags.Flags.
_OPTIONS = (
    "str reduction, SymInt ignore_index, float[] numbers, SymInt shift, SymInt sequence_length, "
    "SymInt max_workspace_bytes, str gradient, int flags"
)
_DRAW_STATS = "Tensor kept_count, Tensor draw_variance"
_LOSSES = "Tensor loss, Tensor nll, Tensor lse, Tensor entropy, Tensor argmax, Tensor counts"
_GRADIENTS = "Tensor d_hidden, Tensor d_weight, Tensor d_bias, Tensor d_scale"
_INPUT_COUNT = len(Inputs._fields)


def _split(keywords: dict[str, Any]) -> tuple[dict[str, Any], Flags]:
    """Options of the problem, and the flags."""
    options = dict(keywords)
    return options, unpacked(options.pop("flags"))


def _fake_losses(hidden: Tensor, reduction: str, flags: Flags) -> Losses:
    tokens, stats = hidden.shape[0], stats_dtype(hidden)

    def vector(wanted: bool, dtype: torch.dtype) -> Tensor:
        return hidden.new_empty((tokens if wanted else 0,), dtype=dtype)

    return Losses(
        loss=hidden.new_empty((tokens,) if reduction == "none" else (), dtype=stats),
        nll=vector(flags.per_token, stats),
        lse=vector(flags.per_token, stats),
        entropy=vector(flags.want_entropy, stats),
        argmax=vector(flags.want_argmax, torch.int64),
        counts=hidden.new_empty((2,), dtype=torch.int64),
    )


def _fake_gradients(inputs: Inputs, wants: Wants) -> tuple[Tensor, ...]:
    def like(tensor: Tensor | None, wanted: bool) -> Tensor:
        if tensor is None:
            return inputs.hidden.new_empty((0,))
        return tensor.new_empty(tensor.shape if wanted else (0,))

    return (
        like(inputs.hidden, wants.hidden),
        like(inputs.weight, wants.weight),
        like(inputs.bias, wants.bias),
        inputs.hidden.new_empty(() if wants.scale else (0,), dtype=stats_dtype(inputs.hidden)),
    )


def _refuse_double_backward() -> None:
    # Grad mode is on in a backward pass exactly with create_graph=True.
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "headroom.linear_cross_entropy: double backward is not supported (its gradients are not differentiable); "
            "call backward or autograd.grad without create_graph=True"
        )


def _none_if_empty(tensor: Tensor, wanted: bool) -> Tensor | None:
    return tensor if wanted else None


def _save_scale(ctx: Any, scale: Tensor | None) -> None:
    ctx.scale_place = None if scale is None else (scale.device, scale.dtype)


def _of_inputs(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """A gradient or None for each of the inputs."""
    d_hidden, d_weight, d_bias, d_scale = gradients
    if d_scale is not None:
        d_scale = d_scale.to(*ctx.scale_place)
    found = {"hidden": d_hidden, "weight": d_weight, "bias": d_bias, "scale": d_scale}
    return tuple(found.get(name) for name in Inputs._fields)


# ---- forward


@torch.library.custom_op(
    "headroom::forward",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor? main_grad, *, {_OPTIONS}) -> ({_LOSSES}, Tensor lse_low, Tensor draws)",
)
def forward(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    options, flags = _split(keywords)
    call = Call(_c.FORWARD, Inputs(*args[:_INPUT_COUNT]), Wants(), options)  # type: ignore[arg-type]
    losses = new_losses(call, flags.per_token, flags.want_entropy, flags.want_argmax)
    lse_low = call.new("lse_low", losses.lse.shape, call.stats, flags.per_token)
    draws = call.new_draws(flags.keeps_draws)
    call.run()
    return (*losses, lse_low, draws)


@forward.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    inputs = Inputs(*args[:_INPUT_COUNT])  # type: ignore[arg-type]
    options, flags = _split(keywords)
    # Of the draws, as the planner says: sizes that were symbols become constants of the graph.
    size = draws_size(inputs, options, flags.want_entropy, flags.want_argmax) if flags.keeps_draws else 0
    draws = inputs.hidden.new_empty((size,), dtype=torch.uint8)
    losses = _fake_losses(inputs.hidden, options["reduction"], flags)
    return (*losses, torch.empty_like(losses.lse), draws)


def _save_forward(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    losses, (lse_low, draws) = Losses(*output[:-2]), output[-2:]
    ctx.options, flags = _split(keyword_only_inputs)
    # Not among the saved tensors: other backward passes may add to it before this one does.
    ctx.main_grad = inputs[_INPUT_COUNT]
    ctx.has_entropy, ctx.keeps_draws = flags.want_entropy, flags.keeps_draws
    _save_scale(ctx, Inputs(*inputs[:_INPUT_COUNT]).scale)
    ctx.save_for_backward(*inputs[:_INPUT_COUNT], losses.lse, lse_low, losses.entropy, draws)
    ctx.mark_non_differentiable(losses.argmax, losses.counts, lse_low, draws)
    ctx.set_materialize_grads(False)


def _backward_of_forward(ctx: Any, loss: Any, nll: Any, lse: Any, entropy: Any, *_: Any) -> tuple[Any, ...]:
    _refuse_double_backward()
    *saved, saved_lse, lse_low, saved_entropy, draws = ctx.saved_tensors
    inputs = Inputs(*saved)
    nothing = (None,) * (_INPUT_COUNT + 1)
    if all(gradient is None for gradient in (loss, nll, lse, entropy)):
        return nothing
    if loss is None:
        loss = saved_lse.new_zeros(inputs.hidden.shape[:1] if ctx.options["reduction"] == "none" else ())
    needs = Inputs(*ctx.needs_input_grad[:_INPUT_COUNT])
    wants = Wants(*(getattr(needs, name) for name in Wants._fields))
    if not any(wants):
        return nothing
    upstream = (loss, nll, lse, entropy)
    into = () if ctx.main_grad is None else (ctx.main_grad,)
    if into and any(_vmap.is_batched(gradient) for gradient in upstream):
        raise NotImplementedError("main_grad: expected None with a batch of upstream gradients, got a tensor")
    gradients = (backward_into if into else backward)(
        *inputs,
        saved_lse,
        lse_low,
        saved_entropy if ctx.has_entropy else None,
        draws if ctx.keeps_draws else None,
        *upstream[:3],
        entropy if ctx.has_entropy else None,
        *into,
        **ctx.options,
        flags=Flags(*wants).packed(),
    )
    returned = wants._replace(weight=wants.weight and ctx.main_grad is None)
    return (*_of_inputs(ctx, [*map(_none_if_empty, gradients, returned)]), None)


forward.register_autograd(_backward_of_forward, setup_context=_save_forward)


# ---- backward


_UPSTREAM = (
    "Tensor lse, Tensor lse_low, Tensor? entropy, Tensor? draws, Tensor grad_loss, Tensor? grad_nll, "
    "Tensor? grad_lse, Tensor? grad_entropy"
)


@torch.library.custom_op(
    "headroom::backward",
    mutates_args=(),
    schema=f"({_INPUTS}, {_UPSTREAM}, *, {_OPTIONS}) -> ({_GRADIENTS})",
)
def backward(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    return _gradients(args, None, keywords)


@torch.library.custom_op(
    "headroom::backward_into",
    mutates_args=("main_grad",),
    schema=f"({_INPUTS}, {_UPSTREAM}, Tensor(a!) main_grad, *, {_OPTIONS}) -> ({_GRADIENTS})",
)
def backward_into(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    return _gradients(args[:-1], args[-1], keywords)


def _gradients(args: Sequence[Tensor | None], main_grad: Tensor | None, keywords: dict[str, Any]) -> tuple[Tensor, ...]:
    options, flags = _split(keywords)
    inputs = Inputs(*args[:_INPUT_COUNT])  # type: ignore[arg-type]
    lse, lse_low, entropy, draws, grad_loss, grad_nll, grad_lse, grad_entropy = args[_INPUT_COUNT:]
    call = Call(_c.BACKWARD, inputs, flags.wants(), options)
    call.give("lse", lse)
    call.give("lse_low", lse_low)
    call.give("entropy", entropy if grad_entropy is not None else None)
    call.spec["keeps_draws"] = draws is not None
    call.give("draws", draws)
    call.give("grad_loss", grad_loss)
    upstream = {"grad_nll": grad_nll, "grad_lse": grad_lse, "grad_entropy": grad_entropy}
    for name, gradient in upstream.items():
        call.spec[f"has_{name}"] = gradient is not None
        call.give(name, gradient)
    gradients = call.new_gradients(main_grad)
    call.run()
    return call.with_scale(gradients)


@backward.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    return _fake_gradients(Inputs(*args[:_INPUT_COUNT]), unpacked(keywords["flags"]).wants())  # type: ignore[arg-type]


@backward_into.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    wants = unpacked(keywords["flags"]).wants()._replace(weight=False)
    return _fake_gradients(Inputs(*args[:_INPUT_COUNT]), wants)  # type: ignore[arg-type]


backward.register_vmap(_vmap.one_by_one(backward))


# ---- forward_backward


@torch.library.custom_op(
    "headroom::forward_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, *, {_OPTIONS}) -> ({_LOSSES}, {_DRAW_STATS}, {_GRADIENTS})",
)
def forward_backward(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    options, flags = _split(keywords)
    call = Call(_c.FORWARD_BACKWARD, Inputs(*args), flags.wants(), options)  # type: ignore[arg-type]
    losses = new_losses(call, flags.per_token, flags.want_entropy, flags.want_argmax)
    draw_stats = call.new_draw_stats(flags.want_draw_stats)
    gradients = call.new_gradients()
    call.run()
    return (*losses, *draw_stats, *call.with_scale(gradients))


@forward_backward.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    inputs, flags = Inputs(*args), unpacked(keywords["flags"])  # type: ignore[arg-type]
    rows = (inputs.hidden.shape[0] if flags.want_draw_stats else 0,)
    draw_stats = (
        inputs.hidden.new_empty(rows, dtype=torch.int32),
        inputs.hidden.new_empty(rows, dtype=stats_dtype(inputs.hidden)),
    )
    losses = _fake_losses(inputs.hidden, keywords["reduction"], flags)
    return (*losses, *draw_stats, *_fake_gradients(inputs, flags.wants()))


def _save_forward_backward(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]
) -> None:
    wants = unpacked(keyword_only_inputs["flags"]).wants()
    _save_scale(ctx, Inputs(*inputs).scale)
    ctx.save_for_backward(*map(_none_if_empty, output[-len(wants) :], wants))
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _graph_is_kept() -> bool:
    """Whether the running backward pass keeps the graph's saved tensors (retain_graph=True); true when in doubt."""
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if kept is None else bool(kept())


def _scaled(gradient: Tensor | None, factor: Tensor, keep: bool) -> Tensor | None:
    if gradient is None:
        return None
    if _vmap.is_batched(factor):
        return gradient * factor
    if type(factor) is not torch.Tensor:  # traced
        scaled: Tensor = scale_gradient(gradient, factor)
        return scaled
    # The saved tensor itself may become somebody's .grad, to be added to in place: only when nobody reads it again.
    if not keep and gradient.is_cuda:
        return scale_in_place(gradient, factor)  # without waiting for the device
    if not keep and factor.item() == 1:
        return gradient
    return gradient * factor


def _backward_of_forward_backward(ctx: Any, loss: Any, *_: Any) -> tuple[Any, ...]:
    _refuse_double_backward()
    if loss is None:
        return (None,) * _INPUT_COUNT
    keep = _graph_is_kept()
    *gradients, d_scale = ctx.saved_tensors
    scaled = [_scaled(gradient, loss, keep) for gradient in gradients]
    return _of_inputs(ctx, [*scaled, None if d_scale is None else d_scale * loss])


forward_backward.register_autograd(_backward_of_forward_backward, setup_context=_save_forward_backward)


# ---- scale_gradient


@torch.library.custom_op(
    "headroom::scale_gradient", mutates_args=(), schema="(Tensor gradient, Tensor factor) -> Tensor"
)
def scale_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    return gradient * factor


@scale_gradient.register_fake
def _(gradient: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(gradient)


_flops.register(torch.ops.headroom)
