"""The operators ``torch.ops.headroom.*``: schemas, kernels, fake kernels and autograd formulas.

forward           losses and statistics; saves lse, and the draws of thinned gradients; its gradient is the
                  operator backward.
backward          gradients from a saved lse and any upstream gradients, or dC added to main_grad.
forward_backward  losses, statistics (not differentiable) and the gradients of the reduced loss in one run.
scale_gradient    a saved gradient times the upstream gradient of the loss.

The public function chooses between forward and forward_backward; the choice and the conversions around it are plain
traceable code, so a compiled graph runs exactly these kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _c
from ._torch import Call, Inputs, Losses, Wants, draws_size, new_losses, scale_in_place, stats_dtype

_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, Tensor? token_weight, "
    "Tensor? num_items_tensor, Tensor? seed"
)
_OPTIONS = (
    "str reduction, SymInt ignore_index, float label_smoothing, float scale, float softcap, float z_loss, "
    "float num_items, SymInt shift, SymInt sequence_length, SymInt max_workspace_bytes, str gradient, float threshold"
)
_WANTS = "bool want_d_hidden, bool want_d_weight, bool want_d_bias"
_STATS = "bool per_token, bool want_entropy, bool want_argmax"
_DRAW_STATS = "Tensor kept_count, Tensor draw_variance"
_LOSSES = "Tensor loss, Tensor nll, Tensor lse, Tensor entropy, Tensor argmax, Tensor counts"
_GRADIENTS = "Tensor d_hidden, Tensor d_weight, Tensor d_bias"
_INPUT_COUNT = len(Inputs._fields)

_FLAGS = (
    *("want_d_hidden", "want_d_weight", "want_d_bias", "per_token", "want_entropy", "want_argmax"),
    *("keeps_draws", "want_draw_stats"),
)


def _split(keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the problem, and the flags."""
    return {k: v for k, v in keywords.items() if k not in _FLAGS}, {k: v for k, v in keywords.items() if k in _FLAGS}


def _wants(flags: dict[str, Any]) -> Wants:
    return Wants(flags["want_d_hidden"], flags["want_d_weight"], flags["want_d_bias"])


def _fake_losses(hidden: Tensor, keywords: dict[str, Any]) -> Losses:
    tokens, stats = hidden.shape[0], stats_dtype(hidden)

    def vector(wanted: bool, dtype: torch.dtype) -> Tensor:
        return hidden.new_empty((tokens if wanted else 0,), dtype=dtype)

    return Losses(
        loss=hidden.new_empty((tokens,) if keywords["reduction"] == "none" else (), dtype=stats),
        nll=vector(keywords["per_token"], stats),
        lse=vector(keywords["per_token"], stats),
        entropy=vector(keywords["want_entropy"], stats),
        argmax=vector(keywords["want_argmax"], torch.int64),
        counts=hidden.new_empty((2,), dtype=torch.int64),
    )


