"""``logitless.linear_top_k`` for PyTorch tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _arguments, _checks, _flops, _numbers, _options
from ._arguments import Arguments, Learned, Number
from ._flags import Flags
from ._ops import INPUT_COUNT, INPUTS, OPTIONS
from ._run_once import run_once
from ._torch import Inputs, readable, resolved, stats_dtype


class LinearTopK(NamedTuple):
    """The largest logits of each row, in descending order."""

    ids: Tensor  # int64
    log_probs: Tensor  # float32, or float64 for float64 inputs


def linear_top_k(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    scale: Number = 1.0,
    softcap: Number | None = None,
    temperature: Number = 1.0,
    max_workspace_bytes: int | str | None = None,
) -> LinearTopK:
    """The k largest logits of each row of ``input @ linear_weight.T``, without ever holding all of them.

    Logits are those of :func:`linear_cross_entropy`, and so is what its options mean. The log-probability of a column
    is its logit less the log of the sum of the exponentials of all logits of the row.

    Args:
        input: hidden states, ``[..., D]``.
        linear_weight: the head's weight, ``[V, D]``.
        k: how many, from 1 to the smaller one of 64 and V.
        linear_bias: ``[V]``.
        scale: factor of the logits before bias and softcap.
        softcap: bound of the logits; None or 0 for none.
        temperature: what the logits are divided by, after the softcap: a number, or a tensor of one element or of
            ``input.shape[:-1]``.
        max_workspace_bytes: hard bound of memory beyond inputs and outputs, as in :func:`linear_cross_entropy`.

    Returns:
        ``ids`` and ``log_probs`` of shape ``[..., k]``, in descending order of the logits: of equals the smaller id is
        first, and a NaN comes before all numbers, so that the first one is the argmax. They have no gradient.

    Raises:
        TypeError, ValueError, BudgetTooSmallError: as :func:`linear_cross_entropy` does.
    """
    _checks.check_tensor("input", input)
    row_temperature, temperature = _arguments.temperatures(temperature, input.shape[:-1])
    a = Arguments(
        input.detach(),
        linear_weight,
        torch.zeros(input.shape[:-1], dtype=torch.int64, device=input.device),  # that no row is ignored
        linear_bias,
        row_temperature=row_temperature,
        reduction="none",
        scale=scale,
        softcap=softcap,
        temperature=temperature,
        max_workspace_bytes=max_workspace_bytes,
    )
    a = _arguments.without_number_tensors(a)
    _arguments.check_head(a)
    k = _options.checked_k(k, linear_weight.shape[0])
    a = _arguments.autocast(a)
    _arguments.check_rest(a)
    options, numbers = _numbers.split(_arguments.options_of(a), False)
    inputs = _arguments.inputs_of(a, Learned(None, None))._replace(numbers=numbers)
    constants = [None if tensor is None else tensor.detach() for tensor in inputs]
    ids, log_probs = _top_k(*constants, k, **options, flags=Flags().packed())
    shape = (*a.rows(), k)
    return LinearTopK(ids.reshape(shape), log_probs.reshape(shape))


def _empty(hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (hidden.shape[0], k)
    return hidden.new_empty(shape, dtype=torch.int64), hidden.new_empty(shape, dtype=stats_dtype(hidden))


@torch.library.custom_op(
    "logitless::top_k",
    mutates_args=(),
    schema=f"({INPUTS}, int k, *, {OPTIONS}) -> (Tensor ids, Tensor log_probs)",
)
def _top_k(*args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    inputs, k = Inputs(*args[:INPUT_COUNT]), args[INPUT_COUNT]
    options = resolved(inputs, {name: value for name, value in keywords.items() if name != "flags"})
    ids, log_probs = _empty(inputs.hidden, k)
    run_once(readable(inputs, None), options, {"top_ids": ids, "top_log_probs": log_probs}, "target", top_k=k)
    return ids, log_probs


@_top_k.register_fake
def _(*args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    return _empty(args[0], args[INPUT_COUNT])


_flops.register_forward(torch.ops.logitless.top_k)
