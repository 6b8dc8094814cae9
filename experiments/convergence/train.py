"""Training of one model with one head: everything but the head's gradient is the same in every run."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from methods import Loss, loss_named
from models import LanguageModel, Size
from tokens import Data

FLUSH = 20  # steps between two looks at the device


@dataclasses.dataclass(frozen=True)
class Settings:
    model: str
    size: Size
    steps: int = 1000
    batch: int = 16  # sequences a step
    rate: float = 6e-4
    warmup: int = 100
    seed: int = 0
    validate_every: int = 100
    validation_batches: int = 16
    compile: bool = False
    device: str = "cuda"


def sequences(ids: NDArray[np.uint32], length: int) -> Tensor:
    """[count, length + 1]: a sequence and its targets overlap by length."""
    count = (len(ids) - 1) // length
    wide = torch.from_numpy(ids[: count * length + 1].astype(np.int64))
    return wide.unfold(0, length + 1, length)


def comparable(settings: Settings) -> dict[str, object]:
    """What decides a run, as JSON has it: not its device, how long it is and how often it is looked at."""
    free = ("device", "steps", "validate_every", "validation_batches")
    found: dict[str, object] = json.loads(json.dumps(dataclasses.asdict(settings)))
    return {name: value for name, value in found.items() if name not in free}


def save_whole(state: object, path: pathlib.Path) -> None:
    """The file is the old one or the new one, whole, also when the process ends in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    torch.save(state, partial)
    os.replace(partial, path)


class Trainer:
    """One run. ``step`` counts finished steps."""

    def __init__(self, settings: Settings, data: Data, head: Loss) -> None:
        self.settings, self.head = settings, head
        torch.manual_seed(settings.seed)
        self.model = LanguageModel(settings.model, settings.size).to(settings.device)
        self.body = torch.compile(self.model) if settings.compile else self.model
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        fused = settings.device.startswith("cuda")
        self.optimizer = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95), fused=fused)
        self.train, self.validation = (sequences(ids, settings.size.length) for ids in (data.train, data.validation))
        self.order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(settings.seed))
        self.step = 0

    def batch(self, of: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        tokens = of[rows].to(self.settings.device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:].reshape(-1)

    def hidden(self, tokens: Tensor) -> Tensor:
        """[B * L, D] in bf16, as autocast leaves it to a head."""
        with torch.autocast(self.settings.device.split(":")[0], dtype=torch.bfloat16):
            x: Tensor = self.body(tokens)
        return x.flatten(0, 1).bfloat16()

    def rate(self, step: int) -> float:
        s = self.settings
        if step < s.warmup:
            return s.rate * (step + 1) / s.warmup
        done = (step - s.warmup) / max(1, s.steps - s.warmup)
        return s.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))

    def advance(self) -> Tensor:
        """One step; the loss before it."""
        s = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.step)
        first = self.step * s.batch
        rows = self.order[torch.arange(first, first + s.batch) % len(self.order)]
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
        """Exact mean loss of the first held-out sequences."""
        exact = loss_named("exact")
        found = []
        for rows in torch.arange(len(self.validation)).split(self.settings.batch)[: self.settings.validation_batches]:
            tokens, target = self.batch(self.validation, rows)
            found.append((exact(self.hidden(tokens), self.model.head.bfloat16(), target), len(target)))
        return float(sum(loss * count for loss, count in found)) / sum(count for _, count in found)

    def save(self, path: pathlib.Path) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        state["random"] = torch.get_rng_state()
        if self.settings.device.startswith("cuda"):
            state["cuda_random"] = torch.cuda.get_rng_state()
        state["settings"] = comparable(self.settings)
        save_whole(state, path)

    def restore(self, path: pathlib.Path) -> None:
        """Raises ValueError where the file is of other settings."""
        state = torch.load(path, map_location=self.settings.device, weights_only=True)
        wanted, found = comparable(self.settings), state.get("settings")
        if found is not None and found != wanted:
            other = {name: value for name, value in found.items() if wanted.get(name) != value}
            asked = {name: wanted.get(name) for name in other}
            raise ValueError(f"checkpoint {path}: expected one of {asked}, got one of {other}: name another folder")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        torch.set_rng_state(state["random"].cpu())
        if "cuda_random" in state:
            torch.cuda.set_rng_state(state["cuda_random"].cpu())


def run(trainer: Trainer, seconds: float) -> Iterator[dict[str, object]]:
    """Records until the last step, or until the time is up: losses, validations, and time and memory of steps."""
    s = trainer.settings
    cuda = s.device.startswith("cuda")
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


def last_step(log: pathlib.Path) -> int:
    """Of a log; 0 without one."""
    if not log.is_file():
        return 0
    return max((json.loads(line)["step"] for line in log.read_text().splitlines()), default=0)
