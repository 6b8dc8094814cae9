"""Processes as the ranks of a group: one set of them for all cases of a size, as each has PyTorch to import. On CUDA
they share a GPU, with gloo, where there are fewer GPUs than ranks; else each has its own, with NCCL."""

import datetime
import importlib
import os
import queue
import time
import traceback

import torch.multiprocessing as mp

SECONDS = 480  # for all cases of a size; a collective that nobody joins ends after a quarter of it


MODULES = {
    "cpu": ("group", "fault", "later", "target", "top_k", "invariance", "thinned", "sequence", "channel"),
    "cuda": ("cuda", "cuda_thinned", "sequence"),
}


def cases_of(size, kind="cpu"):
    """The functions ``case_*(ranks)`` for groups of that size, by name."""
    found = {}
    for module in MODULES[kind]:
        found |= vars(importlib.import_module(f"groups.{module}_cases"))
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

    def __init__(self, rank, size, device, group=None):
        self.rank, self.size, self.device, self._group = rank, size, device, group

    @property
    def group(self):
        import torch.distributed as dist

        return self._group or dist.group.WORLD

    def within(self, group):
        """Ranks of another group of the same processes."""
        return Ranks(self.rank, self.size, self.device, group)


def _work(rank, size, store, results, kind):
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    cases = cases_of(size, kind)  # whose imports come before the group, as docs/parallel.md asks for
    device, backend = torch.device("cpu"), "gloo"
    if kind == "cuda" and torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = "nccl" if torch.cuda.device_count() >= size else "gloo"
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=SECONDS // 4)
    )
    for name, case in cases.items():
        error = ""
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            case(Ranks(rank, size, device))
        except BaseException:
            error = traceback.format_exc()
        results.put((name, rank, error))
        failed = torch.tensor([int(bool(error))], device=device)
        dist.all_reduce(failed)  # ranks that are at other collectives would only fail in others' cases
        if failed.item():
            results.put((name, rank, error))
    dist.destroy_process_group()


def run(size, folder, kind="cpu"):
    """Errors by the names of cases: of each rank, "" where there was none. kind: of MODULES."""
    context = mp.get_context("spawn")
    results = context.Queue()
    arguments = (size, f"file://{folder}/store{size}", results, kind)
    workers = [context.Process(target=_work, args=(rank, *arguments), daemon=True) for rank in range(size)]
    for worker in workers:
        worker.start()
    errors = {name: {} for name in cases_of(size, kind)}
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
