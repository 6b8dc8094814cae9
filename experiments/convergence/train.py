"""Training of one model with one head. Runs differ in nothing but the head's gradient."""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import time
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from methods import Loss
from models import LanguageModel, Size
from peer_heads import loss_named
from tokens import Data

FLUSH = 20  # steps between two reads of the device's results
VALIDATION_BATCHES = 16
# Arguments that decide a run's result. Device, duration and intervals of reports do not.
DECISIVE = ("model", "dim", "layers", "attention_heads", "length", "tied", "expand")
DECISIVE += ("batch", "rate", "warmup", "seed", "compile")


def sequences(ids: NDArray[np.uint32], length: int) -> Tensor:
    """Returns [count, length + 1]: a sequence and its targets overlap by length."""
    count = (len(ids) - 1) // length
    wide = torch.from_numpy(ids[: count * length + 1].astype(np.int64))
    return wide.unfold(0, length + 1, length)


def save_whole(state: object, path: pathlib.Path) -> None:
    """Replaces a file at once: if the process ends midway, the old file remains whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    torch.save(state, partial)
    os.replace(partial, path)


class Trainer:
    """One run with the arguments of run.py. ``step`` counts finished steps."""

    def __init__(self, args: argparse.Namespace, data: Data, head: Loss) -> None:
        self.args, self.head, self.cuda = args, head, args.device.startswith("cuda")
        self.settings = {"vocab": data.vocab} | {name: getattr(args, name) for name in DECISIVE}
        torch.manual_seed(args.seed)
        size = Size(data.vocab, args.dim, args.layers, args.attention_heads, args.length, args.tied, *args.expand)
        self.model = LanguageModel(args.model, size).to(args.device)
        self.body = torch.compile(self.model) if args.compile else self.model
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.95), fused=self.cuda)
        self.train, self.validation = (sequences(ids, args.length) for ids in (data.train, data.validation))
        self.order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(args.seed))
        self.step = 0

    def batch(self, of: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        tokens = of[rows].to(self.args.device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:].reshape(-1)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Returns [B * L, D] in bf16, as autocast passes them to a head."""
        with torch.autocast(self.args.device.split(":")[0], dtype=torch.bfloat16):
            x: Tensor = self.body(tokens)
        return x.flatten(0, 1).bfloat16()

    def rate(self, step: int) -> float:
        s = self.args
        if step < s.warmup:
            return float(s.rate * (step + 1) / s.warmup)
        done = (step - s.warmup) / max(1, s.steps - s.warmup)
        return float(s.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))))

    def advance(self) -> Tensor:
        """Takes one step, and returns the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.step)
        first = self.step * self.args.batch
        rows = self.order[torch.arange(first, first + self.args.batch) % len(self.order)]
        tokens, target = self.batch(self.train, rows)
        loss = self.head(self.hidden(tokens), self.model.head.bfloat16(), target)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    @torch.no_grad()
    def validate(self) -> float:
        """Returns the exact mean loss of the first held-out sequences."""
        exact = loss_named("exact")
        losses = []
        for rows in torch.arange(len(self.validation)).split(self.args.batch)[:VALIDATION_BATCHES]:
            tokens, target = self.batch(self.validation, rows)
            losses.append((exact(self.hidden(tokens), self.model.head.bfloat16(), target), len(target)))
        return float(sum(loss * count for loss, count in losses)) / sum(count for _, count in losses)

    def save(self, path: pathlib.Path) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        state["random"] = torch.get_rng_state()
        if self.cuda:
            state["cuda_random"] = torch.cuda.get_rng_state()
        save_whole(state | {"settings": self.settings}, path)

    def restore(self, path: pathlib.Path) -> None:
        """Restores a checkpoint. Raises ValueError if it has other settings."""
        state = torch.load(path, map_location=self.args.device, weights_only=True)
        other = {name: value for name, value in state["settings"].items() if self.settings.get(name) != value}
        if other:
            asked = {name: self.settings.get(name) for name in other}
            raise ValueError(f"checkpoint {path}: expected one of {asked}, got one of {other}: name another folder")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        torch.set_rng_state(state["random"].cpu())
        if "cuda_random" in state:
            torch.cuda.set_rng_state(state["cuda_random"].cpu())


def run(trainer: Trainer, seconds: float) -> Iterator[dict[str, object]]:
    """Yields records until the last step or the end of the time: losses, validations, and steps' time and memory."""
    s, cuda = trainer.args, trainer.cuda
    end = time.monotonic() + seconds
    if trainer.step == 0:
        yield {"step": 0, "validation": trainer.validate()}
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses: list[Tensor] = []
    start = time.monotonic()
    while trainer.step < s.steps:
        losses.append(trainer.advance())
        stops = time.monotonic() >= end
        validates = trainer.step % s.validate_every == 0 or trainer.step == s.steps
        if len(losses) < FLUSH and not (validates or stops):
            continue
        values = torch.stack(losses).tolist()  # waits for the device
        took = (time.monotonic() - start) / len(values)
        for index, loss in enumerate(values):
            yield {"step": trainer.step - len(values) + index + 1, "loss": loss}
        memory = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
        yield {"step": trainer.step, "step_seconds": took, "peak_mib": memory}
        if validates:
            yield {"step": trainer.step, "validation": trainer.validate()}
        if stops:
            return
        losses = []
        start = time.monotonic()
