"""Fine-tuning with transformers' Trainer, the head put in by each library: loss curves, time of a step, memory by
category.

The model is Llama's of 1.2 billion parameters, built from its configuration and trained for a moment on the spot; all
heads start from the same weights and see the same batches of instruction text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import train
from data import Inputs
from step_heads import liger_patch
from step_models import BY_NAME, build_model, last_hidden, sized
from studies import lm
from studies.accumulation import gradient_errors
from studies.corpus import load_data, load_instructions
from studies.heads import make_head
from studies.record import Cell
from studies.session import Session
from studies.snapshot import StepSnapshot
from timing import describe

GIB = 1 << 30
LENGTH, BATCH = 1024, 8
START_STEPS, STEPS = 60, 100
START_RATE, RATE = 3e-4, 5e-5
HELD_OUT = 32  # sequences
WARM, LOOKED_AT = 10, 6  # steps that are not timed; the step whose memory is recorded
START, ERRORS = "start", "errors"
Patch = Callable[[Any], object]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a head gets into the Trainer: by a patch of the model, or by a loss of the Trainer's own."""

    patch: Patch | None = None
    loss: Callable[[Any, Tensor, Tensor], Tensor] | None = None


def logitless_patch(**options: Any) -> Patch:
    def patch(model: Any) -> object:
        import logitless.transformers

        return logitless.transformers.patch(model, **options)

    return patch


def apple(**options: Any) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """By its function, as its patches are for transformers 4.48."""

    def loss(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        from cut_cross_entropy import linear_cross_entropy

        hidden = last_hidden(model, tokens)
        found: Tensor = linear_cross_entropy(hidden, model.lm_head.weight, labels, shift=True, **options)
        return found

    return loss


WAYS = {
    "stock": Way(),
    "logitless": Way(logitless_patch()),
    "logitless 256 MiB": Way(logitless_patch(max_workspace_bytes=256 << 20)),
    "thinned": Way(logitless_patch(gradient="thinned", threshold=2.0**-9)),
    "liger": Way(liger_patch),
    "cce": Way(loss=apple()),
    "cce unfiltered": Way(loss=apple(filter_eps=None)),  # and nothing else: sums stay in bf16
    "cce_exact": Way(loss=apple(impl="cce_exact")),
}
# whose gradients are checked at the start
ERROR_HEADS = ("eager", "liger", "cce", "cce unfiltered", "cce_exact", "logitless", "logitless 160 MiB", "thinned")


def sequences(session: Session) -> list[dict[str, Tensor]]:
    """Instruction text, packed; questions have no labels."""
    assert session.options.data is not None
    length = 24 if session.options.tiny else LENGTH
    found = load_instructions(session.options.data)
    ids, answered = (torch.from_numpy(part.astype("int64")) for part in found)
    count = len(ids) // length
    tokens = ids[: count * length].view(count, length)
    labels = tokens.masked_fill(answered[: count * length].view(count, length) == 0, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels)]


def new_model(session: Session) -> Any:
    spec = sized(BY_NAME["llama-1b"], session.options.tiny, None, None, None)
    return build_model(spec, session.options.device)


def start(session: Session) -> Cell:
    path = lm.checkpoint_path(session, f"fine-tuning/{START}")
    return train_start(session, new_model(session), START_STEPS, path)


