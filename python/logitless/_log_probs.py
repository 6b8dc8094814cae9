"""``logitless.linear_log_probs`` for PyTorch tensors.

Its gradient is that of a loss whose targets are the ids, weighted by the upstream gradients: sum_k q_k (lse - z_k) with
q = -upstream. So its backward pass is the operator ``backward``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _arguments, _checks, _flops, _numbers, _options, _stats
from ._arguments import Arguments, Number
from ._autograd import as_learned, refuse_double_backward, save_learned
from ._dispatch import grad_mode
from ._flags import Flags, Wants, unpacked
from ._ops import INPUT_COUNT, INPUTS, OPTIONS
from ._run_once import run_once
from ._torch import Inputs, readable, resolved, stats_dtype


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = -100,
    scale: Number = 1.0,
    softcap: Number | None = None,
    temperature: Number = 1.0,
    max_workspace_bytes: int | str | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Log-probabilities of given ids under ``softmax(input @ linear_weight.T)``, without ever holding the logits.

    Logits are those of :func:`linear_cross_entropy`, and so is what its options mean.

    Args:
        input: hidden states, ``[..., D]``.
        linear_weight: the head's weight, ``[V, D]``.
        ids: int64 or int32, ``[..., K]`` with K <= 64; the same one may come several times in a row.
        linear_bias: ``[V]``.
        ignore_index: an id that is none: its log-probability is 0 and has no gradient. A row of such ids alone costs
            nothing. None means -100.
        scale: factor of the logits before bias and softcap; of one element that requires grad it has a gradient.
        softcap: bound of the logits; None or 0 for none.
        temperature: what the logits are divided by, after the softcap: a number, a tensor of one element, which may be
            learned as ``scale`` may (without a softcap only), or a tensor of ``input.shape[:-1]``, which is a constant.
        max_workspace_bytes: hard bound of memory beyond inputs, outputs and gradients, for each pass; as in
            :func:`linear_cross_entropy`.
        batch_invariant: as in :func:`linear_cross_entropy`.

    Returns:
        ``[..., K]``, float32 (float64 for float64 inputs). Differentiable with respect to input, linear_weight,
        linear_bias, and a learned scale or temperature.

    Raises:
        TypeError, ValueError, BudgetTooSmallError, NotImplementedError: as :func:`linear_cross_entropy` does;
            ``InvalidTargetError`` for an id outside ``[0, V)`` on the CPU (on CUDA its row's log-probabilities are NaN,
            and the row has no gradient).

    Work, in units of one product of input and weight: 1, and 3 in the backward pass.
    """
    _checks.check_tensor("input", input)
    row_temperature, temperature = _arguments.temperatures(temperature, input.shape[:-1])
    _checks.check_tensor("ids", ids)
    if ids.dim() != input.dim():
        raise ValueError(
            f"ids: expected shape {_options.shape_text((*input.shape[:-1], 'K'))}, got {_options.shape_text(ids.shape)}"
        )
    _options.check_targets_shape("ids", ids.shape, input.shape[:-1], True)
    _checks.check_integers("ids", ids)
    a = Arguments(
        input,
        linear_weight,
        ids,
        linear_bias,
        row_temperature=row_temperature,
        target_weight=torch.ones_like(ids),
        reduction="sum",
        ignore_index=ignore_index,
        scale=scale,
        softcap=softcap,
        temperature=temperature,
        max_workspace_bytes=max_workspace_bytes,
        batch_invariant=batch_invariant,
    )
    _arguments.check_head(a)
    a = _arguments.autocast(a)
    _arguments.check_rest(a)
    learned = _arguments.learned(a)
    a = _arguments.without_number_tensors(a)
    options, numbers = _numbers.split(_arguments.options_of(a), False)
    grad = grad_mode()
    tensors = (a.input, a.linear_weight, a.linear_bias, *learned)
    wants = Wants(*(grad and t is not None and t.requires_grad for t in tensors))
    inputs = _arguments.inputs_of(a, learned.wanted(wants))
    if numbers is not None:
        inputs = inputs._replace(numbers=numbers)
    found: Tensor = _log_probs(*inputs, **options, flags=Flags().with_gradients(wants).packed())[0]
    return found.reshape(ids.shape)


def _shapes(inputs: Inputs) -> tuple[tuple[int, ...], ...]:
    rows, count = inputs.hidden.shape[0], inputs.target.shape[-1]
    return (rows, count), (rows,), (rows,)


@torch.library.custom_op(
    "logitless::log_probs",
    mutates_args=(),
    schema=f"({INPUTS}, *, {OPTIONS}) -> (Tensor log_probs, Tensor lse, Tensor lse_low)",
)
def _log_probs(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    inputs, options = _split(args, keywords)
    options = resolved(inputs, options)
    tensors = readable(inputs, options["num_items"])
    stats, device = stats_dtype(inputs.hidden), inputs.hidden.device
    found = [torch.empty(shape, dtype=stats, device=device) for shape in _shapes(inputs)]
    flags = unpacked(keywords["flags"])
    run_once(tensors, options, dict(zip(("target_log_probs", "lse", "lse_low"), found)), "ids", flags)
    return tuple(found)


@_log_probs.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    inputs, _ = _split(args, keywords)
    return tuple(inputs.hidden.new_empty(shape, dtype=stats_dtype(inputs.hidden)) for shape in _shapes(inputs))


def _split(args: Sequence[Any], keywords: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
    options = dict(keywords)
    del options["flags"]
    return Inputs(*args[:INPUT_COUNT]), options


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    given, ctx.options = _split(inputs, keyword_only_inputs)
    _, lse, lse_low = output
    save_learned(ctx, given.scale, given.temperature)
    ctx.save_for_backward(*given, lse, lse_low)
    ctx.mark_non_differentiable(lse, lse_low)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
    refuse_double_backward("linear_log_probs")
    *tensors, lse, lse_low = ctx.saved_tensors
    inputs = Inputs(*tensors)
    needs = Inputs(*ctx.needs_input_grad[:INPUT_COUNT])
    wants = Wants(*(getattr(needs, name) for name in Wants._fields))
    if upstream is None or not any(wants):
        return (None,) * INPUT_COUNT
    inputs = inputs._replace(target_weight=-upstream.to(lse.dtype))
    saved = {"lse": lse, "lse_low": lse_low, "entropy": None, "draws": None, "grad_loss": lse.new_ones(())}
    saved |= dict.fromkeys(_stats.GRADIENTS)
    found = torch.ops.logitless.backward(*inputs, *saved.values(), **ctx.options, flags=Flags(*wants).packed())
    gradients = [gradient if wanted else None for gradient, wanted in zip(found, wants)]
    gradients = [*gradients[:3], *as_learned(ctx, gradients[3:])]
    by_name = dict(zip(Wants._fields, gradients))
    return tuple(by_name.get(name) for name in Inputs._fields)


_log_probs.register_autograd(_backward, setup_context=_save)
_flops.register_forward(torch.ops.logitless.log_probs)
