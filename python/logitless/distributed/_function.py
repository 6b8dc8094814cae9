"""``logitless.distributed.linear_cross_entropy``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _arguments, _c, _checks, _numbers, _options, _stats
from .._arguments import Arguments, Number, Seed, temperatures
from .._dispatch import choose, pass_over_draw, with_seed
from .._options import shape_text
from .._torch import RESULTS
from ..errors import UnsupportedError
from ..functional import LinearCrossEntropyOutput, collect
from ..functional import linear_cross_entropy as of_whole_vocabulary
from . import _ops
from ._checked import check_sequence_parallel, checked_group, is_whole_head, ranks_of, refused_for_all, rows_of


def linear_cross_entropy(
    input: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_total: int | None = None,
    sequence_parallel: bool = False,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: Number = 0.0,
    scale: Number = 1.0,
    softcap: Number | None = None,
    temperature: Number = 1.0,
    z_loss: Number = 0.0,
    token_weight: Tensor | None = None,
    target_weight: Tensor | None = None,
    num_items: Number | None = None,
    shift: int = 0,
    max_workspace_bytes: int | str | None = None,
    main_grad: Tensor | None = None,
    return_stats: bool | Sequence[str] = False,
    differentiable_stats: bool = True,
    gradient: str = "exact",
    threshold: Number = _options.DEFAULT_THRESHOLD,
    seed: Seed = None,
    batch_invariant: bool = False,
) -> Tensor | LinearCrossEntropyOutput:
    """:func:`logitless.linear_cross_entropy` of a head whose rows are spread over the ranks of a group.

    Every rank of the group calls it at the same time, with the same options. The loss and the statistics are those of
    the whole vocabulary, with the same bits on every rank. The gradient of ``input`` is the sum over ranks, on every
    rank; those of ``weight_shard`` and ``linear_bias`` are of the rank's own rows.

    Args:
        input: ``[..., D]``, the same on every rank. With ``sequence_parallel`` this rank's part of it along the first
            dimension, as large as any other rank's.
        weight_shard: this rank's rows of the head's weight, ``[V_r, D]``, of any number, 0 too.
        target: class indices of the whole vocabulary, of shape ``input.shape[:-1]``, the same on every rank. With
            ``sequence_parallel`` of all tokens, as one rank's ``input`` would need them, or of this rank's tokens: told
            by its shape. ``token_weight`` and a temperature for each row have the target's shape. With
            ``target_weight``, which has its shape, it has one more dimension of K targets a row.
        group: a ``torch.distributed`` process group; None: the default one.
        vocab_start: the class of the shard's first row; None: shards lie in the order of ranks.
        vocab_total: classes of all ranks, to be checked; None: as many as the shards have.
        sequence_parallel: ``input`` is gathered along its first dimension, and its gradient is that of this rank's
            part (a reduce-scatter). It is gathered again in a backward pass that comes later (below).
        linear_bias: the shard's, ``[V_r]``.
        weight: class weights of the whole vocabulary, the same on every rank.
        main_grad: a buffer of the shard's shape.
        seed: of thinned gradients. On CPUs the same seed keeps the same elements for any cut of the vocabulary. A
            number must be the same on every rank there, and of None and of generators rank 0's is taken. On CUDA the
            elements that are kept depend on the cut, and each rank draws from its own seed.
        batch_invariant: True: for one cut of the vocabulary a row has the same bits in any batch, as on one device.

    All other arguments, results and costs are those of :func:`logitless.linear_cross_entropy`. Per-token results are of
    all tokens. ``max_workspace_bytes`` must fit a backward pass that comes later, too, or the forward pass is refused.

    Hosts compare shapes, dtypes, options and where shards lie before every call. Where one differs, all of them raise;
    docs/parallel.md has what is noticed on which device.

    Raises:
        InvalidArgumentError: ranks that differ, by the name of what differs; shards that do not make a vocabulary.
        UnsupportedError: the statistics of a draw.
        CommunicationError: a collective failed.
        And what :func:`logitless.linear_cross_entropy` raises.
    """
    group = checked_group(group)
    if is_whole_head(dist.get_world_size(group), weight_shard, vocab_start, vocab_total):
        options = dict(
            linear_bias=linear_bias, weight=weight, reduction=reduction, ignore_index=ignore_index,
            label_smoothing=label_smoothing, scale=scale, softcap=softcap, temperature=temperature, z_loss=z_loss,
            token_weight=token_weight, target_weight=target_weight, num_items=num_items, shift=shift,
            max_workspace_bytes=max_workspace_bytes, main_grad=main_grad, return_stats=return_stats,
            differentiable_stats=differentiable_stats, gradient=gradient, threshold=threshold, seed=seed,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        return of_whole_vocabulary(input, weight_shard, target, **options)  # type: ignore[no-any-return, call-overload]
    rows = getattr(target, "shape", ())
    if target_weight is not None and len(rows) == len(getattr(input, "shape", ())):
        rows = rows[:-1]
    row_temperature, temperature = temperatures(temperature, rows)
    arguments = Arguments(
        input,
        weight_shard,
        target,
        linear_bias,
        weight,
        token_weight,
        row_temperature,
        target_weight,
        main_grad,
        num_items,
        seed,
        reduction,
        ignore_index,
        label_smoothing,
        scale,
        softcap,
        temperature,
        z_loss,
        shift,
        max_workspace_bytes,
        return_stats,
        differentiable_stats,
        gradient,
        threshold,
        batch_invariant,
    )
    with refused_for_all(group):
        call = _Call(arguments, group, vocab_start, vocab_total, sequence_parallel)
    return call()


class _Call:
    """What one call asks of its operator; made without a word to the other ranks."""

    def __init__(
        self,
        a: Arguments,
        group: Any,
        vocab_start: int | None,
        vocab_total: int | None,
        sequence_parallel: bool,
    ) -> None:
        _checks.check_operands(a.input, a.linear_weight, a.linear_bias, a.target, least_vocab=0)
        check_sequence_parallel(a.input, sequence_parallel)
        self.rows, own_targets = rows_of(a, dist.get_world_size(group), sequence_parallel, "target")
        several = a.has_several_targets()
        a = _arguments.autocast(a)
        _arguments.check_rest(a._replace(weight=None), a.input.shape[:-1] if own_targets else self.rows)
        if a.weight is not None:
            if several:
                _options.check_several_targets(a.weight, a.gradient)
            _check_class_weight(a.weight, a.input)
        learned = _arguments.learned(a)
        self.names = _stats_names(a, several)
        a = _arguments.without_number_tensors(a)
        options = _arguments.options_of(a)
        options["sequence_length"] = self.rows[-1] if self.rows else 1
        choice = choose(a, learned, self.names)
        inputs = _arguments.inputs_of(a, learned.wanted(choice.trained))
        if choice.draws:
            inputs = with_seed(a, inputs)
        elif choice.passes_over_draw:
            pass_over_draw(a)
        options, numbers = _numbers.split(options, False)
        self.inputs = inputs if numbers is None else inputs._replace(numbers=numbers)
        self.pass_, self.reduction, self.main_grad = choice.pass_, a.reduction, a.main_grad
        self.return_stats, self.differentiable = a.return_stats, a.differentiable_stats
        ranks = ranks_of(group, vocab_start, vocab_total, sequence_parallel, own_targets)
        ranks = ranks._replace(seed_given=not (a.seed is None or isinstance(a.seed, torch.Generator)))
        # Draws are not kept: a backward pass makes them again, from the same seed.
        flags = choice.flags._replace(keeps_draws=False).packed()
        self.keywords = options | ranks._asdict() | {"flags": flags}

    def __call__(self) -> Tensor | LinearCrossEntropyOutput:
        if self.pass_ == _c.FORWARD_BACKWARD:
            output = _ops.forward_backward(*self.inputs, **self.keywords)
        else:
            output = _ops.forward(*self.inputs, self.main_grad, **self.keywords)
        found = dict(zip(RESULTS[self.pass_], output))
        loss = found["loss"]
        if self.reduction == "none" and len(self.rows) != 1:
            loss = loss.reshape(self.rows)
        if self.return_stats is False:
            return loss  # type: ignore[no-any-return]
        return collect(loss, found, self.rows, self.names, self.differentiable)


def _stats_names(a: Arguments, several: bool) -> tuple[str, ...]:
    names = _options.stats_names(a.return_stats, a.gradient, several)
    for name in names:
        if name in _stats.DRAW_STATS:
            raise UnsupportedError(f"return_stats: expected no {name} in a group of ranks, got it")
    return names


def _check_class_weight(weight: Tensor, input: Tensor) -> None:
    _checks.check_tensor("weight", weight)
    _checks.check_real("weight", weight)
    if weight.dim() != 1:
        raise ValueError(f"weight: expected shape [V] of the whole vocabulary, got {shape_text(weight.shape)}")
    _checks.check_constant("weight", weight, "class weights have no gradient")
    _checks.check_devices(input.device, {"weight": weight})
