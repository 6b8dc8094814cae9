"""``headroom.distributed.linear_cross_entropy``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _arguments, _c, _checks, _numbers, _options
from .._arguments import Arguments, Number, Seed, temperatures
from .._dispatch import choose
from .._options import shape_text
from .._torch import RESULTS
from ..errors import InvalidArgumentError, UnsupportedError
from ..functional import LinearCrossEntropyOutput, collect
from ..functional import linear_cross_entropy as of_whole_vocabulary
from . import _agreement, _ops
from ._passes import Ranks


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
    num_items: Number | None = None,
    shift: int = 0,
    max_workspace_bytes: int | None = None,
    main_grad: Tensor | None = None,
    return_stats: bool | Sequence[str] = False,
    differentiable_stats: bool = True,
    gradient: str = "exact",
    threshold: Number = _options.DEFAULT_THRESHOLD,
    seed: Seed = None,
    batch_invariant: bool = False,
) -> Tensor | LinearCrossEntropyOutput:
    """:func:`headroom.linear_cross_entropy` of a head whose rows are spread over the ranks of a group.

    Every rank of the group calls it at the same time, with the same options. The loss and the statistics are those of
    the whole vocabulary, with the same bits on every rank. The gradient of ``input`` is the sum over ranks, on every
    rank; those of ``weight_shard`` and ``linear_bias`` are of the rank's own rows.

    Args:
        input: ``[..., D]``, the same on every rank. With ``sequence_parallel`` this rank's part of it along the first
            dimension, as large as any other rank's.
        weight_shard: this rank's rows of the head's weight, ``[V_r, D]``, of any number, 0 too.
        target: class indices of the whole vocabulary, of shape ``input.shape[:-1]``, the same on every rank. With
            ``sequence_parallel`` of all tokens, as one rank's ``input`` would need them, or of this rank's tokens: told
            by its shape. ``token_weight`` and a temperature for each row have the target's shape.
        group: a ``torch.distributed`` process group; None: the default one.
        vocab_start: the class of the shard's first row; None: shards lie in the order of ranks.
        vocab_total: classes of all ranks, to be checked; None: as many as the shards have.
        sequence_parallel: ``input`` is gathered along its first dimension, and its gradient is that of this rank's
            part (a reduce-scatter). It is gathered again in a backward pass that comes later (below).
        linear_bias: the shard's, ``[V_r]``.
        weight: class weights of the whole vocabulary, the same on every rank.
        main_grad: a buffer of the shard's shape.

    All other arguments, results and costs are those of :func:`headroom.linear_cross_entropy`. Per-token results are of
    all tokens. ``max_workspace_bytes`` must fit a backward pass that comes later, too, or the forward pass is refused.

    A configuration (shapes, dtypes and options) that is new is compared by all ranks. Where one differs, all of them
    raise; docs/parallel.md has what is noticed on which device.

    Raises:
        InvalidArgumentError: ranks that differ, by the name of what differs; shards that do not make a vocabulary.
        NotImplementedError: thinned gradients, ``batch_invariant`` and several targets a row.
        CommunicationError: a collective failed.
        And what :func:`headroom.linear_cross_entropy` raises.
    """
    group = _checked_group(group)
    ranks = dist.get_world_size(group)
    if ranks == 1 and vocab_start in (None, 0) and vocab_total in (None, weight_shard.shape[0]):
        options = dict(
            linear_bias=linear_bias, weight=weight, reduction=reduction, ignore_index=ignore_index,
            label_smoothing=label_smoothing, scale=scale, softcap=softcap, temperature=temperature, z_loss=z_loss,
            token_weight=token_weight, num_items=num_items, shift=shift, max_workspace_bytes=max_workspace_bytes,
            main_grad=main_grad, return_stats=return_stats, differentiable_stats=differentiable_stats,
            gradient=gradient, threshold=threshold, seed=seed, batch_invariant=batch_invariant,
        )  # fmt: skip
        return of_whole_vocabulary(input, weight_shard, target, **options)  # type: ignore[no-any-return, call-overload]
    row_temperature, temperature = temperatures(temperature, getattr(target, "shape", ()))
    arguments = Arguments(
        input,
        weight_shard,
        target,
        linear_bias,
        weight,
        token_weight,
        row_temperature,
        None,  # target_weight
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
    place = (group.group_name, ranks, vocab_start, vocab_total, sequence_parallel)
    if torch.compiler.is_compiling():
        return _Call(arguments, *place)()
    try:
        call = _Call(arguments, *place)
    except Exception as error:
        _agreement.refuse(group, getattr(input, "device", torch.device("cpu")), error)
        raise
    return call()


def _checked_group(group: Any) -> Any:
    if group is None:
        group = dist.group.WORLD
    if group is None:
        raise ValueError("group: expected a process group, got None before torch.distributed.init_process_group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup, got {type(group).__name__}")
    return group


def _classes(name: str, value: Any) -> int:
    """As the operators take it: -1 for None."""
    if value is None:
        return -1
    found = _options.integer(name, value)
    if found < 0:
        raise InvalidArgumentError(f"{name}: expected a number of classes or None, got {found}")
    return found


class _Call:
    """What one call asks of its operator; made without a word to the other ranks."""

    def __init__(
        self,
        a: Arguments,
        group_name: str,
        group_size: int,
        vocab_start: int | None,
        vocab_total: int | None,
        sequence_parallel: bool,
    ) -> None:
        if not isinstance(sequence_parallel, bool):
            raise TypeError(f"sequence_parallel: expected a bool, got {type(sequence_parallel).__name__}")
        _refuse_unsupported(a)
        _checks.check_operands(a.input, a.linear_weight, a.linear_bias, a.target, least_vocab=0)
        self.rows = _rows_of_all(a, group_size, sequence_parallel)
        a = _arguments.autocast(a)
        own_targets = sequence_parallel and a.target.shape == a.input.shape[:-1] and group_size > 1
        _arguments.check_rest(a._replace(weight=None), a.target.shape)
        if a.weight is not None:
            _check_class_weight(a.weight, a.input)
        learned = _arguments.learned(a)
        self.names = _options.stats_names(a.return_stats, a.gradient)
        a = _arguments.without_number_tensors(a)
        options = _arguments.options_of(a)
        options["sequence_length"] = self.rows[-1] if self.rows else 1
        choice = choose(a, learned, self.names)
        inputs = _arguments.inputs_of(a, learned.wanted(choice.trained))
        options, numbers = _numbers.split(options, False)
        self.inputs = inputs if numbers is None else inputs._replace(numbers=numbers)
        self.pass_, self.reduction, self.main_grad = choice.pass_, a.reduction, a.main_grad
        self.return_stats, self.differentiable = a.return_stats, a.differentiable_stats
        ranks = Ranks(
            group_name,
            group_size,
            _classes("vocab_start", vocab_start),
            _classes("vocab_total", vocab_total),
            sequence_parallel,
            own_targets,
        )
        # Of a forward pass the gradients to come, too, which the ranks plan before it.
        flags = choice.flags.with_gradients(choice.trained).packed()
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


def _refuse_unsupported(a: Arguments) -> None:
    _options.check_gradient(a.gradient)
    if a.gradient != "exact":
        raise NotImplementedError(f'gradient: expected "exact" in a group of ranks, got "{a.gradient}"')
    if a.batch_invariant:
        raise NotImplementedError("batch_invariant: expected False in a group of ranks, got True")


def _rows_of_all(a: Arguments, ranks: int, sequence_parallel: bool) -> tuple[int, ...]:
    """The shape of the targets of all tokens."""
    own = tuple(a.input.shape[:-1])
    if a.has_several_targets():
        raise UnsupportedError(
            f"target: expected one for each row in a group of ranks, got shape {shape_text(a.target.shape)}"
        )
    if not sequence_parallel:
        _checks.check_shape("target", a.target, own, "that of input without its last dimension")
        return own
    if not own:
        raise ValueError(f"input: expected shape [tokens, ..., D] with sequence_parallel, got {shape_text(own)}")
    every = (ranks * own[0], *own[1:])
    if tuple(a.target.shape) not in (own, every):
        raise ValueError(
            f"target: expected shape {shape_text(every)} (all ranks' tokens) or {shape_text(own)} (this rank's) with "
            f"sequence_parallel, got {shape_text(a.target.shape)}"
        )
    return every


def _check_class_weight(weight: Tensor, input: Tensor) -> None:
    _checks.check_tensor("weight", weight)
    _checks.check_real("weight", weight)
    if weight.dim() != 1:
        raise ValueError(f"weight: expected shape [V] of the whole vocabulary, got {shape_text(weight.shape)}")
    _checks.check_constant("weight", weight, "class weights have no gradient")
    _checks.check_devices(input.device, {"weight": weight})
