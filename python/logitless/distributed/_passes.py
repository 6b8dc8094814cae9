"""The passes of a rank's shard: agreement, gathers, the run, sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from .. import _c, _stats
from .._flags import Flags, Wants
from .._overlap import check_own_memory
from .._run import Tensors
from .._saved import LSE, read_by_backward
from .._torch import Inputs, Result, contiguous, readable, resolved, results, rows_are_aligned, stats_dtype
from ..errors import InvalidArgumentError
from . import _agreement
from ._agreement import Own, Shard
from ._channel import Group
from ._run import Asks, Pass, add_up, find, find_on_all, gathered


class Ranks(NamedTuple):
    """The group as the operators take it."""

    group: str  # its name
    group_size: int
    vocab_start: int  # -1: the shards are in the order of ranks
    vocab_total: int  # -1: as many as all have
    sequence_parallel: bool  # input holds the rank's tokens
    own_targets: bool  # so does what is given for each token
    seed_given: bool  # in the place of one that each rank draws

    def tokens(self, inputs: Inputs) -> int:
        """Of all ranks."""
        return int(inputs.hidden.shape[0]) * (self.group_size if self.sequence_parallel else 1)


def results_of(
    pass_: int, inputs: Inputs, reduction: str, flags: Flags, ranks: Ranks, keeps_weight: bool = False
) -> dict[str, Result]:
    """As _torch.results: rows of all tokens, the gradient of input as it is given."""
    hidden = inputs.hidden
    every = inputs._replace(hidden=hidden.new_empty((ranks.tokens(inputs), hidden.shape[1]), device="meta"))
    found = results(pass_, every, reduction, flags, 0)
    if flags.want_d_hidden and "d_hidden" in found:
        found["d_hidden"] = Result(tuple(hidden.shape), hidden.dtype)
    if keeps_weight:
        found["d_classifier"] = Result((0,), found["d_classifier"].dtype, False)
    return found


def _text(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _fields(
    pass_: int,
    inputs: Inputs,
    main_grad: Tensor | None,
    options: dict[str, Any],
    flags: Flags,
    ranks: Ranks,
    asks: Asks,
) -> dict[str, Any]:
    """What all ranks have in common."""
    wanted = tuple(name for name, on in flags.wants()._asdict().items() if on)
    names = {
        "token_weight": inputs.token_weight,
        "weight": inputs.class_weight,
        "temperature": inputs.row_temperature,
        "target_weight": inputs.target_weight,
    }
    device = inputs.hidden.device.type
    return {
        "device": device,
        "function": asks.function,
        "sequence_parallel": ranks.sequence_parallel,
        "input": _text(inputs.hidden),
        "weight_shard": f"{inputs.weight.dtype} [*, {inputs.weight.shape[1]}]",
        asks.targets_name: _text(inputs.target),
        "k": asks.top_k,
        "linear_bias": None if inputs.bias is None else str(inputs.bias.dtype),
        **{f"tensor {name}": _text(tensor) for name, tensor in names.items()},
        **options,
        "seed": None if inputs.seed is None else "given" if ranks.seed_given else "drawn",
        "tensors that require grad": wanted,
        "main_grad": None if main_grad is None else "given",
        "gradients together with the loss": pass_ != _c.FORWARD,
        "return_stats": flags.stats + (("counts",) if flags.want_counts else ()),
        "vocab_start given": ranks.vocab_start >= 0,
        "vocab_total": None if ranks.vocab_total < 0 else ranks.vocab_total,
        "alignment": device == "cpu" or rows_are_aligned(inputs.hidden),
    }


def _own(inputs: Inputs, ranks: Ranks) -> Own:
    threads = torch.get_num_threads() if inputs.hidden.device.type == "cpu" else 0
    unaligned = inputs.weight.is_cuda and not rows_are_aligned(inputs.weight)
    return Own(int(inputs.weight.shape[0]), ranks.vocab_start, threads, int(unaligned))


def group_of(ranks: Ranks) -> Group:
    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]  # as functional collectives do
    return resolve(ranks.group)


def _all_tokens(inputs: Inputs, ranks: Ranks, group: Group) -> Inputs:
    """Of what is given for the rank's tokens alone that of all."""
    if not ranks.sequence_parallel:
        return inputs
    found = inputs._replace(hidden=gathered(group, ranks.group_size, inputs.hidden))
    if not ranks.own_targets:
        return found
    rows = {name: getattr(inputs, name) for name in ("target", "token_weight", "row_temperature")}
    weights = inputs.target_weight
    if weights is not None and weights.shape[0] == inputs.hidden.shape[0]:
        rows["target_weight"] = weights  # else upstream gradients, which are of all tokens
    more = {name: gathered(group, ranks.group_size, row) for name, row in rows.items() if row is not None}
    return found._replace(**more)


