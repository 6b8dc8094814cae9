"""The functions of ``logitless.distributed``: those of heads, and ``next_labels`` for context parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import options as _options
from ..call import (
    Arguments,
    CallOf,
    Prepared,
    Ranks,
    check_operands,
    check_tensor,
    ids_of,
    prepare,
    tokens_of,
    with_row_temperature,
)
from ..errors import InvalidArgumentError
from ..options import HeadOptions, IdOptions, TopKOptions, accepts, shape_text
from ..outputs import LinearCrossEntropyOutput, LinearTopK, log_probs, log_probs_of, loss, loss_of, top_k, top_k_of
from . import _agreement
from . import _passes as _passes  # the passes of groups are known from here on
from ._channel import all_gather

if TYPE_CHECKING:
    from typing_extensions import Unpack


@accepts(HeadOptions)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_total: int | None = None,
    sequence_parallel: bool = False,
    return_stats: bool | Sequence[str] = False,
    **options: Unpack[HeadOptions],
) -> Tensor | LinearCrossEntropyOutput:
    """:func:`logitless.linear_cross_entropy` of a head whose rows are spread over the ranks of a group.

    Every rank of the group calls it at the same time, with the same options. The loss and the statistics are those of
    the whole vocabulary, with the same bits on every rank. The gradient of ``hidden`` is the sum over ranks, on every
    rank; those of ``weight`` and ``bias`` are of the rank's own rows.

    Args:
        hidden: ``[..., D]``, the same on every rank. With ``sequence_parallel`` this rank's part of it along the first
            dimension, as large as any other rank's.
        weight: this rank's rows of the head's weight, ``[V_r, D]``, of any number, 0 too.
        targets: class indices of the whole vocabulary, of shape ``hidden.shape[:-1]``, the same on every rank. With
            ``sequence_parallel`` of all tokens, as one rank's ``hidden`` would need them, or of this rank's tokens:
            told by its shape. ``token_weight`` and a temperature for each row have the target's shape. With
            ``target_weight``, which has its shape, it has one more dimension of K targets a row.
        group: a ``torch.distributed`` process group; None: the default one.
        vocab_start: the class of the shard's first row; None: shards lie in the order of ranks.
        vocab_total: classes of all ranks, to be checked; None: as many as the shards have.
        sequence_parallel: ``hidden`` is gathered along its first dimension, and its gradient is that of this rank's
            part (a reduce-scatter). It is gathered again in a backward pass that comes later (below).
        bias: the shard's, ``[V_r]``.
        class_weight: class weights of the whole vocabulary, the same on every rank.
        main_grad: a buffer of the shard's shape.
        seed: of sparsified gradients. On CPUs the same seed keeps the same elements for any cut of the vocabulary. A
            number must be the same on every rank there, and of None and of generators rank 0's is taken. On CUDA the
            elements that are kept depend on the cut, and each rank draws from its own seed.
        batch_invariant: True: for one cut of the vocabulary a row has the same bits in any batch, as on one device.

    All other arguments, results and costs are those of :func:`logitless.linear_cross_entropy`. Per-token results are of
    all tokens. ``max_workspace_bytes`` must fit a backward pass that comes later, too, or the forward pass is refused.

    Hosts compare shapes, dtypes, options and where shards lie before every call. Where one differs, all of them raise;
    docs/distributed.md has what is noticed on which device.

    Raises:
        InvalidArgumentError: ranks that differ, by the name of what differs; shards that do not make a vocabulary.
        UnsupportedError: the statistics of a draw.
        CommunicationError: a collective failed.
        And what :func:`logitless.linear_cross_entropy` raises.
    """
    _options.check_names("linear_cross_entropy", options, _options.HEAD_OPTIONS)
    group = checked_group(group)
    a = Arguments(hidden, weight, targets, return_stats=return_stats, **options)
    return loss_of_ranks(a, group, vocab_start, vocab_total, sequence_parallel)


def loss_of_ranks(
    a: Arguments, group: Any, vocab_start: int | None, vocab_total: int | None, sequence_parallel: bool
) -> Tensor | LinearCrossEntropyOutput:
    """As linear_cross_entropy, of a checked group."""
    if is_whole_head(group, a.weight, vocab_start, vocab_total):
        return loss(with_row_temperature(a, getattr(a.hidden, "shape", ())[:-1]))
    rows = getattr(a.targets, "shape", ())
    if a.target_weight is not None and len(rows) == len(getattr(a.hidden, "shape", ())):
        rows = rows[:-1]
    a = with_row_temperature(a, rows)
    with refused_for_all(group):
        prepared, rows = _prepared(a, "linear_cross_entropy", group, vocab_start, vocab_total, sequence_parallel)
    return loss_of(prepared, rows)


@accepts(IdOptions)
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_total: int | None = None,
    sequence_parallel: bool = False,
    **options: Unpack[IdOptions],
) -> Tensor:
    """:func:`logitless.linear_log_probs` of a head whose rows are spread over the ranks of a group.

    Every rank of the group calls it at the same time, with the same options, and gets all log-probabilities, with the
    same bits. Gradients are as those of :func:`logitless.distributed.linear_cross_entropy`: the upstream gradients must
    be the same on every rank.

    Args:
        hidden, weight, group, vocab_start, vocab_total, sequence_parallel, bias: as those of
            :func:`logitless.distributed.linear_cross_entropy`.
        ids: classes of the whole vocabulary, ``[..., K]`` with K <= 64, the same on every rank; with
            ``sequence_parallel`` of all tokens or of this rank's, told by its shape, as is a temperature for each row.

    Returns:
        ``[..., K]``, of all tokens.

    Raises:
        As :func:`logitless.distributed.linear_cross_entropy`.
    """
    _options.check_names("linear_log_probs", options, _options.ID_OPTIONS)
    group = checked_group(group)
    a = Arguments(hidden, weight, ids, reduction="sum", **options)
    if is_whole_head(group, weight, vocab_start, vocab_total):
        return log_probs(a)
    with refused_for_all(group):
        check_tensor("ids", ids)
        a = with_row_temperature(ids_of(a), ids.shape[:-1])
        prepared, rows = _prepared(a, "linear_log_probs", group, vocab_start, vocab_total, sequence_parallel)
    return log_probs_of(prepared, rows)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@accepts(TopKOptions)
def linear_top_k(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_total: int | None = None,
    sequence_parallel: bool = False,
    **options: Unpack[TopKOptions],
) -> LinearTopK:
    """:func:`logitless.linear_top_k` of a head whose rows are spread over the ranks of a group.

    Every rank of the group calls it at the same time, with the same options, and gets the largest logits of the whole
    vocabulary, of all tokens, with the same bits.

    Args:
        hidden, weight, group, vocab_start, vocab_total, sequence_parallel, bias: as those of
            :func:`logitless.distributed.linear_cross_entropy`.
        k: how many, from 1 to the smaller one of 64 and the rows of all ranks' shards.
        temperature: with ``sequence_parallel`` one for each row is of all tokens, or of this rank's, told by its shape.

    Raises:
        As :func:`logitless.distributed.linear_cross_entropy`.
    """
    _options.check_names("linear_top_k", options, _options.TOP_K_OPTIONS)
    group = checked_group(group)
    a = Arguments(hidden, weight, hidden, reduction="sum", **options)
    if is_whole_head(group, weight, vocab_start, vocab_total):
        return top_k(a, k)
    with refused_for_all(group):
        check_tensor("hidden", hidden)
        check_sequence_parallel(hidden, sequence_parallel)
        own = tuple(hidden.shape[:-1])
        rows: Sequence[int] = (dist.get_world_size(group) * own[0], *own[1:]) if sequence_parallel else own
        a = with_row_temperature(a, own)
        if a.row_temperature is None or tuple(a.row_temperature.shape) != own:
            a = tokens_of(a, rows)
        else:
            a = tokens_of(a, own)  # and this rank's temperatures
        k = _options.checked_k(k)
        prepared, rows = _prepared(a, "linear_top_k", group, vocab_start, vocab_total, sequence_parallel, k)
    return top_k_of(prepared, rows, k)


def next_labels(labels: Tensor, *, group: Any = None, shift: int = 1, ignore_index: int = -100) -> Tensor:
    """Labels shifted to the left over the ranks of a group, which have consecutive parts of each sequence.

    The last ``shift`` positions get the first labels of the next rank's part, those of the last rank ``ignore_index``.
    One all-gather of ``shift`` labels a row, with no word on whether the ranks agree on shapes.

    Args:
        labels: ``[..., T]``, this rank's part, of at least ``shift`` positions, of one shape on all ranks.
        group: a ``torch.distributed`` process group in the order of the parts; None: the default one.

    Returns:
        ``[..., T]``: what each position predicts, to be used with ``shift=0``.

    Raises:
        ValueError: a part that is shorter than the shift.
    """
    if shift < 0 or labels.dim() < 1 or labels.shape[-1] < shift:
        raise ValueError(f"shift: expected 0 <= shift <= the last size of labels {list(labels.shape)}, got {shift}")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    first = labels[..., :shift].contiguous()
    every = first.new_empty((ranks, *first.shape))
    if first.numel() > 0:
        all_gather(every.view(-1), first.view(-1), group=group)
    following = every[rank + 1] if rank + 1 < ranks else torch.full_like(first, ignore_index)
    return torch.cat((labels[..., shift:], following), dim=-1)


def _prepared(
    a: Arguments,
    function: str,
    group: Any,
    vocab_start: int | None,
    vocab_total: int | None,
    sequence_parallel: bool,
    k: int = 0,
) -> tuple[Prepared, Sequence[int]]:
    """Made without a word to the other ranks; and the shape of all tokens."""
    check_operands(a.hidden, a.weight, a.bias, a.targets, least_vocab=0)
    check_sequence_parallel(a.hidden, sequence_parallel)
    ranks = dist.get_world_size(group)
    rows, own_targets = rows_of(a, ranks, sequence_parallel, _options.FUNCTIONS[function].targets)
    seed_given = not (a.seed is None or isinstance(a.seed, torch.Generator))
    start, total = _classes("vocab_start", vocab_start), _classes("vocab_total", vocab_total)
    of = Ranks(group.group_name, ranks, start, total, sequence_parallel, own_targets, seed_given)
    return prepare(a, CallOf(function, k, of, rows)), rows


def checked_group(group: Any) -> Any:
    if group is None:
        group = dist.group.WORLD
    if group is None:
        raise ValueError("group: expected a process group, got None before torch.distributed.init_process_group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup, got {type(group).__name__}")
    return group


def is_whole_head(group: Any, shard: Tensor, vocab_start: int | None, vocab_total: int | None) -> bool:
    """Whether the group has one rank, whose call is that of the ordinary head."""
    return dist.get_world_size(group) == 1 and vocab_start in (None, 0) and vocab_total in (None, shard.shape[0])


@contextlib.contextmanager
def refused_for_all(group: Any) -> Iterator[None]:
    """Tells the other ranks what this one refuses; of compiled code, which is traced alone, nothing."""
    try:
        yield
    except Exception as error:
        if not torch.compiler.is_compiling():
            _agreement.refuse(group, error)
        raise


def _classes(name: str, value: Any) -> int:
    """As the operators take it: -1 for None."""
    if value is None:
        return -1
    count = _options.integer(name, value)
    if count < 0:
        raise InvalidArgumentError(f"{name}: expected a number of classes or None, got {count}")
    return count


def check_sequence_parallel(hidden: Tensor, sequence_parallel: Any) -> None:
    if not isinstance(sequence_parallel, bool):
        raise TypeError(f"sequence_parallel: expected a bool, got {type(sequence_parallel).__name__}")
    if sequence_parallel and hidden.dim() < 2:
        raise ValueError(
            f"hidden: expected shape [tokens, ..., D] with sequence_parallel, got {shape_text(hidden.shape)}"
        )


def rows_of(a: Arguments, ranks: int, sequence_parallel: bool, name: str) -> tuple[tuple[int, ...], bool]:
    """The shape of all tokens, and whether what is given for each of them is of this rank's alone. name: of the
    targets."""
    own = tuple(a.rows())
    rows = tuple(a.targets.shape)
    several = a.has_several_targets()
    if several:
        _options.check_targets_shape(name, rows, rows[:-1], several)
        rows = rows[:-1]
    if not sequence_parallel:
        _options.check_targets_shape(name, a.targets.shape, own, several)
        return own, False
    every = (ranks * own[0], *own[1:])
    if rows not in (own, every):
        raise ValueError(
            f"{name}: expected shape {shape_text(every)} (all ranks' tokens) or {shape_text(own)} (this rank's) with "
            f"sequence_parallel, and one more dimension with target_weight, got {shape_text(a.targets.shape)}"
        )
    return every, rows == own and ranks > 1
