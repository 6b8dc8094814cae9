"""``logitless.distributed.linear_top_k``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _arguments, _c, _checks, _numbers, _options
from .._arguments import Arguments, Learned, Number, temperatures
from .._flags import Flags
from .._options import MOST_TOP_K
from .._top_k import LinearTopK
from .._top_k import linear_top_k as of_whole_vocabulary
from . import _passes
from ._checked import check_sequence_parallel, checked_group, is_whole_head, ranks_of, refused_for_all
from ._run import Asks


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_top_k(
    input: Tensor,
    weight_shard: Tensor,
    k: int,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_total: int | None = None,
    sequence_parallel: bool = False,
    linear_bias: Tensor | None = None,
    scale: Number = 1.0,
    softcap: Number | None = None,
    temperature: Number = 1.0,
    max_workspace_bytes: int | str | None = None,
) -> LinearTopK:
    """:func:`logitless.linear_top_k` of a head whose rows are spread over the ranks of a group.

    Every rank of the group calls it at the same time, with the same options, and gets the largest logits of the whole
    vocabulary, of all tokens, with the same bits.

    Args:
        input, weight_shard, group, vocab_start, vocab_total, sequence_parallel, linear_bias: as those of
            :func:`logitless.distributed.linear_cross_entropy`.
        k: how many, from 1 to the smaller one of 64 and the rows of all ranks' shards.
        temperature: with ``sequence_parallel`` one for each row is of all tokens, or of this rank's, told by its shape.

    Raises:
        As :func:`logitless.distributed.linear_cross_entropy`.
    """
    group = checked_group(group)
    shared: dict[str, Any] = dict(
        linear_bias=linear_bias, scale=scale, softcap=softcap, max_workspace_bytes=max_workspace_bytes
    )
    if is_whole_head(dist.get_world_size(group), weight_shard, vocab_start, vocab_total):
        whole: LinearTopK = of_whole_vocabulary(input, weight_shard, k, temperature=temperature, **shared)
        return whole
    with refused_for_all(group):
        _checks.check_tensor("input", input)
        check_sequence_parallel(input, sequence_parallel)
        own = tuple(input.shape[:-1])
        rows = (dist.get_world_size(group) * own[0], *own[1:]) if sequence_parallel else own
        row_temperature, temperature = temperatures(temperature, rows)
        if row_temperature is None:
            row_temperature, temperature = temperatures(temperature, own)
        own_rows = row_temperature is not None and tuple(row_temperature.shape) == own and sequence_parallel
        a = Arguments(
            input.detach(),
            weight_shard,
            # that no row is ignored
            torch.zeros(own if own_rows else rows, dtype=torch.int64, device=input.device),
            row_temperature=row_temperature,
            temperature=temperature,
            reduction="sum",
            **shared,
        )
        a = _arguments.without_number_tensors(a)
        _checks.check_operands(a.input, a.linear_weight, a.linear_bias, a.target, least_vocab=0)
        k = _options.checked_k(k, MOST_TOP_K)
        a = _arguments.autocast(a)
        _arguments.check_rest(a, own if own_rows else rows)
        inputs = _arguments.inputs_of(a, Learned(None, None))
        options, numbers = _numbers.split(_arguments.options_of(a), False)
        inputs = inputs if numbers is None else inputs._replace(numbers=numbers)
        ranks = ranks_of(group, vocab_start, vocab_total, sequence_parallel, own_rows)
    asks = Asks("linear_top_k", "target", ("top_ids", "top_log_probs"), k, k)
    found, _, _ = _passes.forward(_c.FORWARD, inputs, None, options, Flags(), ranks, asks)
    return LinearTopK(found["top_ids"].reshape((*rows, k)), found["top_log_probs"].reshape((*rows, k)))
