"""The passes of a rank's shard: agreement, gathers, the run, sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from .. import options as _options
from ..autograd import GroupPasses, Pass, set_group_passes
from ..call import Ranks
from ..errors import InvalidArgumentError
from ..options import LSE, Flags, Wants, name_of
from ..passes import Result, results
from ..run import (
    Inputs,
    Tensors,
    check_own_memory,
    named,
    read_later,
    readable,
    rows_are_aligned,
    stats_dtype,
)
from . import _agreement
from ._agreement import SHARD_SIZE, Own, Shard
from ._channel import Group
from ._run import Local, add_up, find, find_on_all, gathered


def results_of(asked: Pass, inputs: Inputs, options: Mapping[str, Any]) -> dict[str, Result]:
    """As passes.results: rows of all tokens, the gradient of input as it is given, and a Shard in the
    place of draws, which a backward pass reads."""
    hidden, ranks = inputs.hidden, asked.ranks
    assert ranks is not None
    every = inputs._replace(hidden=hidden.new_empty((ranks.tokens(inputs), hidden.shape[1]), device="meta"))
    found = results(asked.kind, named(every), options, asked.flags, asked.function)
    if "d_hidden" in found:
        found["d_hidden"] = Result(tuple(hidden.shape), name_of(hidden.dtype))
    if asked.kind == _options.FORWARD:
        found["draws"] = Result((SHARD_SIZE,), "int64", "cpu")
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
    function: str,
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
        "function": function,
        "sequence_parallel": ranks.sequence_parallel,
        "input": _text(inputs.hidden),
        "weight_shard": f"{inputs.weight.dtype} [*, {inputs.weight.shape[1]}]",
        _options.FUNCTIONS[function].targets: _text(inputs.target),
        "k": options["top_k"],
        "linear_bias": None if inputs.bias is None else str(inputs.bias.dtype),
        **{f"tensor {name}": _text(tensor) for name, tensor in names.items()},
        **{name: value for name, value in options.items() if name != "top_k"},
        "seed": None if inputs.seed is None else "given" if ranks.seed_given else "drawn",
        "tensors that require grad": wanted,
        "main_grad": None if main_grad is None else "given",
        "gradients together with the loss": pass_ != _options.FORWARD,
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


def _forward(asked: Pass, inputs: Inputs, main_grad: Tensor | None, options: dict[str, Any]) -> Tensors:
    """A forward pass, or both in one. options: the resolved ones; flags: of a forward pass with the gradients that its
    backward pass will be asked for."""
    pass_, flags, function, ranks = asked
    assert ranks is not None
    group = group_of(ranks)
    if main_grad is not None and flags.want_d_weight:
        try:
            check_own_memory(main_grad, inputs, weight_name="weight_shard")
        except Exception as error:
            _agreement.refuse(group, error)
            raise
    own, fields = _own(inputs, ranks), _fields(pass_, inputs, main_grad, options, flags, ranks, function)
    targets = None if ranks.own_targets else inputs.target
    seed = 0 if inputs.seed is None or inputs.hidden.device.type != "cpu" else int(inputs.seed)
    agreed = _agreement.agree(group, fields, own, targets, _options.FUNCTIONS[function].targets, seed)
    shard, seed = agreed.shard, agreed.seed
    inputs = _with_seed(inputs, seed)
    if inputs.class_weight is not None and inputs.class_weight.shape[0] != shard.total:
        raise InvalidArgumentError(
            f"weight: expected shape [{shard.total}] (one of each class of the whole vocabulary), "
            f"got {list(inputs.class_weight.shape)}"
        )
    if options["top_k"] > shard.total:
        raise InvalidArgumentError(
            f"k: expected a number in [1, {shard.total}], the rows of all ranks' shards, got {options['top_k']}"
        )
    inputs = _all_tokens(inputs, ranks, group)
    now = flags.with_gradients(Wants()) if pass_ == _options.FORWARD else flags
    read = inputs._replace(seed=None) if pass_ == _options.FORWARD else inputs  # only gradients are drawn
    local = Local(pass_, readable(read, options["num_items"]), options, now, function)
    if agreed.new is not None:
        later = _to_come(inputs, main_grad, options, flags) if pass_ == _options.FORWARD else []
        run = find_on_all(group, shard, local, later)
        _agreement.keep(group, agreed)
    else:
        run = find(group, shard, local)
    found = run(local.tensors)
    add_up(group, ranks.group_size, found, ranks.sequence_parallel)
    if pass_ == _options.FORWARD:
        found["draws"] = shard.packed(seed)
    return found


def _with_seed(inputs: Inputs, seed: int) -> Inputs:
    """With the one that all ranks have agreed on; on CUDA, where none is compared, the rank's own."""
    if inputs.seed is None or inputs.seed.device.type != "cpu":
        return inputs
    return inputs._replace(seed=torch.full((), seed, dtype=torch.int64))


def _backward_pass(
    inputs: Inputs, saved: Mapping[str, Tensor | None], main_grad: Tensor | None, options: dict[str, Any], flags: Flags
) -> Local:
    tensors = read_later(inputs, saved, main_grad, options, flags)
    return Local(_options.BACKWARD, tensors, options, flags, "linear_cross_entropy")


def _to_come(inputs: Inputs, main_grad: Tensor | None, options: dict[str, Any], flags: Flags) -> list[Local]:
    """The backward passes of a forward pass with these flags: of the loss alone, and of the loss and every statistic
    that may have a gradient. Other ones, of some of these gradients, need no more memory."""
    if not any(flags.wants()):
        return []
    row = torch.empty(inputs.hidden.shape[:1], dtype=stats_dtype(inputs.hidden), device="meta")  # layouts count alone
    loss = row if options["reduction"] == "none" else row.new_empty(())
    saved: dict[str, Tensor | None] = {**dict.fromkeys(LSE, row), "entropy": row, "grad_loss": loss}
    stats: dict[str, Tensor | None] = {f"grad_{name}": row for name in _options.DIFFERENTIABLE if name in flags.stats}
    wanted = Flags().with_gradients(flags.wants())
    return [_backward_pass(inputs, saved | more, main_grad, options, wanted) for more in ({}, stats)]


def _backward(
    asked: Pass,
    inputs: Inputs,
    saved: Mapping[str, Tensor | None],
    main_grad: Tensor | None,
    options: dict[str, Any],
) -> Tensors:
    """The backward pass of a rank's shard; the sums over the vocabulary are known."""
    ranks, packed = asked.ranks, saved["draws"]
    assert ranks is not None and packed is not None
    shard, seed = Shard.unpacked(packed)
    group = group_of(ranks)
    inputs = _with_seed(_all_tokens(inputs, ranks, group), seed)
    given = {name: tensor for name, tensor in saved.items() if name != "draws"}
    local = _backward_pass(inputs, given, main_grad, options, asked.flags)
    found = find(group, shard, local)(local.tensors)
    add_up(group, ranks.group_size, found, ranks.sequence_parallel)
    return found


def _run(
    asked: Pass,
    inputs: Inputs,
    saved: Mapping[str, Tensor | None],
    main_grad: Tensor | None,
    options: dict[str, Any],
) -> Tensors:
    if asked.kind == _options.BACKWARD:
        return _backward(asked, inputs, saved, main_grad, options)
    return _forward(asked, inputs, main_grad, options)


def _refuse(ranks: Ranks, error: Exception) -> None:
    _agreement.refuse(group_of(ranks), error)


set_group_passes(GroupPasses(_run, results_of, _refuse))
