"""The cases of groups, and what a case knows about the group that runs it."""

import importlib

import torch
import torch.distributed as dist

MODULES = {
    "cpu": (
        "group",
        "fault",
        "later",
        "target",
        "top_k",
        "sample",
        "candidate",
        "divergence",
        "pair",
        "invariance",
        "sparsified",
        "sequence",
        "channel",
    ),
    "cuda": ("cuda", "cuda_sparsified", "sequence"),
}


def cases_of(size, kind="cpu"):
    """Returns the functions ``case_*(ranks)`` for groups of that size, by name."""
    names = {}
    for module in MODULES[kind]:
        names |= vars(importlib.import_module(f"groups.{module}_cases"))
    return {
        name: case
        for name, case in names.items()
        if name.startswith("case_") and size in getattr(case, "sizes", (2, 3))
    }


def sizes(*numbers):
    """Sets the sizes of groups that run a case; the default is 2 and 3."""

    def mark(case):
        case.sizes = numbers
        return case

    return mark


class Ranks:
    def __init__(self, rank, size, device, group=None):
        self.rank, self.size, self.device, self._group = rank, size, device, group

    @property
    def group(self):
        return self._group or dist.group.WORLD

    def part(self, data):
        """Returns this rank's part of the data's rows."""
        count = data.input.shape[0] // self.size
        return slice(self.rank * count, (self.rank + 1) * count)

    def gather(self, value):
        """Gathers every rank's tensor."""
        every = [None] * self.size
        dist.all_gather_object(every, value)
        return every

    def within(self, group):
        """Makes ranks of another group of the same processes."""
        return Ranks(self.rank, self.size, self.device, group)


def run(mesh, name, kind):
    """Runs a case on one rank."""
    index = f":{torch.cuda.current_device()}" if mesh.device_type == "cuda" else ""
    cases_of(mesh.size(), kind)[name](Ranks(mesh.get_rank(), mesh.size(), torch.device(mesh.device_type + index)))
