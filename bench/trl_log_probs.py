"""TRL's log-probabilities and entropies of tokens, by its own function and by logitless.trl.patch(), in one process.

    python bench/trl_log_probs.py --device cuda --dtype bfloat16 --shape 8192,151936,4096
    python bench/trl_log_probs.py                                 # on the CPU, float32, 2048,32768,512

Forward and backward of both, as GRPO calls it (gradients of log-probabilities, none of entropies), interleaved; times
are medians. Memory is the peak over inputs and gradients: on a GPU of PyTorch's allocator, on the CPU of the resident
set, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

MIB = 1 << 20
CHUNK = 32768  # columns of TRL's tiles


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--shape", default="2048,32768,512", metavar="N,V,D")
    parser.add_argument("--budget", type=float, default=256, metavar="MIB")
    parser.add_argument("--outputs", default="log_probs,entropy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-of", choices=["trl", "logitless"], help=argparse.SUPPRESS)
    return parser.parse_args()


class Head:
    def __init__(self, options: argparse.Namespace) -> None:
        import logitless.trl
        import trl.trainer.utils

        tokens, vocab, width = (int(n) for n in options.shape.split(","))
        place = {"device": options.device, "dtype": getattr(torch, options.dtype)}
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, width, **place).requires_grad_()
        self.weight = torch.empty(vocab, width, **place).normal_(0, width**-0.5).requires_grad_()
        self.targets = torch.randint(vocab, (tokens,), device=options.device)
        self.upstream = torch.randn(tokens, device=options.device) / tokens
        self.outputs = tuple(options.outputs.split(","))
        logitless.trl.patch(max_workspace_bytes=int(options.budget * MIB))
        found = trl.trainer.utils._ChunkedLogProbFunction
        self.apply = {"trl": found.original.apply, "logitless": found.apply}

    def step(self, which: str) -> float:
        self.hidden.grad = self.weight.grad = None
        self.wait()
        start = time.perf_counter()
        found = self.apply[which](self.hidden, self.weight, None, self.targets, 1.0, CHUNK, None, 1.0, self.outputs)
        found[0].backward(self.upstream)
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.hidden.is_cuda:
            torch.cuda.synchronize()

    def memory(self, which: str) -> float:
        """MiB over inputs and gradients."""
        gradients = sum(t.numel() * t.element_size() for t in (self.hidden, self.weight))
        if self.hidden.is_cuda:
            self.step(which)
            self.hidden.grad = self.weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step(which)
            return (torch.cuda.max_memory_allocated() - before - gradients) / MIB
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = peak()
        self.step(which)
        return (peak() - before - gradients) / MIB


def peak() -> int:
    """Bytes of the resident set at its largest."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def main() -> None:
    options = arguments()
    head = Head(options)
    if options.memory_of:
        print(json.dumps(head.memory(options.memory_of)))
        return
    times: dict[str, list[float]] = {name: [] for name in head.apply}
    for round in range(options.rounds + 1):
        for name, found in times.items():
            seconds = head.step(name)
            if round > 0:  # the first compiles and plans
                found.append(seconds)
    for name, found in times.items():
        if head.hidden.is_cuda:
            extra = head.memory(name)
        else:
            again = [sys.executable, *sys.argv, "--memory-of", name]
            extra = json.loads(subprocess.run(again, check=True, capture_output=True, text=True).stdout)
        print(
            f"{name:9} {1e3 * statistics.median(found):9.1f} ms ({1e3 * min(found):.1f} to {1e3 * max(found):.1f}), "
            f"{extra:.0f} MiB over inputs and gradients"
        )


if __name__ == "__main__":
    main()
