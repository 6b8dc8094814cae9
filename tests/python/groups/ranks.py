"""Processes as the ranks of a gloo group: one set of them for all cases of a size, as each has PyTorch to import."""

import datetime
import importlib
import os
import queue
import time
import traceback

import torch.multiprocessing as mp

SECONDS = 480  # for all cases of a size; a collective that nobody joins ends after a quarter of it


MODULES = [f"groups.{name}_cases" for name in ("group", "fault", "later", "target", "top_k", "invariance", "thinned")]


def cases_of(size):
    """The functions ``case_*(ranks)`` for groups of that size, by name."""
    found = {}
    for module in MODULES:
        found |= vars(importlib.import_module(module))
    return {
        name: case
        for name, case in found.items()
        if name.startswith("case_") and size in getattr(case, "sizes", (2, 3))
    }


def sizes(*numbers):
    """Of the groups that run a case; by default 2 and 3."""

    def mark(case):
        case.sizes = numbers
        return case

    return mark


class Ranks:
    """What a case knows of the group that runs it."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    @property
    def group(self):
        import torch.distributed as dist

        return dist.group.WORLD


def _work(rank, size, store, results):
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=SECONDS // 4)
    )
    for name, case in cases_of(size).items():
        error = ""
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            case(Ranks(rank, size))
        except BaseException:
            error = traceback.format_exc()
        results.put((name, rank, error))
        failed = torch.tensor([int(bool(error))])
        dist.all_reduce(failed)  # ranks that are at other collectives would only fail in others' cases
        if failed.item():
            results.put((name, rank, error))
    dist.destroy_process_group()


def run(size, folder):
    """Errors by the names of cases: of each rank, "" where there was none."""
    context = mp.get_context("spawn")
    results = context.Queue()
    arguments = (size, f"file://{folder}/store{size}", results)
    workers = [context.Process(target=_work, args=(rank, *arguments), daemon=True) for rank in range(size)]
    for worker in workers:
        worker.start()
    errors = {name: {} for name in cases_of(size)}
    end = time.monotonic() + SECONDS
    while any(len(found) < size for found in errors.values()) and time.monotonic() < end:
        try:
            name, rank, error = results.get(timeout=1)
            errors[name][rank] = errors[name].get(rank) or error
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                break
    for worker in workers:
        worker.join(10)
        if worker.is_alive():
            worker.kill()
    return errors
