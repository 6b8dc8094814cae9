"""Runs of a rank's shard with the other ranks of its group, and what becomes of their gradients."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .. import native
from ..errors import CommunicationError
from ..native import Cache
from ..options import Flags
from ..run import DTYPES, Run, Tensors, layouts, place, stream_of
from ._agreement import Shard, compare_plans
from ._channel import Group
from ._collectives import all_gather, reduce_scatter


class _Exchange:
    """The communicator of one run: its all-gather is that of torch.distributed, on the run's workspace, and so is its
    all-reduce, on what the run writes."""

    def __init__(self, group: Group, shard: Shard, workspace: Tensor, written: Tensors) -> None:
        self._group, self._shard, self._workspace, self._written = group, shard, workspace, written
        self.error: BaseException | None = None
        self._callbacks = native.ALL_GATHER(self._all_gather), native.ALL_REDUCE(self._all_reduce)
        self.communicator: Any = native.Communicator()
        self.communicator.rank, self.communicator.size = shard.rank, shard.ranks
        self.communicator.all_gather, self.communicator.all_reduce = self._callbacks

    def close(self) -> None:
        """Callbacks know this object, which knows them: without an end of that the workspace would live until Python
        looks for cycles."""
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
    """A rank's run is made for these; only the layouts of tensors count."""

    kind: int
    tensors: Tensors
    options: dict[str, Any]
    flags: Flags
    function: str


class GroupRun(Run):
    """One pass of a rank's shard over tensors of one layout. Runs outlive groups, and keep none of them alive: gloo's
    threads must end before Python does."""

    def __init__(self, group: Group, shard: Shard, asked: Local) -> None:
        self.group, self._shard = weakref.ref(group), shard
        super().__init__(*asked)

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
            native.run_group(self.plan, buffers, workspace.data_ptr(), stream, exchange.communicator)
        except CommunicationError as error:
            raise error from exchange.error
        finally:
            exchange.close()


_runs: Cache[Any, GroupRun] = Cache(256)


def find(group: Group, shard: Shard, asked: Local) -> GroupRun:
    kind, tensors, options, flags, function = asked
    hidden, weight = tensors["hidden"], tensors["classifier"]
    key = (group.group_name, id(group), shard, kind, flags, function, hidden.device, place(hidden, weight))
    key = (*key, *options.values(), *tensors, *layouts(tensors.values()))
    found = _runs.get(key)
    if found is None or found.group() is not group:  # another group may have the id of one that is gone
        found = GroupRun(group, shard, asked)
        _runs.put(key, found)
    return found


def find_on_all(group: Group, shard: Shard, asked: Local, later: Sequence[Local]) -> GroupRun:
    """The same where every rank has one, and those of passes that come later; else all of them raise."""
    found, error = None, None
    try:
        passes = [functools.partial(find, group, shard, one) for one in (asked, *later)]
        found = native.enough(*passes)[0]
    except Exception as refused:
        error = refused
    compare_plans(group, None if found is None else found.plan.info, error)
    assert found is not None
    return found


def gathered(group: Group, ranks: int, part: Tensor) -> Tensor:
    """All ranks' parts [n, ...] one after another."""
    part = part.contiguous()
    whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    all_gather(whole, part, group=group)
    return whole


def add_up(group: Group, ranks: int, found: Tensors, sequence_parallel: bool) -> None:
    """Parts of gradients that are sums over ranks become these: of the rank's own tokens with sequence_parallel."""
    if "d_hidden" in found:
        part = found["d_hidden"]
        if sequence_parallel:
            own = part.new_empty((part.shape[0] // ranks, *part.shape[1:]))
            reduce_scatter(own, part, group=group)
            found["d_hidden"] = own
        else:
            dist.all_reduce(part, group=group)
    for name in ("d_scale", "d_temperature"):
        if name in found:
            dist.all_reduce(found[name], group=group)
