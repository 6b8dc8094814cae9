"""Training runs of small language models, by the trainer of experiments/convergence, from checkpoint to checkpoint."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import train
from heads import make_head as exact_head
from limits import StepTimeout
from models import MIXERS, Size
from studies.corpus import load_data
from studies.heads import make_head
from studies.record import Cell, plain
from studies.session import Session
from timing import describe
from tokens import Data

GIB = 1 << 30
WARM = 40  # steps left out of a step's time
MARGIN_SECONDS = 8.0  # for the checkpoint and the last validation


class Recurrence(nn.Module):
    """A gated linear recurrence with one number a channel: a stand-in for the linear RNNs where there is no Triton."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gates = nn.Linear(size.dim, 2 * size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        forget, value = self.gates(x).chunk(2, -1)
        log_decay = functional.logsigmoid(forget.float()).cumsum(1)
        weighted = (value.float() * torch.exp(-log_decay.clamp(min=-30.0))).cumsum(1)
        return (weighted * torch.exp(log_decay.clamp(min=-30.0))).to(x.dtype)


MIXERS["recurrence"] = Recurrence


def tiny_settings(model: str, vocab: int, steps: int, device: str) -> train.Settings:
    size = Size(vocab, dim=16, layers=1, heads=2, length=16)
    every = max(1, steps // 2)
    return train.Settings(model, size, steps, batch=2, warmup=2, validate_every=every, device=device)


def checkpoint_path(session: Session, key: str) -> pathlib.Path:
    folder = session.options.checkpoints or (session.options.data or pathlib.Path()) / "checkpoints"
    return folder / f"{key.replace('/', '--').replace(' ', '_')}.pt"


def make_trainer(session: Session, settings: train.Settings, data: Data, head: str) -> train.Trainer:
    """With its layers' kernels compiled and tuned."""
    trainer = train.Trainer(settings, data, make_head(head))
    if session.cuda:
        with session.tuning():
            tokens, _ = trainer.batch(trainer.train, trainer.order[: settings.batch])
            trainer.hidden(tokens).float().mean().backward()
        trainer.optimizer.zero_grad(set_to_none=True)
        session.clock.release()
    return trainer


def run_settings(session: Session, settings: train.Settings, data: Data) -> dict[str, Any]:
    """What a cell of such a run depends on but for its head, which its key names."""
    found = dataclasses.asdict(settings) | {"train_tokens": len(data.train), "tune": session.options.tune}
    del found["device"]
    return found


def trained(session: Session, key: str, settings: train.Settings, head: str, most: float = float("inf")) -> Cell | None:
    """A run to its last step: losses, time of a step, peak memory. What does not get there keeps its checkpoint and
    what it found so far, and goes on in the next call."""
    data = load_data(session.options.data)
    about = run_settings(session, settings, data)

    def work() -> Cell:
        path = checkpoint_path(session, key)
        before = session.record.cells.get(key, {})
        trainer = make_trainer(session, settings, data, head)
        if path.is_file():
            trainer.restore(path)
            if trainer.step != before.get("step"):  # losses of some of its steps are lost
                print(f"{key}: the record ends at step {before.get('step')}, {path} at {trainer.step}: it starts again")
                trainer = make_trainer(session, settings, data, head)
        if trainer.step == 0:
            before = {}
        found: dict[str, Any] = {name: dict(before.get(name, {})) for name in ("loss", "validation")}
        times: list[float] = list(before.get("step_ms", []))
        seconds = min(most, session.deadline.left()) - MARGIN_SECONDS
        for item in train.run(trainer, max(seconds, 1.0)):
            step = str(item["step"])
            for name in ("loss", "validation"):
                if name in item:
                    found[name][step] = round(float(item[name]), 5)  # type: ignore[arg-type]
            if "step_seconds" in item and (int(step) > WARM or not session.cuda):
                times.append(round(1e3 * float(item["step_seconds"]), 3))  # type: ignore[arg-type]
        trainer.save(path)
        found |= {"step": trainer.step, "step_ms": times, "tokens": settings.batch * settings.size.length}
        found |= {"parameters": sum(trainer.model.counts()), "vocab": settings.size.vocab}
        if before:
            found["sessions"] = [*before.get("sessions", []), before["session"]]
        if trainer.step < settings.steps:
            return found | {"status": "partial"}
        found["loss"] = thin_out(found["loss"], settings.steps)
        session.record.put(key, {"status": "ok"} | found | {"settings": plain(about)})
        return found | measured_memory(session, trainer)

    return session.cell(key, work, least=2 * MARGIN_SECONDS, settings=about)


def thin_out(losses: dict[str, float], steps: int) -> dict[str, float]:
    """About a hundred of them: a record is no log."""
    every = max(1, steps // 100)
    return {step: loss for step, loss in losses.items() if int(step) % every == 0 or int(step) == steps}


def memory_of_step(session: Session, trainer: train.Trainer) -> dict[str, float]:
    """The peak of one more step, all there is and beyond weights and optimizer; nothing on the CPU."""
    if not session.cuda:
        return {}
    trainer.optimizer.zero_grad(set_to_none=True)
    beyond = session.clock.peak_bytes(trainer.advance) or 0
    return {"peak_gib": torch.cuda.max_memory_allocated() / GIB, "beyond_gib": beyond / GIB}


def measured_memory(session: Session, trainer: train.Trainer) -> Cell:
    """The same of a run that is done, which does not fail with it."""
    try:
        return memory_of_step(session, trainer)
    except (Exception, StepTimeout) as error:
        return {"no memory": describe(error)}


def step_milliseconds(session: Session, trainer: train.Trainer, steps: int) -> float:
    """Of steps back to back, after two that warm up."""
    for _ in range(2):
        trainer.advance()
    session.clock.wait()
    start = time.perf_counter()
    for _ in range(steps):
        trainer.advance()
    session.clock.wait()
    return 1e3 * (time.perf_counter() - start) / steps


def restored(session: Session, settings: train.Settings, key: str) -> train.Trainer:
    """The model that a finished run of this record ended with."""
    path = checkpoint_path(session, key)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not here: its run has to be repeated (another --record)")
    trainer = make_trainer(session, settings, load_data(session.options.data), "eager")
    trainer.restore(path)
    if trainer.step != settings.steps:
        raise ValueError(f"{path}: expected a run of {settings.steps} steps, got {trainer.step}: it has to be finished")
    return trainer


@torch.no_grad()
def states(trainer: train.Trainer, rows: Tensor, batch: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [N, D], head and targets of sequences [S, L + 1], in bf16 as a head gets them."""
    parts = [trainer.batch(rows, index) for index in torch.arange(len(rows)).split(batch)]
    hidden = torch.cat([trainer.hidden(tokens) for tokens, _ in parts])
    return hidden, trainer.model.head.detach().bfloat16(), torch.cat([target for _, target in parts])


@torch.no_grad()
def perplexity(trainer: train.Trainer, rows: Tensor, batch: int = 8) -> float:
    """Of sequences [S, L + 1], by the exact loss."""
    exact, total, count = exact_head("exact"), 0.0, 0
    for index in torch.arange(len(rows)).split(batch):
        tokens, target = trainer.batch(rows, index)
        loss = exact(trainer.hidden(tokens), trainer.model.head.bfloat16(), target)
        total, count = total + float(loss) * len(target), count + len(target)
    return float(torch.tensor(total / count).exp())
