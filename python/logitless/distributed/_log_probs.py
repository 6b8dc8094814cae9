"""``logitless.distributed.linear_log_probs``; as ``.._log_probs``, for a rank's shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _arguments, _c, _checks, _flops, _numbers, _options, _stats
from .._arguments import Arguments, Number, temperatures
from .._autograd import as_learned, refuse_double_backward, save_learned
from .._dispatch import grad_mode
from .._flags import Flags, Wants
from .._log_probs import linear_log_probs as of_whole_vocabulary
from .._ops import INPUT_COUNT, INPUTS, OPTIONS
from .._torch import Inputs, stats_dtype
from . import _passes
from ._agreement import Shard
from ._checked import check_sequence_parallel, checked_group, is_whole_head, ranks_of, refused_for_all, rows_of
from ._ops import RANKS, split
from ._run import Asks


def linear_log_probs(
    input: Tensor,
    weight_shard: Tensor,
    ids: Tensor,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_total: int | None = None,
    sequence_parallel: bool = False,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = -100,
    scale: Number = 1.0,
    softcap: Number | None = None,
    temperature: Number = 1.0,
    max_workspace_bytes: int | str | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """:func:`logitless.linear_log_probs` of a head whose rows are spread over the ranks of a group.

    Every rank of the group calls it at the same time, with the same options, and gets all log-probabilities, with the
    same bits. Gradients are as those of :func:`logitless.distributed.linear_cross_entropy`: the upstream gradients must
    be the same on every rank.

    Args:
        input, weight_shard, group, vocab_start, vocab_total, sequence_parallel, linear_bias: as those of
            :func:`logitless.distributed.linear_cross_entropy`.
        ids: classes of the whole vocabulary, ``[..., K]`` with K <= 64, the same on every rank; with
            ``sequence_parallel`` of all tokens or of this rank's, told by its shape, as is a temperature for each row.

    Returns:
        ``[..., K]``, of all tokens.

    Raises:
        As :func:`logitless.distributed.linear_cross_entropy`.
    """
    group = checked_group(group)
    shared: dict[str, Any] = dict(
        linear_bias=linear_bias, ignore_index=ignore_index, scale=scale, softcap=softcap, temperature=temperature,
        max_workspace_bytes=max_workspace_bytes, batch_invariant=batch_invariant,
    )  # fmt: skip
    if is_whole_head(dist.get_world_size(group), weight_shard, vocab_start, vocab_total):
        return of_whole_vocabulary(input, weight_shard, ids, **shared)
    with refused_for_all(group):
        _checks.check_tensor("ids", ids)
        row_temperature, shared["temperature"] = temperatures(temperature, ids.shape[:-1])
        a = Arguments(input, weight_shard, ids, reduction="sum", row_temperature=row_temperature, **shared)
        call = _Call(a, group, vocab_start, vocab_total, sequence_parallel)
    return call()


class _Call:
    """What one call asks of its operator; made without a word to the other ranks."""

    def __init__(
        self, a: Arguments, group: Any, vocab_start: int | None, vocab_total: int | None, sequence_parallel: bool
    ) -> None:
        _checks.check_tensor("input", a.input)
        if a.target.dim() != a.input.dim():
            expected = _options.shape_text((*a.input.shape[:-1], "K"))
            raise ValueError(f"ids: expected shape {expected}, got {_options.shape_text(a.target.shape)}")
        _checks.check_integers("ids", a.target)
        a = a._replace(target_weight=torch.ones_like(a.target))
        _checks.check_operands(a.input, a.linear_weight, a.linear_bias, a.target, least_vocab=0)
        check_sequence_parallel(a.input, sequence_parallel)
        self.rows, own_ids = rows_of(a, dist.get_world_size(group), sequence_parallel, "ids")
        a = _arguments.autocast(a)
        _arguments.check_rest(a, a.input.shape[:-1] if own_ids else self.rows)
        learned = _arguments.learned(a)
        a = _arguments.without_number_tensors(a)
        options, numbers = _numbers.split(_arguments.options_of(a), False)
        grad = grad_mode()
        tensors = (a.input, a.linear_weight, a.linear_bias, *learned)
        wants = Wants(*(grad and t is not None and t.requires_grad for t in tensors))
        inputs = _arguments.inputs_of(a, learned.wanted(wants))
        self.inputs = inputs if numbers is None else inputs._replace(numbers=numbers)
        ranks = ranks_of(group, vocab_start, vocab_total, sequence_parallel, own_ids)
        flags = Flags(stats=("lse",)).with_gradients(wants)
        self.keywords = options | ranks._asdict() | {"flags": flags.packed()}
        self.count = int(a.target.shape[-1])

    def __call__(self) -> Tensor:
        found: Tensor = _log_probs(*self.inputs, **self.keywords)[0]
        return found.reshape((*self.rows, self.count))


@torch.library.custom_op(
    "logitless::group_log_probs",
    mutates_args=(),
    schema=f"({INPUTS}, *, {OPTIONS}, {RANKS}) -> (Tensor log_probs, Tensor lse, Tensor lse_low, Tensor shard)",
)
def _log_probs(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    inputs, (options, flags, ranks) = _inputs(args), split(keywords)
    asks = Asks("linear_log_probs", "ids", ("target_log_probs",), int(inputs.target.shape[-1]))
    found, shard, _ = _passes.forward(_c.FORWARD, inputs, None, options, flags, ranks, asks)
    return found["target_log_probs"], found["lse"], found["lse_low"], shard.packed()


@_log_probs.register_fake
def _(*args: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    inputs, (_, _, ranks) = _inputs(args), split(keywords)
    rows, stats = ranks.tokens(inputs), stats_dtype(inputs.hidden)
    shapes: tuple[tuple[int, ...], ...] = ((rows, inputs.target.shape[-1]), (rows,), (rows,))
    return *(inputs.hidden.new_empty(shape, dtype=stats) for shape in shapes), Shard.fake()


def _inputs(args: Sequence[Any]) -> Inputs:
    return Inputs(*args[:INPUT_COUNT])


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    given = _inputs(inputs)
    ctx.options = {name: value for name, value in keyword_only_inputs.items() if name != "flags"}
    save_learned(ctx, given.scale, given.temperature)
    ctx.save_for_backward(*given, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
    refuse_double_backward("linear_log_probs")
    *tensors, lse, lse_low, shard = ctx.saved_tensors
    needs = _inputs(ctx.needs_input_grad)
    wants = Wants(*(getattr(needs, name) for name in Wants._fields))
    if upstream is None or not any(wants):
        return (None,) * INPUT_COUNT
    inputs = Inputs(*tensors)._replace(target_weight=-upstream.to(lse.dtype))
    saved = {"lse": lse, "lse_low": lse_low, "entropy": None, "draws": shard, "grad_loss": lse.new_ones(())}
    saved |= dict.fromkeys(_stats.GRADIENTS)
    found = torch.ops.logitless.group_backward(*inputs, *saved.values(), **ctx.options, flags=Flags(*wants).packed())
    gradients = [gradient if wanted else None for gradient, wanted in zip(found, wants)]
    by_name = dict(zip(Wants._fields, [*gradients[:3], *as_learned(ctx, gradients[3:])]))
    return tuple(by_name.get(name) for name in Inputs._fields)


_log_probs.register_autograd(_backward, setup_context=_save)
_flops.register_forward(torch.ops.logitless.group_log_probs)
