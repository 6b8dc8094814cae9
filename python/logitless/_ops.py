"""The operators ``torch.ops.logitless.*``: schemas, kernels, fake kernels and autograd formulas.

forward           losses and statistics; saves lse in two parts, and the draws of thinned gradients; its gradient is
                  the operator backward.
backward          gradients from a saved lse and any upstream gradients.
backward_into     the same with dC added to main_grad.
forward_backward  losses, statistics (not differentiable) and the gradients of the reduced loss in one run.
scale_gradient    a saved gradient times the upstream gradient of the loss.

They are for compiled code and for whatever else of PyTorch watches or transforms operators (_modes.py); else the same
runs and formulas are used without them (_eager.py), for PyTorch takes longer to call them than small runs take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _c, _flops, _stats, _vmap
from ._autograd import (
    Gradients,
    backward_of_forward,
    backward_of_forward_backward,
    save_forward,
    save_gradients,
    scaled,
)
from ._flags import Flags, Wants, unpacked
from ._overlap import check_own_memory
from ._run import Tensors, draws_size, run, run_backward
from ._saved import LSE, SAVED
from ._torch import GRADIENTS, LOSSES, RESULTS, Inputs, resolved, results

INPUTS = (
    "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, Tensor? token_weight, "
    "Tensor? row_temperature, Tensor? target_weight, Tensor? num_items_tensor, Tensor? seed, "
    "Tensor? scale_tensor, Tensor? temperature_tensor, Tensor? numbers_tensor"
)
# numbers are those of _numbers.NAMES, flags those of _flags.Flags.
OPTIONS = (
    "str reduction, SymInt ignore_index, float[] numbers, SymInt shift, SymInt sequence_length, "
    "SymInt max_workspace_bytes, str gradient, int compute_dtype, int flags, bool batch_invariant=False"
)
_DRAW_STATS = ", ".join(f"Tensor {name}" for name in _stats.DRAW_STATS)
_LOSSES = ", ".join(f"Tensor {name}" for name in LOSSES)
_GRADIENTS = "Tensor d_hidden, Tensor d_weight, Tensor d_bias, Tensor d_scale, Tensor d_temperature"
INPUT_COUNT = len(Inputs._fields)


def _split(keywords: dict[str, Any]) -> tuple[dict[str, Any], Flags]:
    """Options of the problem, and the flags."""
    options = dict(keywords)
    return options, unpacked(options.pop("flags"))


def _inputs(args: Sequence[Any]) -> Inputs:
    return Inputs(*args[:INPUT_COUNT])


def _all(pass_: int, found: Tensors, inputs: Inputs, reduction: str, flags: Flags) -> tuple[Tensor, ...]:
    """What a pass has found, and empty tensors for the rest."""
    return tuple(
        found[name] if name in found else inputs.hidden.new_empty((0,), dtype=result.dtype)
        for name, result in results(pass_, inputs, reduction, flags, 0).items()
    )


def _fake(pass_: int, inputs: Inputs, reduction: str, flags: Flags, draws_bytes: int = 0) -> tuple[Tensor, ...]:
    wanted = results(pass_, inputs, reduction, flags, draws_bytes).values()
    return tuple(inputs.hidden.new_empty(result.shape, dtype=result.dtype) for result in wanted)


def _of_inputs(gradients: Gradients) -> tuple[Tensor | None, ...]:
    """A gradient or None for each of the inputs."""
    found = dict(zip(Wants._fields, gradients))
    return tuple(found.get(name) for name in Inputs._fields)


# ---- forward


@torch.library.custom_op(
    "logitless::forward",
    mutates_args=(),
    schema=f"({INPUTS}, Tensor? main_grad, *, {OPTIONS}) -> ({_LOSSES}, Tensor lse_low, Tensor draws)",
)
def forward(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    inputs, (options, flags) = _inputs(args), _split(keywords)
    main_grad = args[INPUT_COUNT]
    if main_grad is not None:  # here, for compiled code may give the backward pass a copy of it
        check_own_memory(main_grad, inputs)
    found = run(_c.FORWARD, inputs, options, flags, main_grad)
    return _all(_c.FORWARD, found, inputs, options["reduction"], flags)


@forward.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    inputs, (options, flags) = _inputs(args), _split(keywords)
    # Of the draws, as the planner says: sizes that were symbols become constants of the graph.
    size = draws_size(inputs, options, flags) if flags.keeps_draws else 0
    return _fake(_c.FORWARD, inputs, options["reduction"], flags, size)


def _save_forward(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    options, flags = _split(keyword_only_inputs)
    found = dict(zip(RESULTS[_c.FORWARD], output))
    entropy = found["entropy"] if "entropy" in flags.stats else None
    draws = found["draws"] if flags.keeps_draws else None
    saved = (found["lse"], found["lse_low"], entropy, draws)
    save_forward(ctx, _inputs(inputs), inputs[INPUT_COUNT], options, saved)
    ctx.returned = ("loss", *flags.stats)  # the other outputs are empty, as are gradients that they may be given
    ctx.mark_non_differentiable(*(found[name] for name in (*_stats.CONSTANT, "counts", "lse_low", "draws")))


def _backward_of_forward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    found = dict(zip(RESULTS[_c.FORWARD], gradients))
    upstream = {name: found[name] for name in ("loss", *_stats.DIFFERENTIABLE) if name in ctx.returned}
    needs = _inputs(ctx.needs_input_grad)
    wants = Wants(*(getattr(needs, name) for name in Wants._fields))
    return *_of_inputs(backward_of_forward(ctx, wants, upstream)), None


forward.register_autograd(_backward_of_forward, setup_context=_save_forward)


# ---- backward


_SAVED = (*SAVED, "grad_loss", *_stats.GRADIENTS)
_ALWAYS_SAVED = (*LSE, "grad_loss")
_UPSTREAM = ", ".join(f"{'Tensor' if name in _ALWAYS_SAVED else 'Tensor?'} {name}" for name in _SAVED)


@torch.library.custom_op(
    "logitless::backward",
    mutates_args=(),
    schema=f"({INPUTS}, {_UPSTREAM}, *, {OPTIONS}) -> ({_GRADIENTS})",
)
def backward(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    return _gradients(args, None, keywords)


@torch.library.custom_op(
    "logitless::backward_into",
    mutates_args=("main_grad",),
    schema=f"({INPUTS}, {_UPSTREAM}, Tensor(a!) main_grad, *, {OPTIONS}) -> ({_GRADIENTS})",
)
def backward_into(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    return _gradients(args[:-1], args[-1], keywords)


def _gradients(args: Sequence[Tensor | None], main_grad: Tensor | None, keywords: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs, (options, flags) = _inputs(args), _split(keywords)
    saved = dict(zip(_SAVED, args[INPUT_COUNT:]))
    found = run_backward(inputs, saved, main_grad, resolved(inputs, options), flags)
    return _all(_c.BACKWARD, found, inputs, options["reduction"], flags)


@backward.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    return _fake(_c.BACKWARD, _inputs(args), keywords["reduction"], unpacked(keywords["flags"]))


@backward_into.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    flags = unpacked(keywords["flags"])._replace(want_d_weight=False)
    return _fake(_c.BACKWARD, _inputs(args), keywords["reduction"], flags)


backward.register_vmap(_vmap.one_by_one(backward))


# ---- forward_backward


@torch.library.custom_op(
    "logitless::forward_backward",
    mutates_args=(),
    schema=f"({INPUTS}, *, {OPTIONS}) -> ({_LOSSES}, {_DRAW_STATS}, {_GRADIENTS})",
)
def forward_backward(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    inputs, (options, flags) = _inputs(args), _split(keywords)
    found = run(_c.FORWARD_BACKWARD, inputs, options, flags)
    return _all(_c.FORWARD_BACKWARD, found, inputs, options["reduction"], flags)


@forward_backward.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    return _fake(_c.FORWARD_BACKWARD, _inputs(args), keywords["reduction"], unpacked(keywords["flags"]))


def _save_forward_backward(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]
) -> None:
    wants = unpacked(keyword_only_inputs["flags"]).wants()
    gradients = [gradient if wanted else None for gradient, wanted in zip(output[-len(GRADIENTS) :], wants)]
    given = _inputs(inputs)
    save_gradients(ctx, given.scale, given.temperature, gradients)
    ctx.mark_non_differentiable(*output[1:])


def _backward_of_forward_backward(ctx: Any, loss: Any, *_: Any) -> tuple[Any, ...]:
    return _of_inputs(backward_of_forward_backward(ctx, loss))


forward_backward.register_autograd(_backward_of_forward_backward, setup_context=_save_forward_backward)


# ---- scale_gradient


@torch.library.custom_op(
    "logitless::scale_gradient", mutates_args=(), schema="(Tensor gradient, Tensor factor) -> Tensor"
)
def scale_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    return scaled([gradient], factor)[0]


@scale_gradient.register_fake
def _(gradient: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(gradient)


_flops.register(torch.ops.logitless)
