"""Thinned gradients beside the exact ones on the CPU backend: forward + backward, interleaved in one process.

    python bench/cpu_thinned.py --library build/src/liblogitless.so [--shape N,V,D] [--data peaky|trained|uniform]

Data: "peaky", some 16 likely columns a token, drawn by Zipf's law from anywhere in the vocabulary; "trained", the
same with 12% of the mass spread over all columns by Zipf's law, ids in the order of frequency; "uniform", a model
before its first step. Times are medians, beside that of the loss alone; errors are of one draw, over the exact
gradient's norm.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="liblogitless.so (default: as the logitless package finds it)")
    parser.add_argument("--shape", default="1024,131072,1024", metavar="N,V,D")
    parser.add_argument("--data", action="append", choices=["peaky", "trained", "uniform"], help="default: all")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"], help="default: both")
    parser.add_argument("--threshold", action="append", type=int, metavar="K", help="2^-K; default: 9 and 10")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


def make_data(kind: str, tokens: int, vocab: int, width: int, dtype: str):
    """hidden, classifier and targets; the first column of both makes the logits that all tokens share."""
    import torch

    generator = torch.Generator().manual_seed(0)
    zipf = 1.0 / torch.arange(1, vocab + 1, dtype=torch.float64)
    zipf /= zipf.sum()
    weight = torch.randn(vocab, width, generator=generator)
    weight[:, 0] = 0
    weight /= weight.norm(dim=1, keepdim=True)
    candidates = 16
    ids = torch.multinomial(zipf, tokens * candidates, replacement=True, generator=generator).view(tokens, -1)
    if kind == "peaky":
        ids = torch.randperm(vocab, generator=generator)[ids]
    rank = torch.arange(1, candidates + 1, dtype=torch.float32)
    likely = torch.stack([weight[ids[:, r]] for r in range(candidates)], dim=1)  # [tokens, candidates, width]
    hidden = torch.einsum("r,nrd->nd", 16.0 - rank.log(), likely)
    if kind == "uniform":
        hidden.normal_(0, 0.02, generator=generator)
    if kind == "trained":
        weight[:, 0] = zipf.log().float()
        hidden[:, 0] = 1
        for _ in range(3):  # to the height of the likely columns that leaves 12% to the others
            z = hidden[:64] @ weight.T
            is_likely = torch.zeros_like(z).scatter_(1, ids[:64], 1).bool()
            tail = z.masked_fill(is_likely, -torch.inf).logsumexp(1)
            top = z.masked_fill(~is_likely, -torch.inf).logsumexp(1)
            hidden += (tail - top + math.log(0.88 / 0.12)).mean() * likely.sum(1)
            hidden[:, 0] = 1
    pick = torch.multinomial(1 / rank, tokens, replacement=True, generator=generator)
    target = ids[torch.arange(tokens), pick]
    return hidden.to(getattr(torch, dtype)), weight.to(getattr(torch, dtype)), target


class Run:
    """One plan with its workspace; outputs are the caller's. Threshold 0: exact gradients; None: the loss alone."""

    def __init__(self, hidden, weight, target, threads: int, threshold: float | None) -> None:
        import torch
        from logitless import native
        from logitless import options as _options

        self.c, self.run = native, native.run
        dtype = _options.F32 if hidden.dtype == torch.float32 else _options.BF16
        self.backward = threshold is not None
        spec = native.Spec(
            _options.FORWARD_BACKWARD if self.backward else _options.FORWARD,
            len(target),
            *weight.shape,
            hidden_dtype=dtype,
            classifier_dtype=dtype,
            d_hidden_dtype=dtype,
            d_classifier_dtype=dtype,
            want_d_hidden=self.backward,
            want_d_classifier=self.backward,
            gradient=1 if threshold else 0,
            threshold=threshold or 1.0,
        )
        self.plan = native.Plan(spec, threads, "cpu")
        info = self.plan.info
        self.workspace_bytes = info.workspace_bytes
        self.config = info.config
        self.workspace = torch.zeros(info.workspace_bytes + 64, dtype=torch.uint8)
        self.tensors = (hidden, weight, target)
        self.kept = torch.zeros(len(target), dtype=torch.int32)
        self.loss = torch.zeros(1)
        self.thinned = bool(threshold)

    def seconds(self, d_hidden, d_weight) -> float:
        buffers = self.c.schema().buffers()
        buffers.hidden, buffers.classifier, buffers.targets = (each.data_ptr() for each in self.tensors)
        buffers.loss = self.loss.data_ptr()
        if self.backward:
            buffers.d_hidden, buffers.d_classifier = d_hidden.data_ptr(), d_weight.data_ptr()
        if self.thinned:
            buffers.kept_count = self.kept.data_ptr()
        address = -(-self.workspace.data_ptr() // 64) * 64
        start = time.perf_counter()
        self.run(self.plan, buffers, address)
        return time.perf_counter() - start


def measure(args: argparse.Namespace, data: str, dtype: str) -> None:
    import torch

    tensors = make_data(data, *(int(x) for x in args.shape.split(",")), dtype)
    runs = {"exact": Run(*tensors, args.threads, 0), "loss alone": Run(*tensors, args.threads, None)}
    for k in args.threshold or [9, 10]:
        runs[f"thinned 2^-{k}"] = Run(*tensors, args.threads, 2.0**-k)
    gradients = {name: [torch.zeros_like(each) for each in tensors[:2]] for name in runs}
    times = {name: [] for name in runs}
    for _ in range(args.repeat):
        for name, run in runs.items():
            times[name].append(run.seconds(*gradients[name]))
    exact = statistics.median(times["exact"])
    print(f"{args.shape} {dtype} {data}, loss {runs['exact'].loss.item():.3f}, {runs['exact'].config}")
    for name, run in runs.items():
        seconds = statistics.median(times[name])
        errors = [
            ((got.float() - true.float()).norm() / true.float().norm()).item()
            for got, true in zip(gradients[name], gradients["exact"], strict=True)
        ]
        kept = run.kept.float().mean().item()
        print(
            f"  {name:14} {seconds:7.3f} s  {seconds / exact:5.3f} x exact  {run.workspace_bytes / 2**20:6.0f} MiB"
            + (f"  kept {kept:6.0f}  error dE {errors[0]:.2%} dC {errors[1]:.2%}" if run.thinned else ""),
            flush=True,
        )


def main() -> None:
    args = arguments()
    if args.library:
        os.environ["LOGITLESS_LIBRARY"] = args.library
    for data in args.data or ["peaky", "trained", "uniform"]:
        for dtype in args.dtype or ["float32", "bfloat16"]:
            measure(args, data, dtype)


if __name__ == "__main__":
    main()
