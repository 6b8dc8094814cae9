"""Processes of a group, kept for all tests: a function runs in each, and its results return on the CPU.

On CPUs they use gloo. On CUDA each has its own GPU and NCCL; with fewer GPUs they share one and use gloo. A rank that
raises is reported with its traceback. A rank that hangs is killed: no test waits longer than TIMEOUT.
"""

import datetime
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback

TIMEOUT = 120.0  # seconds per function


def _serve(rank, world, device, file, pipe):
    import logitless.distributed  # noqa: F401, before the group, as docs/distributed.md asks for
    import torch
    import torch.distributed as dist
    from torch.utils._pytree import tree_map_only

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    timeout = datetime.timedelta(seconds=TIMEOUT / 2)
    backend = "nccl" if device == "cuda" and torch.cuda.device_count() >= world else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world, timeout=timeout)
    mesh = dist.init_device_mesh(device, (world,), mesh_dim_names=("ranks",))
    while True:
        module, name, arguments = pipe.recv()
        try:
            torch.manual_seed(0)
            torch._dynamo.reset()
            function = getattr(importlib.import_module(module), name)
            pipe.send((True, tree_map_only(torch.Tensor, torch.Tensor.cpu, function(mesh, *arguments))))
        except Exception:
            pipe.send((False, traceback.format_exc()))


class Ranks:
    """The processes, started by the first call and ended by close()."""

    def __init__(self, world, device="cpu"):
        self.world, self.device = world, device
        self._processes = []
        self._pipes = []

    def _start(self):
        context = multiprocessing.get_context("forkserver")  # it imports PyTorch once for all
        context.set_forkserver_preload(["torch", "torch.distributed.tensor.parallel", "torch.distributed.fsdp"])
        file = os.path.join(tempfile.mkdtemp(), "store")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, self.device, file, theirs), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def __call__(self, function, *arguments):
        """Returns the result of ``function(mesh, *arguments)`` on each rank. The function belongs to a module, and
        returns no DTensors."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, arguments))
        end = time.monotonic() + TIMEOUT
        results, failed = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                failed.append(f"rank {rank}: no answer in {TIMEOUT} s")
                continue
            try:
                good, value = pipe.recv()
            except EOFError:
                good, value = False, f"ended with {self._processes[rank].exitcode}"
            (results if good else failed).append(value if good else f"rank {rank}: {value}")
        if failed:
            self.close()
            raise AssertionError("\n".join(failed))
        return results
