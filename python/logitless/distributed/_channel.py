"""Small all-gathers in host memory between the ranks of a group, beside the collectives of their devices."""

from __future__ import annotations

import atexit
import os
import pickle
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ..native import NAMESPACE

_WAITS = (
    "logitless.distributed: gloo does not connect all hosts of the group, so each call waits for the device. Name a "
    "network interface in GLOO_SOCKET_IFNAME, or give the group a backend for the host: "
    "init_process_group('cpu:gloo,cuda:nccl')"
)

_functions: Any = vars(dist)  # names differ between versions of PyTorch
# Both take (output, input, group=). Outputs: all ranks' inputs one after another; the rank's part of their sum.
all_gather = _functions.get("all_gather_single") or dist.all_gather_into_tensor
reduce_scatter = _functions.get("reduce_scatter_single") or dist.reduce_scatter_tensor

Group = Any  # torch.distributed.ProcessGroup, which a PyTorch built without distributed lacks


class Channel:
    """A channel between all ranks of a group.

    It uses the group's backend for the host, or a gloo connection of its own if the group has none. Neither waits for a
    device. If that connection fails, it uses the group's backend for the device, and the host waits for the device.
    """

    def __init__(self, group: Group) -> None:
        self.ranks = dist.get_world_size(group)
        self._device = torch.device("cpu")
        self._link: Any = weakref.ref(group)
        if not _has_host_backend(group):
            self._device = _device_of(group)
            beside = self._beside(group)
            if beside is None:
                warnings.warn(_WAITS, RuntimeWarning, stacklevel=2)
            else:
                self._device, self._link = torch.device("cpu"), lambda: beside

    def numbers(self, mine: list[int]) -> list[list[int]]:
        """Gathers the numbers of every rank. All ranks must pass equally many."""
        return [part.tolist() for part in self._gathered(torch.tensor(mine, dtype=torch.int64, device="cpu"))]

    def objects(self, mine: Any) -> list[Any]:
        text = pickle.dumps(mine)
        sizes = [size for (size,) in self.numbers([len(text)])]
        padded = bytearray(text).ljust(max(sizes), b"\0")
        parts = self._gathered(torch.frombuffer(padded, dtype=torch.uint8))
        return [pickle.loads(bytes(part[:size].tolist())) for part, size in zip(parts, sizes)]

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        mine = mine.to(self._device)
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        self._link().allgather([every], [mine]).wait()
        return every

    def _beside(self, group: Group) -> Any:
        """Returns a gloo connection of all ranks, or None on all of them."""
        store, connection = (
            distributed_c10d.PrefixStore(NAMESPACE, distributed_c10d._get_process_group_store(group)),
            None,
        )
        if not self._on_all(_has_gloo_device()):  # a rank without a device would keep the others waiting
            return None
        backend = group._get_backend(self._device)
        timeout = getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)
        try:
            connection = dist.ProcessGroupGloo(store, dist.get_rank(group), self.ranks, timeout)
        except RuntimeError:
            pass
        return connection if self._on_all(connection is not None) else None

    def _on_all(self, is_so: bool) -> bool:
        return all(number for (number,) in self.numbers([int(is_so)]))


def _has_host_backend(group: Group) -> bool:
    return any(device.type == "cpu" for device in group._device_types)


def _device_of(group: Group) -> torch.device:
    return torch.device(group._device_types[0].type)


def _has_gloo_device() -> bool:
    """Whether gloo finds an address of this host, chosen as PyTorch chooses it."""
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    try:
        for name in names.split(",") if names else ():
            dist.ProcessGroupGloo.create_device(interface=name)
        if not names:
            dist.ProcessGroupGloo.create_default_device()
    except (AttributeError, RuntimeError):  # gloo not built; no such interface; a host without an address
        return False
    return True


_channels: weakref.WeakKeyDictionary[Group, Channel] = weakref.WeakKeyDictionary()
atexit.register(_channels.clear)  # gloo's threads must end before Python does


def channel_of(group: Group) -> Channel:
    channel = _channels.get(group)
    if channel is None:
        channel = _channels[group] = Channel(group)
    return channel
