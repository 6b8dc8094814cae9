"""The functions of ``logitless.distributed``: those of parallel heads, and ``next_labels`` for context parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import options as _options
from ..autograd import perform
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
from . import _passes as _passes  # registers the passes of groups
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
    """Computes :func:`logitless.linear_cross_entropy` for a head whose rows are spread over the ranks of a group.

    Every rank of the group must call it at the same time with the same options. The loss and the statistics cover the
    whole vocabulary and all tokens, with the same bits on every rank. The gradient of ``hidden`` is the sum over ranks,
    on every rank. The gradients of ``weight`` and ``bias`` are those of the rank's own rows.

    Arguments not listed here, results and costs are those of :func:`logitless.linear_cross_entropy`.

    Args:
        hidden: Hidden states, ``[..., D]``, the same on every rank. With ``sequence_parallel`` they are this rank's
            part along the first dimension, of the same size on every rank.
        weight: This rank's rows of the head's weight, ``[V_r, D]``, of any number, including 0.
        targets: Class indices of the whole vocabulary, of shape ``hidden.shape[:-1]``, the same on every rank. With
            ``sequence_parallel`` the shape decides whether they are those of all tokens or of this rank's tokens. With
            ``target_weight``, which has their shape, they have one more dimension of K targets a row. ``token_weight``
            and a temperature for each row have the shape of one target a row.
        group: A ``torch.distributed`` process group. None means the default one.
        vocab_start: The class of the shard's first row. None means that shards lie in the order of ranks.
        vocab_total: The number of classes of all ranks, to be checked. None means the sum of the shards.
        sequence_parallel: True gathers ``hidden`` along its first dimension, and its gradient is that of this rank's
            part, by a reduce-scatter. A backward pass that comes later gathers it again.
        return_stats: As in :func:`logitless.linear_cross_entropy`, without the statistics of a draw.
        bias: The shard's bias, ``[V_r]``.
        class_weight: Class weights of the whole vocabulary, the same on every rank.
        main_grad: A buffer of the shard's shape.
        max_workspace_bytes: As in :func:`logitless.linear_cross_entropy`. It must also fit a backward pass that comes
            later, or the forward pass raises.
        seed: Seed of sparsified gradients. On CPUs equal seeds keep equal elements for any cut of the vocabulary. A
            number must be the same on every rank there; with None or generators all ranks use rank 0's. On CUDA the
            kept elements depend on the cut, and each rank draws from its own seed.
        screen: Only ``"none"``: ranks that share a head have no screen.
        batch_invariant: True gives a row the same bits in any batch for one cut of the vocabulary, as on one device.

    Hosts compare shapes, dtypes, options and the places of shards before every call. If one differs, all ranks raise.
    docs/distributed.md lists what is noticed on which device.

    Raises:
        InvalidArgumentError: Ranks differ, by the name of the argument, or shards do not make up a vocabulary.
        UnsupportedError: ``return_stats`` has statistics of a draw, or there is a screen.
        CommunicationError: A collective failed.
        TypeError, ValueError, BudgetTooSmallError: As in :func:`logitless.linear_cross_entropy`.
    """
    _options.check_names("linear_cross_entropy", options, _options.HEAD_OPTIONS)
    group = checked_group(group)
    a = Arguments(hidden, weight, targets, return_stats=return_stats, **options)
    return loss_of_ranks(a, group, vocab_start, vocab_total, sequence_parallel)


def loss_of_ranks(
    a: Arguments, group: Any, vocab_start: int | None, vocab_total: int | None, sequence_parallel: bool
) -> Tensor | LinearCrossEntropyOutput:
    """Computes linear_cross_entropy() for a checked group."""
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
    """Computes :func:`logitless.linear_log_probs` for a head whose rows are spread over the ranks of a group.

    Every rank of the group must call it at the same time with the same options. It gets all log-probabilities, with the
    same bits. Gradients are as in :func:`logitless.distributed.linear_cross_entropy`. The upstream gradients must be
    the same on every rank.

    Arguments not listed here are those of :func:`logitless.linear_log_probs`.

    Args:
        hidden: As in :func:`logitless.distributed.linear_cross_entropy`.
        weight: As in :func:`logitless.distributed.linear_cross_entropy`.
        ids: Classes of the whole vocabulary, ``[..., K]`` with K <= 64, the same on every rank. With
            ``sequence_parallel`` the shape decides whether they are those of all tokens or of this rank's. This also
            holds for a temperature for each row.
        group: As in :func:`logitless.distributed.linear_cross_entropy`.
        vocab_start: As in :func:`logitless.distributed.linear_cross_entropy`.
        vocab_total: As in :func:`logitless.distributed.linear_cross_entropy`.
        sequence_parallel: As in :func:`logitless.distributed.linear_cross_entropy`.
        bias: As in :func:`logitless.distributed.linear_cross_entropy`.

    Returns:
        The log-probabilities of all tokens, ``[..., K]``.

    Raises:
        TypeError, ValueError, BudgetTooSmallError, CommunicationError: As in
            :func:`logitless.distributed.linear_cross_entropy`.
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
    """Computes :func:`logitless.linear_top_k` for a head whose rows are spread over the ranks of a group.

    Every rank of the group must call it at the same time with the same options. It gets the largest logits of the whole
    vocabulary for all tokens, with the same bits.

    Arguments not listed here are those of :func:`logitless.linear_top_k`.

    Args:
        hidden: As in :func:`logitless.distributed.linear_cross_entropy`.
        weight: As in :func:`logitless.distributed.linear_cross_entropy`.
        k: The number of logits, from 1 to the smaller of 64 and the rows of all ranks' shards.
        group: As in :func:`logitless.distributed.linear_cross_entropy`.
        vocab_start: As in :func:`logitless.distributed.linear_cross_entropy`.
        vocab_total: As in :func:`logitless.distributed.linear_cross_entropy`.
        sequence_parallel: As in :func:`logitless.distributed.linear_cross_entropy`.
        bias: As in :func:`logitless.distributed.linear_cross_entropy`.
        temperature: A number or a tensor. With ``sequence_parallel`` the shape of a tensor with one for each row
            decides whether it covers all tokens or this rank's.

    Returns:
        ``ids`` and ``log_probs`` of all tokens, ``[..., k]``.

    Raises:
        TypeError, ValueError, BudgetTooSmallError, CommunicationError: As in
            :func:`logitless.distributed.linear_cross_entropy`.
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
        a = a._replace(hidden=hidden.detach())
        a = with_row_temperature(a, own)
        if a.row_temperature is None or tuple(a.row_temperature.shape) != own:
            a = tokens_of(a, rows)
        else:
            a = tokens_of(a, own)  # and this rank's temperatures
        k = _options.checked_k(k)
        prepared, rows = _prepared(a, "linear_top_k", group, vocab_start, vocab_total, sequence_parallel, k)
    return top_k_of(perform(prepared), rows, k)


def next_labels(labels: Tensor, *, group: Any = None, shift: int = 1, ignore_index: int = -100) -> Tensor:
    """Shifts labels to the left over the ranks of a group, which hold consecutive parts of each sequence.

    The last ``shift`` positions get the first labels of the next rank's part. On the last rank they get
    ``ignore_index``. It takes one all-gather of ``shift`` labels a row. Ranks do not check that their shapes agree.

    Args:
        labels: This rank's part, ``[..., T]`` with T >= ``shift``, of one shape on all ranks.
        group: A ``torch.distributed`` process group in the order of the parts. None means the default one.
        shift: The number of positions.
        ignore_index: The label of positions without a next one.

    Returns:
        The label that each position predicts, ``[..., T]``, for calls with ``shift=0``.

    Raises:
        ValueError: A part is shorter than the shift.
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
    adds_up: bool = True,
) -> tuple[Prepared, Sequence[int]]:
    """Prepares a call without communication; returns it with the shape of all tokens."""
    check_operands(a.hidden, a.weight, a.bias, a.targets, least_vocab=0)
    check_sequence_parallel(a.hidden, sequence_parallel)
    ranks = dist.get_world_size(group)
    rows, own_targets = rows_of(a, ranks, sequence_parallel, _options.FUNCTIONS[function].targets)
    seed_given = not (a.seed is None or isinstance(a.seed, torch.Generator))
    start, total = _classes("vocab_start", vocab_start), _classes("vocab_total", vocab_total)
    of = Ranks(group.group_name, ranks, start, total, sequence_parallel, own_targets, seed_given, adds_up)
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
    """Whether the group has one rank with the whole head, so that the call is the ordinary one."""
    return dist.get_world_size(group) == 1 and vocab_start in (None, 0) and vocab_total in (None, shard.shape[0])


@contextlib.contextmanager
def refused_for_all(group: Any) -> Iterator[None]:
    """Reports an error of this rank to the other ranks, except while compiling, when ranks trace on their own."""
    try:
        yield
    except Exception as error:
        if not torch.compiler.is_compiling():
            _agreement.refuse(group, error)
        raise


def _classes(name: str, value: Any) -> int:
    """Returns a number of classes as the operators take it: -1 for None."""
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
    """Returns the shape of all tokens, and whether vectors of tokens hold this rank's alone.

    name: the targets', for messages.
    """
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
