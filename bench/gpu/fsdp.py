"""Whole training steps of a transformers model under FSDP2, with its own head and with ours, interleaved.

    python bench/gpu/fsdp.py [--ranks 2] [--model llama-1b] [--rounds 8] [--minutes 3] [--json FILE]
    python bench/gpu/fsdp.py --show FILE
    python bench/gpu/fsdp.py --device cpu --rounds 1      tries it out, with gloo and a tiny model

Every rank is a process with its own GPU and its own sequences. Each layer is a unit of FSDP2; the root holds the rest.
The heads are the model's own (stock), ours from logitless.transformers.patch, ours with 256 MiB, and ours with
sparsified gradients. Each round takes two steps with each head, including AdamW with a learning rate of 0. A head's
time is the maximum over ranks. Memory is the allocator's peak of a step above weights and optimizer, also the maximum
over ranks. "Of the head" is the part above a step whose head computes the logits of each sequence's last token only.
LOGITLESS_LIBRARY names liblogitless.so.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from harness import parser
from ranks import in_turns, main, of_all, out_of_time
from table import markdown, number

NO_HEAD = "no head"


def losses(model: Any, tokens: Any) -> dict[str, Any]:
    """Returns each head's loss function."""
    from step_heads import MIB, THRESHOLD, logitless_patch, patched, stock

    return {
        "stock": stock(model, tokens),
        "logitless": patched(logitless_patch(), model, tokens),
        "logitless 256 MiB": patched(logitless_patch(max_workspace_bytes=256 * MIB), model, tokens),
        "logitless sparsified": patched(
            logitless_patch(gradient="always-sparsified", threshold=THRESHOLD), model, tokens
        ),
        NO_HEAD: lambda: model(input_ids=tokens, logits_to_keep=1).logits.float().mean(),
    }


def import_all(asked: argparse.Namespace) -> None:
    import logitless.transformers  # noqa: F401

    from step_models import BY_NAME, import_model

    import_model(BY_NAME[asked.model])


def measure(asked: argparse.Namespace, device: str, rank: int, end: float, save: Callable[[Any], None]) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from clock import Clock
    from step_models import BY_NAME, build_model, random_tokens, sized

    spec = sized(BY_NAME[asked.model], asked.device == "cpu")
    model: Any = build_model(spec, device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    tokens = random_tokens(spec, device).roll(rank, dims=1)  # each rank has its own tokens
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    clock = Clock(device)
    heads: dict[str, Any] = {}
    steps = {}
    for name, loss_of in losses(model, tokens).items():

        def step(loss_of: Any = loss_of) -> Any:
            loss = loss_of()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        step()  # gathers, plans and compiles
        loss, peak = step().double().item(), clock.peak_bytes(step)
        peaks = of_all(peak, asked.ranks)
        heads[name] = {"loss": loss, "peak_bytes": max(peaks) if peak is not None else None, "ms": []}
        steps[name] = step
    for _ in range(asked.rounds):
        if out_of_time(end, asked.ranks):
            break
        for name, step in steps.items():
            dist.barrier()
            ms = statistics.median(clock.back_to_back_ms([step] * 2))
            heads[name]["ms"].append(max(of_all(ms, asked.ranks)))
    save({"ranks": asked.ranks, "model": asked.model, "heads": heads})


def show(record: dict[str, Any]) -> None:
    for facts in ("date", "device", "command", "model", "ranks"):
        print(f"{facts}: {record[facts]}")
    heads = record["heads"]
    stock, rest = heads["stock"], heads[NO_HEAD]["peak_bytes"]
    rows = []
    for name, head in heads.items():
        ms, ratio = in_turns(head, stock, "ms")
        peak = head["peak_bytes"]
        gib = None if peak is None else peak / 2**30
        of_head = None if peak is None or name == NO_HEAD else (peak - rest) / 2**30
        loss = None if name == NO_HEAD else head["loss"]
        rows.append([name, number(ms), number(ratio, ".3f"), number(gib), number(of_head), number(loss, ".6g")])
    print(f"\n{len(stock['ms'])} rounds\n")
    print("\n".join(markdown(["head", "ms a step", "of stock", "peak GiB", "of the head, GiB", "loss"], rows)))


if __name__ == "__main__":
    options = parser(__doc__, ranks=2, minutes=3.0, json=None, show=None, rounds=8)
    options.add_argument("--model", choices=("llama-1b", "gemma-270m", "qwen3-4b"), default="llama-1b")
    raise SystemExit(main(options, measure, show, import_all))