def _fake_gradients(inputs: Inputs, keywords: dict[str, Any], weight: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    wants = _wants(keywords)

    def like(tensor: Tensor | None, wanted: bool) -> Tensor:
        if tensor is None:
            return inputs.hidden.new_empty((0,))
        return tensor.new_empty(tensor.shape if wanted else (0,))

    return (
        like(inputs.hidden, wants.hidden),
        like(inputs.weight, wants.weight and weight),
        like(inputs.bias, wants.bias),
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


# ---- forward


@torch.library.custom_op(
    "headroom::forward",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor? main_grad, *, {_OPTIONS}, {_STATS}, bool keeps_draws) -> ({_LOSSES}, Tensor draws)",
)
def forward(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    options, flags = _split(keywords)
    call = Call(_c.FORWARD, Inputs(*args[:_INPUT_COUNT]), Wants(False, False, False), options)  # type: ignore[arg-type]
    losses = new_losses(call, flags["per_token"], flags["want_entropy"], flags["want_argmax"])
    draws = call.new_draws(flags["keeps_draws"])
    call.run()
    return (*losses, draws)


@forward.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    hidden: Tensor = args[0]  # type: ignore[assignment]
    size = _draws_size(Inputs(*args[:_INPUT_COUNT]), keywords)  # type: ignore[arg-type]
    return (*_fake_losses(hidden, keywords), hidden.new_empty((size,), dtype=torch.uint8))


def _draws_size(inputs: Inputs, keywords: dict[str, Any]) -> int:
    """Of the tensor draws, as the planner says. Sizes that were symbols become constants of the graph."""
    if not keywords["keeps_draws"]:
        return 0
    options, flags = _split(keywords)
    return draws_size(inputs, options, flags["want_entropy"], flags["want_argmax"])


def _save_forward(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    losses = Losses(*output[:-1])
    ctx.options, _ = _split(keyword_only_inputs)
    # Not among the saved tensors: other backward passes may add to it before this one does.
    ctx.main_grad = inputs[_INPUT_COUNT]
    ctx.has_entropy = keyword_only_inputs["want_entropy"]
    ctx.keeps_draws = keyword_only_inputs["keeps_draws"]
    ctx.save_for_backward(*inputs[:_INPUT_COUNT], losses.lse, losses.entropy, output[-1])
    ctx.mark_non_differentiable(losses.argmax, losses.counts, output[-1])
    ctx.set_materialize_grads(False)


def _backward_of_forward(ctx: Any, loss: Any, nll: Any, lse: Any, entropy: Any, *_: Any) -> tuple[Any, ...]:
    _refuse_double_backward()
    *saved, saved_lse, saved_entropy, draws = ctx.saved_tensors
    inputs = Inputs(*saved)
    nothing = (None,) * (_INPUT_COUNT + 1)
    if all(gradient is None for gradient in (loss, nll, lse, entropy)):
        return nothing
    if loss is None:
        loss = saved_lse.new_zeros(inputs.hidden.shape[:1] if ctx.options["reduction"] == "none" else ())
    wants = Wants(ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
    if not any(wants):
        return nothing
    d_hidden, d_weight, d_bias = backward(
        *inputs,
        saved_lse,
        saved_entropy if ctx.has_entropy else None,
        draws if ctx.keeps_draws else None,
        loss,
        nll,
        lse,
        entropy if ctx.has_entropy else None,
        ctx.main_grad,
        **ctx.options,
        want_d_hidden=wants.hidden,
        want_d_weight=wants.weight,
        want_d_bias=wants.bias,
    )
    own_weight_gradient = wants.weight and ctx.main_grad is None
    return (
        _none_if_empty(d_hidden, wants.hidden),
        _none_if_empty(d_weight, own_weight_gradient),
        None,
        _none_if_empty(d_bias, wants.bias),
        *(None,) * 5,
    )


forward.register_autograd(_backward_of_forward, setup_context=_save_forward)


# ---- backward


@torch.library.custom_op(
    "headroom::backward",
    mutates_args=("main_grad",),
    schema=(
        f"({_INPUTS}, Tensor lse, Tensor? entropy, Tensor? draws, Tensor grad_loss, Tensor? grad_nll, "
        f"Tensor? grad_lse, Tensor? grad_entropy, Tensor(a!)? main_grad, *, {_OPTIONS}, {_WANTS}) -> ({_GRADIENTS})"
    ),
)
def backward(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, Tensor, Tensor]:
    options, flags = _split(keywords)
    inputs = Inputs(*args[:_INPUT_COUNT])  # type: ignore[arg-type]
    lse, entropy, draws, grad_loss, grad_nll, grad_lse, grad_entropy, main_grad = args[_INPUT_COUNT:]
    call = Call(_c.BACKWARD, inputs, _wants(flags), options)
    call.give("lse", lse)
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
    return gradients


@backward.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_gradients(Inputs(*args[:_INPUT_COUNT]), keywords, weight=args[-1] is None)  # type: ignore[arg-type]


# ---- forward_backward


@torch.library.custom_op(
    "headroom::forward_backward",
    mutates_args=(),
    schema=(
        f"({_INPUTS}, *, {_OPTIONS}, {_STATS}, bool want_draw_stats, {_WANTS}) -> "
        f"({_LOSSES}, {_DRAW_STATS}, {_GRADIENTS})"
    ),
)
def forward_backward(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    options, flags = _split(keywords)
    call = Call(_c.FORWARD_BACKWARD, Inputs(*args), _wants(flags), options)  # type: ignore[arg-type]
    losses = new_losses(call, flags["per_token"], flags["want_entropy"], flags["want_argmax"])
    draw_stats = call.new_draw_stats(flags["want_draw_stats"])
    gradients = call.new_gradients()
    call.run()
    return (*losses, *draw_stats, *gradients)


@forward_backward.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    inputs = Inputs(*args)  # type: ignore[arg-type]
    rows = (inputs.hidden.shape[0] if keywords["want_draw_stats"] else 0,)
    draw_stats = (
        inputs.hidden.new_empty(rows, dtype=torch.int32),
        inputs.hidden.new_empty(rows, dtype=stats_dtype(inputs.hidden)),
    )
    return (*_fake_losses(inputs.hidden, keywords), *draw_stats, *_fake_gradients(inputs, keywords))


def _save_forward_backward(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]
) -> None:
    wants = _wants(keyword_only_inputs)
    ctx.save_for_backward(*(_none_if_empty(g, wanted) for g, wanted in zip(output[-3:], wants)))
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _graph_is_kept() -> bool:
    """Whether the running backward pass keeps the graph's saved tensors (retain_graph=True); true when in doubt."""
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if kept is None else bool(kept())


def _scaled(gradient: Tensor | None, factor: Tensor, keep: bool) -> Tensor | None:
    if gradient is None:
        return None
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
    d_hidden, d_weight, d_bias = (_scaled(gradient, loss, keep) for gradient in ctx.saved_tensors)
    return d_hidden, d_weight, None, d_bias, None, None, None, None


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
