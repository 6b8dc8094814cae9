#!/usr/bin/env python3
"""Loss and gradients of a head in JAX: logitless beside three bare products, whole logits and a chunked scan.

python bench/gpu/jax_head.py [N,V,D ...] [--budgets default,256] [--rounds 7] [--torch] [--sparsified]

A round times every method once, in random order, each as a few calls in one queue. Ratios are over the three products
of the same run. Memory is that of a process of its own: temporary buffers of the compiled step, and the device's peak
beyond inputs and gradients. --torch adds PyTorch's call.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import logitless.jax

SHAPES = ("8192,128256,4096", "32768,128256,2560")
MIB = 1 << 20
Method = Callable[[Any, Any, Any], Any]


def whole(hidden: Any, weight: Any, targets: Any) -> Any:
    logits = jnp.einsum("ij,kj->ik", hidden, weight, preferred_element_type=jnp.float32)
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]).mean()


def scan(hidden: Any, weight: Any, targets: Any, chunk: int) -> Any:
    @jax.checkpoint
    def body(total: Any, part: Any) -> Any:
        return total + whole(part[0], weight, part[1]) * chunk, None

    parts = hidden.reshape(-1, chunk, hidden.shape[1]), targets.reshape(-1, chunk)
    return jax.lax.scan(body, jnp.float32(0), parts)[0] / hidden.shape[0]


def methods(budgets: list[str], sparsified: bool) -> dict[str, Method]:
    """Returns losses by name."""
    found: dict[str, Method] = {}
    for budget in budgets:
        given = {"default": None, "fastest": "fastest"}.get(budget, f"{budget}MiB")
        ours = functools.partial(logitless.jax.linear_cross_entropy, max_workspace_bytes=given)
        found[f"logitless {budget}"] = ours
    if sparsified:
        ours = functools.partial(logitless.jax.linear_cross_entropy, gradient="always-sparsified", seed=1)
        found["logitless sparsified"] = ours
    found["logitless none, later"] = lambda *a: logitless.jax.linear_cross_entropy(*a, reduction="none").mean()
    return found | {"whole logits": whole, **{f"scan {n}": functools.partial(scan, chunk=n) for n in (1024, 4096)}}


def inputs(shape: str) -> tuple[Any, Any, Any]:
    tokens, vocab, size = map(int, shape.split(","))
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, size), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (vocab, size), jnp.bfloat16) / jnp.bfloat16(size**0.5)
    return hidden, weight, jax.random.randint(keys[2], (tokens,), 0, vocab)


def step(method: Method) -> Any:
    return jax.jit(jax.value_and_grad(method, (0, 1)))


def products(hidden: Any, weight: Any) -> dict[str, Callable[[], Any]]:
    dz = jnp.ones((hidden.shape[0], weight.shape[0]), jnp.bfloat16)
    logits = jax.jit(lambda e, c: jnp.einsum("ij,kj->ik", e, c))
    d_hidden, d_weight = jax.jit(lambda z, c: z @ c), jax.jit(lambda z, e: jnp.einsum("ij,ik->jk", z, e))
    return {
        "logits": lambda: logits(hidden, weight),
        "d_hidden": lambda: d_hidden(dz, weight),
        "d_weight": lambda: d_weight(dz, hidden),
    }


def torch_call(arrays: tuple[Any, Any, Any]) -> Callable[[], Any]:
    """Returns PyTorch's call on the same memory. Its result waits for the device, as block_until_ready does."""
    import torch
    from logitless import linear_cross_entropy

    hidden, weight, targets = (torch.from_dlpack(array) for array in arrays)
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()

    def call() -> Any:
        for leaf in leaves:
            leaf.grad = None
        linear_cross_entropy(*leaves, targets).backward()
        return torch.cuda.synchronize

    return call


def queue_ms(call: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        last = call()
    last() if callable(last) else jax.block_until_ready(last)
    return (time.perf_counter() - start) / calls * 1e3


def memory(shape: str, name: str, budgets: list[str]) -> None:
    """Prints a method's temporary buffers and the device's peak beyond inputs and gradients, in MiB; the child's part.

    The peak has XLA's trials of matmul algorithms in it. Zeros need no temporary memory to be made.
    """
    tokens, vocab, size = map(int, shape.split(","))
    arrays = jnp.zeros((tokens, size), jnp.bfloat16), jnp.zeros((vocab, size), jnp.bfloat16), jnp.zeros(tokens, int)
    compiled = step(methods(budgets, True)[name]).lower(*jax.block_until_ready(arrays)).compile()
    _, gradients = jax.block_until_ready(compiled(*arrays))
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    held = sum(array.nbytes for array in (*arrays, *gradients))
    temporary = compiled.memory_analysis().temp_size_in_bytes
    print(json.dumps({"temporary": temporary / MIB, "peak": (peak - held) / MIB}))


def measure(shape: str, args: argparse.Namespace) -> None:
    budgets = args.budgets.split(",")
    peaks = {}
    for name in methods(budgets, args.sparsified):  # before this process takes memory
        command = [sys.executable, __file__, shape, "--child", name, "--budgets", args.budgets]
        environment = os.environ | {"JAX_TRACEBACK_FILTERING": "off"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        peaks[name] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
        if done.returncode != 0:
            print(f"{name}: {done.stderr.strip().splitlines()[-1][:160]}", file=sys.stderr)
    arrays = inputs(shape)
    runs = {name: step(method) for name, method in methods(budgets, args.sparsified).items() if peaks[name]}
    calls = {name: functools.partial(run, *arrays) for name, run in runs.items()} | products(*arrays[:2])
    if args.torch:
        calls["logitless default, PyTorch"] = torch_call(arrays)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():  # compiles, and records the library's CUDA graphs
        queue_ms(call, 3)
    for _ in range(args.rounds):
        for name in random.sample(list(calls), len(calls)):
            times[name].append(queue_ms(calls[name], args.calls))
    middle = {name: statistics.median(values) for name, values in times.items()}
    three = sum(middle.pop(name) for name in ("logits", "d_hidden", "d_weight"))
    print(f"{shape}: three products {three:.2f} ms; {jax.devices()[0].device_kind}, jax {jax.__version__}")
    for name, milliseconds in middle.items():
        peak = peaks.get(name)
        more = f", temporary {peak['temporary']:.0f} MiB, peak {peak['peak']:.0f} MiB" if peak else ""
        more += f", loss {float(runs[name](*arrays)[0]):.6f}" if name in runs else ""
        spread = max(times[name]) / min(times[name]) - 1
        print(f"  {name:28s} {milliseconds:8.2f} ms, x {milliseconds / three:.3f} (+-{spread:.1%}){more}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES, help="N,V,D")
    parser.add_argument("--budgets", default="default,fastest,256", help="MiB, default or fastest")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=5, help="calls in one queue")
    parser.add_argument("--torch", action="store_true", help="also time PyTorch's call, in this process")
    parser.add_argument("--sparsified", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for shape in args.shapes:
        if args.child:
            memory(shape, args.child, args.budgets.split(","))
        else:
            measure(shape, args)


if __name__ == "__main__":
    main()