def train_start(session: Session, model: Any, steps: int, path: pathlib.Path) -> Cell:
    """A moment of training on plain text, with the exact head."""
    tiny, head = session.options.tiny, make_head("logitless")
    rows = train.sequences(load_data(session.options.data).train, 24 if tiny else LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=START_RATE, fused=session.cuda)
    losses = []
    for step in range(3 if tiny else steps):
        index = torch.arange(step * BATCH, (step + 1) * BATCH) % len(rows)
        batch = rows[index].to(session.options.device)
        loss = head(last_hidden(model, batch[:, :-1]).flatten(0, 1), model.lm_head.weight, batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    train.save_whole(model.state_dict(), path)
    return {"losses": [round(float(loss), 4) for loss in (losses[0], losses[-1])], "steps": len(losses)}


def trainer_of(
    session: Session, model: Any, way: Way, rows: list[dict[str, Tensor]], folder: str, callback: Any, **options: Any
) -> Any:
    """``options`` are TrainingArguments that differ from the study's own."""
    import transformers

    class StudyTrainer(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if way.loss is not None:
                return way.loss(model, inputs["input_ids"], inputs["labels"])
            return super().compute_loss(model, inputs, *args, **kwargs)

    own = {
        "output_dir": folder,
        "per_device_train_batch_size": 2 if session.options.tiny else BATCH,
        "max_steps": 4 if session.options.tiny else STEPS,
        "learning_rate": RATE,
        "warmup_steps": 5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "optim": "adamw_torch_fused" if session.cuda else "adamw_torch",
        "use_cpu": not session.cuda,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_drop_last": True,
        "seed": 0,
    }
    found = StudyTrainer(
        model=model,
        args=transformers.TrainingArguments(**own | options),
        train_dataset=rows,
        data_collator=transformers.default_data_collator,
        callbacks=[callback],
    )
    found.remove_callback(transformers.PrinterCallback)
    return found


def make_watch(session: Session, model: Any) -> Any:
    import transformers

    class Watch(transformers.TrainerCallback):
        """Times steps, and looks at the memory of one."""

        def __init__(self) -> None:
            self.ms: list[float] = []
            self.memory: dict[str, Any] = {}
            self.snapshot: StepSnapshot | None = None

        def guarded(self, action: Callable[[], Any]) -> Any:
            """The allocator's record is no public interface: a run does not fail with it."""
            try:
                return action()
            except Exception as error:
                self.close()
                self.memory = {"reason": describe(error)}
                return None

        def close(self) -> None:
            """Ends a record under way, also of a run that failed."""
            if self.snapshot is not None:
                with contextlib.suppress(Exception):
                    self.snapshot.close()
            self.snapshot = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if session.cuda and state.global_step == LOOKED_AT:
                optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
                self.snapshot = self.guarded(lambda: StepSnapshot(model, model.base_model.norm, optimizer))
            if session.cuda and state.global_step == WARM:
                torch.cuda.reset_peak_memory_stats()
            session.clock.wait()
            self.began = time.perf_counter()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            if self.snapshot is not None:
                self.guarded(self.snapshot.optimizer_begins)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            session.clock.wait()
            if self.snapshot is not None:
                self.memory = self.guarded(self.snapshot.finish) or self.memory
                self.snapshot = None
            elif state.global_step > WARM or not session.cuda:
                self.ms.append(1e3 * (time.perf_counter() - self.began))

    return Watch()


@torch.no_grad()
def held_out_loss(session: Session, model: Any, rows: list[dict[str, Tensor]]) -> float:
    """Exact, of all heads."""
    exact, total, count = make_head("logitless"), 0.0, 0
    for row in rows:
        tokens, labels = (row[name].unsqueeze(0).to(session.options.device) for name in ("input_ids", "labels"))
        target = labels[:, 1:].flatten()
        number = int((target != -100).sum())
        if number:
            hidden = last_hidden(model, tokens[:, :-1]).flatten(0, 1)
            total += number * float(exact(hidden, model.lm_head.weight, target))
            count += number
    return total / count


def started(session: Session) -> Any:
    model = new_model(session)
    model.load_state_dict(torch.load(lm.checkpoint_path(session, f"fine-tuning/{START}"), weights_only=True))
    return model


def errors(session: Session) -> Cell:
    """Of each head's gradients against float64, at the start's weights and one batch's tokens with labels."""
    model, rows = started(session), sequences(session)[: 2 if session.options.tiny else BATCH]
    tokens, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        hidden = last_hidden(model, tokens[:, :-1].to(session.options.device)).flatten(0, 1)
    target = labels[:, 1:].flatten().to(session.options.device)
    some = target != -100
    inputs = Inputs(hidden[some], model.lm_head.weight.detach(), target[some])
    names = ("eager", "logitless", "thinned") if session.options.tiny else ERROR_HEADS
    return {"heads": gradient_errors(inputs, names), "tokens": len(inputs.target)}


def tuned(session: Session, name: str) -> Cell:
    way, rows = WAYS[name], sequences(session)
    held_out = HELD_OUT if len(rows) > 4 * HELD_OUT else len(rows) // 4
    model = started(session)
    before = held_out_loss(session, model, rows[:held_out])
    if way.patch is not None:
        way.patch(model)
    watch = make_watch(session, model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(session, model, way, rows[held_out:], folder, watch)
        try:
            trainer.train()
        finally:
            watch.close()
    losses = [round(item["loss"], 4) for item in trainer.state.log_history if "loss" in item]
    found: Cell = {"losses": losses, "ms": statistics.median(watch.ms), "memory": watch.memory}
    if session.cuda:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    model = trainer.accelerator.unwrap_model(trainer.model)
    found["held_out"] = [round(before, 4), round(held_out_loss(session, model, rows[:held_out]), 4)]
    found["tokens"] = trainer.args.per_device_train_batch_size * len(rows[0]["input_ids"])
    return found


def run(session: Session) -> None:
    names = session.options.heads or (("stock", "logitless", "thinned") if session.options.tiny else tuple(WAYS))
    forget_lost_start(session)
    data = {"vocab": load_data(session.options.data).vocab}
    if session.cell(START, lambda: start(session), most=90.0, least=40.0, settings=data) is None:
        return
    session.cell(ERRORS, lambda: errors(session), most=60.0, least=20.0, settings=data)
    for name in names:
        session.cell(name, functools.partial(tuned, session, name), most=75.0, least=45.0, settings=data)


def forget_lost_start(session: Session) -> None:
    """Runs from a start whose weights are lost cannot stand beside those from another: all are made again."""
    cells = session.record.cells
    if START in cells and not lm.checkpoint_path(session, f"fine-tuning/{START}").is_file():
        print(f"the weights of {START} are lost: {', '.join(cells)} are measured again", flush=True)
        cells.clear()
