"""The operators ``torch.ops.logitless.group_*``: those of .._ops for a rank's shard, with collectives inside.

The group is given by its name, as PyTorch's own collectives take it, so that compiled code holds a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _autograd, _c, _stats
from .._flags import Flags, Wants, unpacked
from .._ops import _DRAW_STATS, _GRADIENTS, _LOSSES, _SAVED, _UPSTREAM, INPUTS, OPTIONS, _of_inputs
from .._run import Tensors
from .._torch import GRADIENTS, RESULTS, Inputs
from . import _passes
from ._agreement import Shard
from ._passes import Ranks, results_of

RANKS = (
    "str group, int group_size, int vocab_start, int vocab_total, bool sequence_parallel, bool own_targets, "
    "bool seed_given"
)
_INPUT_COUNT = len(Inputs._fields)
_RESULTS = (*RESULTS[_c.FORWARD][:-1], "shard")  # a Shard, which the backward pass reads, in the place of draws


def split(keywords: dict[str, Any]) -> tuple[dict[str, Any], Flags, Ranks]:
    """Options of the problem, flags, and the group."""
    options = dict(keywords)
    ranks = Ranks(**{name: options.pop(name) for name in Ranks._fields})
    return options, unpacked(options.pop("flags")), ranks


def _inputs(args: Sequence[Any]) -> Inputs:
    return Inputs(*args[:_INPUT_COUNT])


def _all(pass_: int, found: Tensors, inputs: Inputs, options: dict[str, Any], flags: Flags, ranks: Ranks) -> Any:
    """What a pass has found, and empty tensors for the rest."""
    return tuple(
        found[name] if name in found else inputs.hidden.new_empty((0,), dtype=result.dtype)
        for name, result in results_of(pass_, inputs, options["reduction"], flags, ranks).items()
    )


def _fake(pass_: int, args: Sequence[Any], keywords: dict[str, Any], keeps_weight: bool = False) -> Any:
    inputs, (options, flags, ranks) = _inputs(args), split(keywords)
    wanted = results_of(pass_, inputs, options["reduction"], flags, ranks, keeps_weight)
    return tuple(inputs.hidden.new_empty(result.shape, dtype=result.dtype) for result in wanted.values())


# ---- forward


@torch.library.custom_op(
    "logitless::group_forward",
    mutates_args=(),
    schema=f"({INPUTS}, Tensor? main_grad, *, {OPTIONS}, {RANKS}) -> ({_LOSSES}, Tensor lse_low, Tensor shard)",
)
def forward(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    inputs, (options, flags, ranks) = _inputs(args), split(keywords)
    found, shard, seed = _passes.forward(_c.FORWARD, inputs, args[_INPUT_COUNT], options, flags, ranks)
    *told, _draws = _all(_c.FORWARD, found, inputs, options, flags, ranks)
    return *told, shard.packed(seed)


@forward.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    *told, _draws = _fake(_c.FORWARD, args, keywords)
    return *told, Shard.fake()


def _save_forward(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    _, flags, _ = split(keyword_only_inputs)
    found = dict(zip(_RESULTS, output))
    entropy = found["entropy"] if "entropy" in flags.stats else None
    options = {name: value for name, value in keyword_only_inputs.items() if name != "flags"}
    saved = (found["lse"], found["lse_low"], entropy, found["shard"])  # the last in the place of draws
    _autograd.save_forward(ctx, _inputs(inputs), inputs[_INPUT_COUNT], options, saved)
    ctx.returned = ("loss", *flags.stats)
    ctx.mark_non_differentiable(*(found[name] for name in (*_stats.CONSTANT, "counts", "lse_low", "shard")))


def _backward_of_forward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    found = dict(zip(_RESULTS, gradients))
    upstream = {name: found[name] for name in ("loss", *_stats.DIFFERENTIABLE) if name in ctx.returned}
    needs = _inputs(ctx.needs_input_grad)
    wants = Wants(*(getattr(needs, name) for name in Wants._fields))
    operators = torch.ops.logitless.group_backward, torch.ops.logitless.group_backward_into
    return *_of_inputs(_autograd.backward_of_forward(ctx, wants, upstream, operators=operators)), None


forward.register_autograd(_backward_of_forward, setup_context=_save_forward)


# ---- backward


@torch.library.custom_op(
    "logitless::group_backward",
    mutates_args=(),
    schema=f"({INPUTS}, {_UPSTREAM}, *, {OPTIONS}, {RANKS}) -> ({_GRADIENTS})",
)
def backward(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    return _gradients(args, None, keywords)


@torch.library.custom_op(
    "logitless::group_backward_into",
    mutates_args=("main_grad",),
    schema=f"({INPUTS}, {_UPSTREAM}, Tensor(a!) main_grad, *, {OPTIONS}, {RANKS}) -> ({_GRADIENTS})",
)
def backward_into(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    return _gradients(args[:-1], args[-1], keywords)


def _gradients(args: Sequence[Tensor | None], main_grad: Tensor | None, keywords: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs, (options, flags, ranks) = _inputs(args), split(keywords)
    saved = dict(zip(_SAVED, args[_INPUT_COUNT:]))
    shard = saved.pop("draws")
    assert shard is not None
    found = _passes.backward(*Shard.unpacked(shard), inputs, saved, main_grad, options, flags, ranks)
    return _all(_c.BACKWARD, found, inputs, options, flags, ranks)  # type: ignore[no-any-return]


@backward.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    return _fake(_c.BACKWARD, args, keywords)  # type: ignore[no-any-return]


@backward_into.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    return _fake(_c.BACKWARD, args, keywords, keeps_weight=True)  # type: ignore[no-any-return]


# ---- forward_backward


@torch.library.custom_op(
    "logitless::group_forward_backward",
    mutates_args=(),
    schema=f"({INPUTS}, *, {OPTIONS}, {RANKS}) -> ({_LOSSES}, {_DRAW_STATS}, {_GRADIENTS})",
)
def forward_backward(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    inputs, (options, flags, ranks) = _inputs(args), split(keywords)
    found, _, _ = _passes.forward(_c.FORWARD_BACKWARD, inputs, None, options, flags, ranks)
    return _all(_c.FORWARD_BACKWARD, found, inputs, options, flags, ranks)  # type: ignore[no-any-return]


@forward_backward.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    return _fake(_c.FORWARD_BACKWARD, args, keywords)  # type: ignore[no-any-return]


def _save_forward_backward(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]
) -> None:
    wants = unpacked(keyword_only_inputs["flags"]).wants()
    gradients = [gradient if wanted else None for gradient, wanted in zip(output[-len(GRADIENTS) :], wants)]
    given = _inputs(inputs)
    _autograd.save_gradients(ctx, given.scale, given.temperature, gradients)
    ctx.mark_non_differentiable(*output[1:])


def _backward_of_forward_backward(ctx: Any, loss: Any, *_: Any) -> tuple[Any, ...]:
    return _of_inputs(_autograd.backward_of_forward_backward(ctx, loss))


forward_backward.register_autograd(_backward_of_forward_backward, setup_context=_save_forward_backward)
