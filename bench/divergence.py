"""Divergence of a student's and a teacher's head: logitless.linear_divergence, TRL's function, and whole logits.

    python bench/divergence.py --device cuda --dtype bfloat16 --shape 8192,151936,2048,4096 --budget 1024 --kernels
    python bench/divergence.py                                    # on the CPU, float32, 512,32768,256,512

Forward and backward of all, interleaved, with an upstream gradient for each token (as TRL's trainer has it) and, of
logitless, with a mean too; times are medians, beside those of the bare products of the plan. Memory is the peak over
inputs and gradients: on a GPU of PyTorch's allocator, on the CPU of the resident set, each in a process of its own.
--kernels adds, on a GPU, one more step of each under torch.profiler: the time of its kernels, by kind.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

MIB = 1 << 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--shape", default="512,32768,256,512", metavar="N,V,D,E", help="E: the teacher's width")
    parser.add_argument("--budget", type=float, default=64, metavar="MIB")
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip", default="", help="names that are left out, such as whole,trl")
    parser.add_argument("--kernels", action="store_true", help="on a GPU, also the time of each kind of kernel")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def whole(student, weight, teacher, teacher_weight, beta: float) -> torch.Tensor:
    log_p, log_q = ((h @ w.T).float().log_softmax(-1) for h, w in ((student, weight), (teacher, teacher_weight)))
    if beta in (0.0, 1.0):
        a, b = (log_q, log_p) if beta == 0 else (log_p, log_q)
        return (a.exp() * (a - b)).sum(-1)
    log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
    return (beta * log_q.exp() * (log_q - log_m) + (1 - beta) * log_p.exp() * (log_p - log_m)).sum(-1)


class Heads:
    def __init__(self, options: argparse.Namespace) -> None:
        import logitless

        tokens, vocab, width, teacher_width = (int(n) for n in options.shape.split(","))
        place = {"device": options.device, "dtype": getattr(torch, options.dtype)}
        torch.manual_seed(0)
        self.student = torch.randn(tokens, width, **place).requires_grad_()
        self.weight = torch.empty(vocab, width, **place).normal_(0, width**-0.5).requires_grad_()
        self.teacher = torch.randn(tokens, teacher_width, **place)
        self.teacher_weight = torch.empty(vocab, teacher_width, **place).normal_(0, teacher_width**-0.5)
        self.upstream = torch.randn(tokens, device=options.device) / tokens
        heads = (self.student, self.weight, self.teacher, self.teacher_weight)
        budget, beta = int(options.budget * MIB), options.beta

        def fused(reduction: str) -> Callable[[], torch.Tensor]:
            return lambda: logitless.linear_divergence(
                *heads, beta=beta, reduction=reduction, max_workspace_bytes=budget
            )

        self.methods = {
            "logitless, 4 + 2 products": fused("none"),
            "logitless, a mean": fused("mean"),
            "whole logits": lambda: whole(*heads, beta),
        }
        try:
            from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as Trl
        except ImportError:
            print("TRL's function is not installed")
        else:
            call = (self.student, self.weight, None, self.teacher, self.teacher_weight, None, beta)
            self.methods["TRL"] = lambda: Trl.apply(*call)[0]
        skipped = [name.lower() for name in options.skip.split(",") if name]
        self.methods = {n: m for n, m in self.methods.items() if not any(s in n.lower() for s in skipped)}

    def products(self) -> float:
        """Seconds of the four products of the student and two of the teacher, of 512 rows at a time."""
        rows, size = self.student.shape[0], 512
        out = torch.empty(size, self.weight.shape[0], device=self.weight.device, dtype=self.weight.dtype)
        with torch.no_grad():
            start = self.now()
            for first in range(0, rows, size):
                part = slice(first, min(first + size, rows))
                h, dz = self.student[part], out[: part.stop - first]
                for _ in range(2):
                    torch.mm(h, self.weight.T, out=dz)
                    torch.mm(self.teacher[part], self.teacher_weight.T, out=dz)
                dz @ self.weight
            for columns in self.weight.split(8192):
                torch.empty(rows, columns.shape[0], device=h.device, dtype=h.dtype).fill_(0.5).T @ self.student
            return self.now() - start

    def step(self, name: str) -> float:
        self.student.grad = self.weight.grad = None
        start = self.now()
        loss = self.methods[name]()
        loss.backward(self.upstream if loss.dim() else None)
        return self.now() - start

    def now(self) -> float:
        if self.student.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def memory(self, name: str) -> float:
        """MiB over inputs and gradients."""
        gradients = sum(t.numel() * t.element_size() for t in (self.student, self.weight))
        if self.student.is_cuda:
            self.step(name)
            self.student.grad = self.weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step(name)
            return (torch.cuda.max_memory_allocated() - before - gradients) / MIB
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = peak()
        self.step(name)
        return (peak() - before - gradients) / MIB

    def print_kernels(self, name: str) -> None:
        """Of one step, by kind; with the rate of the bytes that the row kernels have to move."""
        from torch.profiler import ProfilerActivity, profile

        rows, vocab = self.student.shape[0], self.weight.shape[0]
        logits = 2 * 4 * rows * vocab  # of both heads, in float32
        size = self.student.element_size()
        moved = {"values": 2 * logits, "gradients": logits + size * rows * vocab}
        self.step(name)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            seconds = self.step(name)
        kinds: dict[str, list[float]] = {}
        for event in found.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kind = next((k for k, pattern in KINDS.items() if re.search(pattern, event.name)), event.name[:60])
                kinds.setdefault(kind, []).append(event.time_range.elapsed_us() / 1e3)
        total = sum(map(sum, kinds.values()))
        print(f"  {name}: {1e3 * seconds:.1f} ms with the profiler, of which {total:.1f} ms are kernels")
        for kind, times in sorted(kinds.items(), key=lambda item: -sum(item[1])):
            rate = f", {moved[kind] / sum(times) / 1e9:.2f} TB/s" if kind in moved else ""
            print(f"  {sum(times):8.2f} ms {100 * sum(times) / total:5.1f}%  {kind}, {len(times)} kernels{rate}")


# Kinds of kernels by their names; what none of these matches is named as it is.
KINDS = {
    "values": "divergence_values",
    "gradients": "divergence_gradient",
    "products": "gemm|nvjet|cutlass|xmma|splitK",
    "copies, sums and scalings": "elementwise|Memcpy|Memset|index|reduce|copy",
}


def peak() -> int:
    """Bytes of the resident set at its largest."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def main() -> None:
    options = arguments()
    heads = Heads(options)
    if options.memory_of:
        print(json.dumps(heads.memory(options.memory_of)))
        return
    times: dict[str, list[float]] = {name: [] for name in heads.methods}
    bare: list[float] = []
    for round in range(options.rounds + 1):
        bare.append(heads.products())
        for name, found in times.items():
            seconds = heads.step(name)
            if round > 0:  # the first compiles and plans
                found.append(seconds)
    print(f"{'bare products, 4 + 2':26} {1e3 * statistics.median(bare[1:]):9.1f} ms")
    for name, found in times.items():
        if heads.student.is_cuda:
            extra = heads.memory(name)
        else:
            again = [sys.executable, *sys.argv, "--memory-of", name]
            extra = json.loads(
                subprocess.run(again, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            )
        print(
            f"{name:26} {1e3 * statistics.median(found):9.1f} ms ({1e3 * min(found):.1f} to {1e3 * max(found):.1f}), "
            f"{extra:.0f} MiB over inputs and gradients"
        )
        if options.kernels and heads.student.is_cuda:
            heads.print_kernels(name)


if __name__ == "__main__":
    main()
