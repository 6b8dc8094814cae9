"""The passes of a rank's shard: agreement, gathers, the run with the other ranks, and sums over ranks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from .. import native
from .. import options as _options
from ..autograd import OtherPasses, of_group, other_passes
from ..call import Ranks
from ..errors import BudgetTooSmallError, CommunicationError, InvalidArgumentError
from ..native import Cache
from ..options import LSE, Flags, Wants, name_of
from ..passes import PassKey, Result, results
from ..run import (
    DTYPES,
    Run,
    Tensors,
    check_own_memory,
    device_key,
    layouts,
    read_later,
    readable,
    rows_are_aligned,
    stats_dtype,
    stream_of,
)
from . import _agreement
from ._agreement import SHARD_SIZE, RankInfo, Shard, compare_plans
from ._channel import Group, all_gather, reduce_scatter


class _Exchange:
    """The communicator of one run.

    It gathers within the run's workspace and reduces the run's outputs, by the collectives of torch.distributed.
    """

    def __init__(self, group: Group, shard: Shard, workspace: Tensor, written: Tensors) -> None:
        self._group, self._shard, self._workspace, self._written = group, shard, workspace, written
        self.error: BaseException | None = None
        self._callbacks = native.ALL_GATHER(self._all_gather), native.ALL_REDUCE(self._all_reduce)
        self.communicator: Any = native.Communicator()
        self.communicator.rank, self.communicator.size = shard.rank, shard.ranks
        self.communicator.all_gather, self.communicator.all_reduce = self._callbacks

    def close(self) -> None:
        """Breaks the cycle between this object and its callbacks, which would keep the workspace until Python collects
        cycles."""
        del self._callbacks, self.communicator

    def _all_gather(self, send: int, receive: int, count: int, dtype: int, stream: int, host: int) -> int:
        try:
            kind = DTYPES[dtype]
            start = receive - self._workspace.data_ptr()
            size = self._shard.ranks * count * kind.itemsize
            every = self._workspace[start : start + size].view(kind)
            mine = every[self._shard.rank * count : (self._shard.rank + 1) * count]
            all_gather(every, mine if mine.is_cuda else mine.clone(), group=self._group)
            return 0
        except BaseException as error:  # nothing may be thrown through the library
            self.error = error
            return 1

    def _all_reduce(self, data: int, count: int, dtype: int, stream: int, host: int) -> int:
        try:
            dist.all_reduce(next(t for t in self._written.values() if t.data_ptr() == data), group=self._group)
            return 0
        except BaseException as error:
            self.error = error
            return 1


class Local(NamedTuple):
    """The inputs of a rank's run. Only the layouts of tensors matter to find it."""

    pass_key: PassKey
    tensors: Tensors
    options: dict[str, Any]
    saved_bytes: int = 0


class GroupRun(Run):
    """One pass of a rank's shard over tensors of one layout.

    Runs outlive groups and must keep none of them alive, as gloo's threads must end before Python does.
    """

    def __init__(self, group: Group, shard: Shard, local: Local) -> None:
        self.group, self._shard = weakref.ref(group), shard
        super().__init__(*local)

    def _specified(self, spec: native.Spec) -> native.Spec:
        shard = self._shard
        return spec.with_options(
            vocab_start=shard.start,
            vocab_total=shard.total,
            group_size=shard.ranks,
            group_vocab=shard.largest,
        )

    def _launch(self, buffers: Any, written: Tensors) -> None:
        workspace = self._new_workspace()
        exchange = _Exchange(self.group(), self._shard, workspace, written)
        stream = None if self._ordinal is None else stream_of(self._ordinal)
        try:
            native.run(self.plan, buffers, workspace.data_ptr(), stream, exchange.communicator)
        except CommunicationError as error:
            raise error from exchange.error
        finally:
            exchange.close()


_runs: Cache[Any, GroupRun] = Cache(256)


def find(group: Group, shard: Shard, local: Local) -> GroupRun:
    pass_key, tensors, options, saved_bytes = local
    hidden, weight = tensors["hidden"], tensors["weight"]
    key = (group.group_name, id(group), shard, pass_key, saved_bytes, hidden.device, device_key(hidden, weight))
    key = (*key, *options.values(), *tensors, *layouts(tensors.values()))
    run = _runs.get(key)
    if run is None or run.group() is not group:  # a new group may have the id of a destroyed one
        run = GroupRun(group, shard, local)
        _runs.put(key, run)
    return run


def find_on_all(group: Group, shard: Shard, now: Local, later: Sequence[Local]) -> GroupRun:
    """Returns the run of this pass if every rank has plans for it and for the later passes; else all ranks raise."""
    run, error = None, None
    try:
        passes = [functools.partial(find, group, shard, one) for one in (now, *later)]
        run = native.enough(*passes)[0]
    except Exception as refused:
        error = refused
    compare_plans(group, None if run is None else run.plan.info, error)
    assert run is not None
    return run


def gathered(group: Group, ranks: int, part: Tensor) -> Tensor:
    """Gathers all ranks' parts [n, ...], one after another."""
    part = part.contiguous()
    whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    all_gather(whole, part, group=group)
    return whole