def forward(
    pass_: int,
    inputs: Inputs,
    main_grad: Tensor | None,
    options: dict[str, Any],
    flags: Flags,
    ranks: Ranks,
    asks: Asks = Asks(),
) -> tuple[Tensors, Shard, int]:
    """A forward pass, or both in one; and the seed of the draws. options: as the operators take them; flags: of a
    forward pass with the gradients that its backward pass will be asked for."""
    group = group_of(ranks)
    try:
        options = resolved(inputs, options)
        if main_grad is not None and flags.want_d_weight:
            check_own_memory(main_grad, inputs, weight_name="weight_shard")
    except Exception as error:
        _agreement.refuse(group, error)
        raise
    own, fields = _own(inputs, ranks), _fields(pass_, inputs, main_grad, options, flags, ranks, asks)
    targets = None if ranks.own_targets else inputs.target
    seed = 0 if inputs.seed is None or inputs.hidden.device.type != "cpu" else int(inputs.seed)
    agreed = _agreement.agree(group, fields, own, targets, asks.targets_name, seed)
    shard, seed = agreed.shard, agreed.seed
    inputs = _with_seed(inputs, seed)
    if inputs.class_weight is not None and inputs.class_weight.shape[0] != shard.total:
        raise InvalidArgumentError(
            f"weight: expected shape [{shard.total}] (one of each class of the whole vocabulary), "
            f"got {list(inputs.class_weight.shape)}"
        )
    if asks.top_k > shard.total:
        raise InvalidArgumentError(
            f"k: expected a number in [1, {shard.total}], the rows of all ranks' shards, got {asks.top_k}"
        )
    inputs = _all_tokens(inputs, ranks, group)
    now = flags.with_gradients(Wants()) if pass_ == _c.FORWARD else flags
    read = inputs._replace(seed=None) if pass_ == _c.FORWARD else inputs  # only gradients are drawn
    asked = Pass(pass_, readable(read, options["num_items"]), options, now, asks)
    if agreed.new is not None:
        later = _to_come(inputs, main_grad, options, flags) if pass_ == _c.FORWARD else []
        run = find_on_all(group, shard, asked, later)
        _agreement.keep(group, agreed)
    else:
        run = find(group, shard, asked)
    found = run(asked.tensors)
    add_up(group, ranks.group_size, found, ranks.sequence_parallel)
    return found, shard, seed


def _with_seed(inputs: Inputs, seed: int) -> Inputs:
    """With the one that all ranks have agreed on; on CUDA, where none is compared, the rank's own."""
    if inputs.seed is None or inputs.seed.device.type != "cpu":
        return inputs
    return inputs._replace(seed=torch.full((), seed, dtype=torch.int64))


def _backward_pass(
    inputs: Inputs, saved: dict[str, Tensor | None], main_grad: Tensor | None, options: dict[str, Any], flags: Flags
) -> Pass:
    more = {name: contiguous(tensor) for name, tensor in read_by_backward(saved).items()}
    if main_grad is not None and flags.want_d_weight:
        more["d_classifier"] = main_grad
    return Pass(_c.BACKWARD, readable(inputs, options["num_items"]) | more, options, flags)


def _to_come(inputs: Inputs, main_grad: Tensor | None, options: dict[str, Any], flags: Flags) -> list[Pass]:
    """The backward passes of a forward pass with these flags: of the loss alone, and of the loss and every statistic
    that may have a gradient. Other ones, of some of these gradients, need no more memory."""
    if not any(flags.wants()):
        return []
    row = torch.empty(inputs.hidden.shape[:1], dtype=stats_dtype(inputs.hidden), device="meta")  # layouts count alone
    loss = row if options["reduction"] == "none" else row.new_empty(())
    saved: dict[str, Tensor | None] = {**dict.fromkeys(LSE, row), "entropy": row, "grad_loss": loss}
    stats: dict[str, Tensor | None] = {f"grad_{name}": row for name in _stats.DIFFERENTIABLE if name in flags.stats}
    wanted = Flags().with_gradients(flags.wants())
    return [_backward_pass(inputs, saved | more, main_grad, options, wanted) for more in ({}, stats)]


def backward(
    shard: Shard,
    seed: int,
    inputs: Inputs,
    saved: dict[str, Tensor | None],
    main_grad: Tensor | None,
    options: dict[str, Any],
    flags: Flags,
    ranks: Ranks,
) -> Tensors:
    """The backward pass of a rank's shard, as _run.run_backward; the sums over the vocabulary are known."""
    group = group_of(ranks)
    options = resolved(inputs, options)
    inputs = _with_seed(_all_tokens(inputs, ranks, group), seed)
    asked = _backward_pass(inputs, saved, main_grad, options, flags)
    found = find(group, shard, asked)(asked.tensors)
    add_up(group, ranks.group_size, found, ranks.sequence_parallel)
    return found
