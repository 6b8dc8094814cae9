"""Logitless's CPU backend beside PyTorch's F.cross_entropy(F.linear(...)), interleaved in one process.

    python bench/cpu_vs_torch.py --library build/src/liblogitless.so [--json out.json] [--shape N,V,D ...]

Times are the best of the repetitions, forward + backward and forward alone. Memory is the growth of the peak
resident set over the inputs and gradients, each measured in a process of its own. GFLOP/s count 6NVD (2NVD
forward), whatever a plan computes again; the peak is measured on the spot, before and after.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
SHAPES = ["2048,32768,256", "1024,131072,1024", "512,256000,2304"]
MIB = 1 << 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="liblogitless.so (default: as the logitless package finds it)")
    parser.add_argument("--shape", action="append", metavar="N,V,D", help=f"default: {' '.join(SHAPES)}")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"], help="default: both")
    parser.add_argument("--budget", action="append", type=float, metavar="MIB", help="default: 256 and 32")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-memory", action="store_true", help="skip the memory measurements")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    parser.add_argument("--measure-memory", help=argparse.SUPPRESS)
    return parser.parse_args()


def fma_peaks(threads: int) -> dict[str, float]:
    """GFLOP/s of the fp32 FMA and of the bf16 dot product (or the fp32 one where there is none)."""
    with tempfile.TemporaryDirectory() as folder:
        probe = pathlib.Path(folder) / "fma_peak.so"
        command = [os.environ.get("CC", "cc"), "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"]
        subprocess.run([*command, str(HERE / "fma_peak.c"), "-o", str(probe)], check=True)
        library = ctypes.CDLL(str(probe))
        library.fp32_peak.restype = library.bf16_peak.restype = ctypes.c_double
        fp32 = library.fp32_peak(threads)
        return {"float32": fp32, "bfloat16": max(fp32, library.bf16_peak(threads))}


class Bench:
    """One shape and dtype with its data."""

    def __init__(self, shape: str, dtype: str, threads: int) -> None:
        import logitless
        import torch

        self.torch, self.logitless = torch, logitless
        torch.set_num_threads(threads)
        self.tokens, self.vocab, self.width = (int(x) for x in shape.split(","))
        kind = getattr(torch, dtype)
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(self.tokens, self.width, generator=generator).to(kind).requires_grad_()
        weight = torch.empty(self.vocab, self.width).normal_(0, self.width**-0.5, generator=generator)
        self.weight = weight.to(kind).requires_grad_()
        self.target = torch.randint(0, self.vocab, (self.tokens,), generator=generator)

    def loss(self, method: str):
        if method == "torch":
            functional = self.torch.nn.functional
            return functional.cross_entropy(functional.linear(self.hidden, self.weight), self.target)
        budget = int(float(method.split()[1]) * MIB)
        return self.logitless.linear_cross_entropy(self.hidden, self.weight, self.target, max_workspace_bytes=budget)

    def seconds(self, method: str, backward: bool) -> float:
        self.hidden.grad = self.weight.grad = None
        start = time.perf_counter()
        if backward:
            self.loss(method).backward()
        else:
            with self.torch.no_grad():
                self.loss(method)
        return time.perf_counter() - start


def peak_memory(args: argparse.Namespace, shape: str, dtype: str, method: str) -> float:
    """MiB over inputs and gradients, in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--measure-memory",
        f"{shape};{dtype};{method}",
        "--threads",
        str(args.threads),
    ]
    if args.library:
        command += ["--library", args.library]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_memory(request: str, threads: int) -> None:
    shape, dtype, method = request.split(";")
    small = Bench("64,512,64", dtype, threads)  # what the libraries load for good
    small.seconds(method, backward=True)
    bench = Bench(shape, dtype, threads)
    gradients = (bench.hidden.numel() + bench.weight.numel()) * bench.hidden.element_size()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the peak starts again from what is resident now
    before = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    bench.seconds(method, backward=True)
    status = pathlib.Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    print((peak - before - gradients) / MIB)


def measure(args: argparse.Namespace, shape: str, dtype: str, peak: float) -> list[dict]:
    bench = Bench(shape, dtype, args.threads)
    methods = ["torch", *(f"logitless {budget:g}" for budget in args.budget or [256, 32])]
    best = {(method, backward): float("inf") for method in methods for backward in (True, False)}
    for _ in range(args.repeat):
        for key in best:
            best[key] = min(best[key], bench.seconds(*key))
    flop = 2.0 * bench.tokens * bench.vocab * bench.width
    rows = []
    for method in methods:
        both, forward = best[method, True], best[method, False]
        rows.append(
            {
                "shape": shape,
                "dtype": dtype,
                "method": method,
                "forward_backward_seconds": both,
                "ratio": both / best["torch", True],
                "gflops": 3 * flop / both / 1e9,
                "share_of_peak": 3 * flop / both / 1e9 / peak,
                "forward_seconds": forward,
                "forward_ratio": forward / best["torch", False],
                "forward_share_of_peak": flop / forward / 1e9 / peak,
                "extra_mib": None if args.no_memory else peak_memory(args, shape, dtype, method),
            }
        )
    return rows


def print_row(row: dict) -> None:
    memory = "" if row["extra_mib"] is None else f"{row['extra_mib']:9.0f}"
    print(
        f"{row['shape']:>18} {row['dtype']:>9} {row['method']:>13} {row['forward_backward_seconds']:8.3f} "
        f"{row['ratio']:6.3f} {row['gflops']:7.0f} {row['share_of_peak']:6.0%} {row['forward_seconds']:8.3f} "
        f"{row['forward_ratio']:6.3f} {row['forward_share_of_peak']:6.0%}{memory}",
        flush=True,
    )


def main() -> None:
    args = arguments()
    sys.path.insert(0, str(HERE.parent / "python"))
    if args.library:
        os.environ["LOGITLESS_LIBRARY"] = str(pathlib.Path(args.library).resolve())
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if args.measure_memory:
        measure_memory(args.measure_memory, args.threads)
        return
    peaks = fma_peaks(args.threads)
    print(f"{args.threads} threads, multiply-add peak GFLOP/s: " + ", ".join(f"{k} {v:.0f}" for k, v in peaks.items()))
    print(
        f"{'N,V,D':>18} {'dtype':>9} {'method':>13} {'fwd+bwd':>8} {'ratio':>6} {'GFLOP/s':>7} {'peak':>6} "
        f"{'fwd':>8} {'ratio':>6} {'peak':>6}" + ("" if args.no_memory else f"{'MiB':>9}")
    )
    rows = []
    for shape in args.shape or SHAPES:
        for dtype in args.dtype or ["float32", "bfloat16"]:
            for row in measure(args, shape, dtype, peaks[dtype]):
                print_row(row)
                rows.append(row)
    after = fma_peaks(args.threads)
    print("peak afterwards: " + ", ".join(f"{k} {v:.0f}" for k, v in after.items()))
    if args.json:
        results = {"threads": args.threads, "peak_gflops": peaks, "peak_gflops_after": after, "rows": rows}
        pathlib.Path(args.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