def add_up(group: Group, ranks: int, outputs: Tensors, sequence_parallel: bool) -> None:
    """Sums d_hidden and the gradients of learned numbers over ranks.

    With sequence_parallel, d_hidden becomes that of the rank's own tokens.
    """
    if "d_hidden" in outputs:
        part = outputs["d_hidden"]
        if sequence_parallel:
            own = part.new_empty((part.shape[0] // ranks, *part.shape[1:]))
            reduce_scatter(own, part, group=group)
            outputs["d_hidden"] = own
        else:
            dist.all_reduce(part, group=group)
    for name in ("d_scale", "d_temperature"):
        if name in outputs:
            dist.all_reduce(outputs[name], group=group)


# ---- passes


def _results(pass_key: PassKey, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Result]:
    """Returns passes.results() for the rows of all ranks' tokens.

    d_hidden has the shape of this rank's hidden. The backward pass reads a packed Shard.
    """
    hidden, ranks = given["hidden"], pass_key.ranks
    assert ranks is not None
    every = {**given, "hidden": hidden.new_empty((ranks.tokens(hidden), hidden.shape[1]), device="meta")}
    outputs = results(pass_key, every, options)
    if "d_hidden" in outputs:
        outputs["d_hidden"] = Result(tuple(hidden.shape), name_of(hidden.dtype))
    if pass_key.kind == _options.FORWARD:
        outputs["shard"] = Result((SHARD_SIZE,), "int64", "cpu")
    return outputs


def _text(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _fields(
    pass_key: PassKey, given: Mapping[str, Tensor], main_grad: Tensor | None, options: dict[str, Any], ranks: Ranks
) -> dict[str, Any]:
    """Returns the properties of a call that must be the same on all ranks, by the names of arguments."""
    flags, hidden, weight = pass_key.flags, given["hidden"], given["weight"]
    wanted = tuple(name for name, on in flags.wants()._asdict().items() if on)
    of_rows = ("token_weight", "class_weight", "temperature", "target_weight")
    device = hidden.device.type
    return {
        "device": device,
        "function": pass_key.function,
        "sequence_parallel": ranks.sequence_parallel,
        "hidden": _text(hidden),
        "weight": f"{weight.dtype} [*, {weight.shape[1]}]",
        _options.FUNCTIONS[pass_key.function].targets: _text(given["targets"]),
        "k": options["top_k"],
        "bias": str(given["bias"].dtype) if "bias" in given else None,
        **{f"tensor {name}": _text(given.get(name)) for name in of_rows},
        **{name: value for name, value in options.items() if name != "top_k"},
        "seed": None if "seed" not in given else "given" if ranks.seed_given else "drawn",
        "tensors that require grad": wanted,
        "main_grad": None if main_grad is None else "given",
        "gradients together with the loss": pass_key.kind != _options.FORWARD,
        "return_stats": flags.stats + (("counts",) if flags.want_counts else ()),
        "saved exp logits": flags.saves,
        "vocab_start given": ranks.vocab_start >= 0,
        "vocab_total": None if ranks.vocab_total < 0 else ranks.vocab_total,
        "alignment": device == "cpu" or rows_are_aligned(hidden),
    }


def _own(weight: Tensor, ranks: Ranks) -> RankInfo:
    threads = 0 if weight.is_cuda else torch.get_num_threads()
    unaligned = weight.is_cuda and not rows_are_aligned(weight)
    return RankInfo(int(weight.shape[0]), ranks.vocab_start, threads, int(unaligned))


def group_of(ranks: Ranks) -> Group:
    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]  # as functional collectives do
    return resolve(ranks.group)


def _all_tokens(given: dict[str, Tensor], ranks: Ranks, group: Group) -> dict[str, Tensor]:
    """Gathers the inputs that each rank holds for its own tokens alone."""
    if not ranks.sequence_parallel:
        return given
    names = ["hidden"]
    if ranks.own_targets:
        names += [name for name in ("targets", "token_weight", "temperature") if name in given]
        weights = given.get("target_weight")
        if weights is not None and weights.shape[0] == given["hidden"].shape[0]:
            names += ["target_weight"]  # else they are upstream gradients, which cover all tokens
    return given | {name: gathered(group, ranks.group_size, given[name]) for name in names}


def _forward(
    pass_key: PassKey, given: dict[str, Tensor], main_grad: Tensor | None, options: dict[str, Any], ranks: Ranks
) -> Tensors:
    """Runs a forward pass, or both passes in one.

    options: resolved ones. The flags of a forward pass have the gradients of its later backward pass.
    """
    kind, flags, function, _ = pass_key
    group = group_of(ranks)
    if main_grad is not None and flags.want_d_weight:
        try:
            check_own_memory(main_grad, given)
        except Exception as error:
            _agreement.refuse(group, error)
    own, fields = _own(given["weight"], ranks), _fields(pass_key, given, main_grad, options, ranks)
    targets = None if ranks.own_targets else given["targets"]
    seed = int(given["seed"]) if "seed" in given and given["seed"].device.type == "cpu" else 0
    agreed = _agreement.agree(group, fields, own, targets, _options.FUNCTIONS[function].targets, seed)
    shard, seed = agreed.shard, agreed.seed
    given = _with_seed(given, seed)
    if "class_weight" in given and given["class_weight"].shape[0] != shard.total:
        raise InvalidArgumentError(
            f"class_weight: expected shape [{shard.total}] (one for each class of the whole vocabulary), "
            f"got {list(given['class_weight'].shape)}"
        )
    if options["top_k"] > shard.total:
        raise InvalidArgumentError(
            f"k: expected a number in [1, {shard.total}] (the rows of all ranks' shards), got {options['top_k']}"
        )
    given = _all_tokens(given, ranks, group)
    now = pass_key._replace(flags=flags.with_gradients(Wants())) if kind == _options.FORWARD else pass_key
    # Only gradients are drawn, so a forward pass does not read the seed.
    read = {name: value for name, value in given.items() if name != "seed" or kind != _options.FORWARD}
    local = Local(now, readable(read, options["num_items"]), options)
    plans_later = kind == _options.FORWARD and (flags.saves or agreed.new is not None)
    later = _to_come(given, main_grad, options, flags) if plans_later else []
    if later and flags.saves:
        local, later = _saving(group, shard, local, later)
    if agreed.new is not None:
        run = find_on_all(group, shard, local, later)
        _agreement.keep(group, agreed)
    else:
        run = find(group, shard, local)
    outputs = run(local.tensors)
    if ranks.adds_up:
        add_up(group, ranks.group_size, outputs, ranks.sequence_parallel)
    if kind == _options.FORWARD:
        outputs["shard"] = shard.packed(seed)
    return outputs


def _with_seed(given: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Replaces the seed by the one that all ranks agreed on. On CUDA each rank keeps its own."""
    if "seed" not in given or given["seed"].device.type != "cpu":
        return given
    return given | {"seed": torch.full((), seed, dtype=torch.int64)}


def _backward_pass(
    given: Mapping[str, Tensor], main_grad: Tensor | None, options: dict[str, Any], flags: Flags
) -> Local:
    tensors = read_later(given, main_grad, options, flags)
    return Local(PassKey(_options.BACKWARD, flags), tensors, options)


def _to_come(given: dict[str, Tensor], main_grad: Tensor | None, options: dict[str, Any], flags: Flags) -> list[Local]:
    """Returns the backward passes to plan for with a forward pass of these flags.

    One has the upstream gradient of the loss alone, one those of the loss and every statistic that may have a gradient.
    Passes with some of these gradients need no more memory.
    """
    if not any(flags.wants()):
        return []
    hidden = given["hidden"]
    row = torch.empty(hidden.shape[:1], dtype=stats_dtype(hidden), device="meta")  # only its layout matters
    loss = row if options["reduction"] == "none" else row.new_empty(())
    saved = {**given, **dict.fromkeys(LSE, row), "entropy": row, "grad_loss": loss}
    stats = {f"grad_{name}": row for name in _options.DIFFERENTIABLE if name in flags.stats}
    wanted = Flags(saves=flags.saves).with_gradients(flags.wants())
    return [_backward_pass(saved | more, main_grad, options, wanted) for more in ({}, stats)]


def _saving(group: Group, shard: Shard, now: Local, later: Sequence[Local]) -> tuple[Local, list[Local]]:
    """Returns the passes with exp logits saved between them, if both then fit the budget. All ranks decide alike."""
    *_, most = later  # with all upstream gradients
    try:
        size = find(group, shard, most._replace(saved_bytes=_options.FASTEST)).plan.info.saved_bytes
        saving = now._replace(saved_bytes=size), [one._replace(saved_bytes=size) for one in later]
        for one in (saving[0], *saving[1]):
            find(group, shard, one)
        return saving
    except BudgetTooSmallError:  # find_on_all() reports it where it is not for the saved bytes
        return now, list(later)


def _run(pass_key: PassKey, given: dict[str, Tensor], main_grad: Tensor | None, options: dict[str, Any]) -> Tensors:
    ranks = pass_key.ranks
    assert ranks is not None
    if pass_key.kind != _options.BACKWARD:
        return _forward(pass_key, given, main_grad, options, ranks)
    # The forward pass saved the sums over the vocabulary, so this pass needs no agreement.
    shard, seed = Shard.unpacked(given["shard"])
    group, read = group_of(ranks), {name: tensor for name, tensor in given.items() if name != "shard"}
    local = _backward_pass(_with_seed(_all_tokens(read, ranks, group), seed), main_grad, options, pass_key.flags)
    if "saved" in given:
        local = local._replace(saved_bytes=given["saved"].numel())
    outputs = find(group, shard, local)(local.tensors)
    if ranks.adds_up:
        add_up(group, ranks.group_size, outputs, ranks.sequence_parallel)
    return outputs


def _refuse(ranks: Ranks, error: Exception) -> None:
    _agreement.refuse(group_of(ranks), error)


for _function in _options.FUNCTIONS:
    other_passes[of_group(_function)] = OtherPasses(_run, _results, refuse=_refuse, resolves=True)
