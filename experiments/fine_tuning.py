"""Fine-tuning with transformers' Trainer, with each library's head: loss curves, time and peak memory of a step.

    python experiments/convergence/run.py prepare --data FOLDER --vocab 128000 --text PATH ... --instructions FILE
    python experiments/fine_tuning.py --data FOLDER [--heads stock,logitless,sparsified] [--seed 0] [--minutes 6]
        [--json FILE]
    python experiments/fine_tuning.py --data FOLDER --device cpu      tries it out, with a tiny model

The model is Llama with 1.2 billion parameters, built from its configuration and trained briefly before the comparison.
All heads start from the same weights (FOLDER/start.pt) and see the same batches of instruction text. Heads already in
FILE are not trained again while their initial weights exist. LOGITLESS_LIBRARY names liblogitless.so. --dump writes
initial hidden states, head and targets for ``bench/gpu/run.py --trained``.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "experiments" / "convergence"), str(ROOT / "bench" / "gpu")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import train  # noqa: E402
from clock import Clock  # noqa: E402
from harness import describe, has_device, measured_in_time, parser, words  # noqa: E402
from limits import Deadline, StepTimeout, step_limit  # noqa: E402
from machine import describe_machine, package_versions  # noqa: E402
from peer_heads import loss_named  # noqa: E402
from record import read_json, write_json  # noqa: E402
from step_heads import Patch, by_function, liger_patch, logitless_patch  # noqa: E402
from step_models import BY_NAME, build_model, last_hidden, sized  # noqa: E402
from studies import Cell  # noqa: E402
from table import markdown, number  # noqa: E402
from tokens import load, load_instructions  # noqa: E402

GIB = 1 << 30
PACKAGES = ("triton", "liger-kernel", "cut-cross-entropy", "transformers")
START_RATE, RATE = 3e-4, 5e-5
WARM = 10  # first steps, which are not timed
Row = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Sizes:
    length: int = 1024
    batch: int = 8
    start_steps: int = 60
    steps: int = 100
    held_out: int = 32  # sequences


TINY = Sizes(length=24, batch=2, start_steps=3, steps=4, held_out=4)


# Ways to put a head into the Trainer: a patch of the model, or a peer of peer_heads.py, by name, as the Trainer's loss.
WAYS: dict[str, Patch | str | None] = {
    "stock": None,
    "logitless": logitless_patch(),
    "logitless 256 MiB": logitless_patch(max_workspace_bytes="256MiB"),
    "sparsified": logitless_patch(gradient="sparsified", threshold=2.0**-9),
    "liger": liger_patch,
    "cce": "apple",
    "cce unfiltered": "apple-unfiltered",
    "cce_exact": "apple-exact",
}


def instruction_rows(folder: pathlib.Path, length: int) -> list[Row]:
    """Returns packed instruction text; questions have no labels."""
    ids, answered = (torch.from_numpy(part.astype("int64")) for part in load_instructions(folder))
    tokens, chosen = (part[: len(part) // length * length].view(-1, length) for part in (ids, answered))
    return [{"input_ids": row, "labels": labels} for row, labels in zip(tokens, tokens.masked_fill(chosen == 0, -100))]


class FineTuning:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.clock = args, Clock(args.device)
        self.sizes = Sizes() if self.clock.cuda else TINY
        rows = instruction_rows(args.data, self.sizes.length)
        self.held_out, self.rows = rows[: self.sizes.held_out], rows[self.sizes.held_out :]
        self.start = args.data / "start.pt"

    def new_model(self) -> Any:
        model = build_model(sized(BY_NAME["llama-1b"], not self.clock.cuda), self.args.device)
        if self.start.is_file():
            model.load_state_dict(torch.load(self.start, weights_only=True))
        return model

    def make_start(self) -> None:
        """Trains briefly on plain text with the exact head."""
        model, head, batch = self.new_model(), loss_named("exact"), self.sizes.batch
        rows = train.sequences(load(self.args.data).train, self.sizes.length)
        optimizer = torch.optim.AdamW(model.parameters(), lr=START_RATE, fused=self.clock.cuda)
        for step in range(self.sizes.start_steps):
            some = rows[torch.arange(step * batch, (step + 1) * batch) % len(rows)].to(self.args.device)
            hidden = last_hidden(model, some[:, :-1]).flatten(0, 1)
            optimizer.zero_grad(set_to_none=True)
            head(hidden, model.lm_head.weight, some[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        train.save_whole(model.state_dict(), self.start)

    @torch.no_grad()
    def states(self, model: Any, rows: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns hidden states, head and targets of the tokens with labels."""
        tokens, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
        hidden = last_hidden(model, tokens[:, :-1].to(self.args.device)).flatten(0, 1)
        target = labels[:, 1:].flatten().to(self.args.device)
        return hidden[target != -100], model.lm_head.weight.detach(), target[target != -100]

    def held_out_loss(self, model: Any) -> float:
        """Returns the exact held-out loss, whichever head trained the model."""
        exact, total, count = loss_named("exact"), 0.0, 0
        for row in self.held_out:
            states = self.states(model, [row])
            if len(states[2]):
                total, count = total + len(states[2]) * float(exact(*states)), count + len(states[2])
        return total / count

    def run(self, name: str) -> Cell:
        way, model = WAYS[name], self.new_model()
        before = self.held_out_loss(model)
        if callable(way):
            way(model)
        watch = make_watch(self.clock)
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(self, model, way, folder, watch)
            trainer.train()
        losses = [round(item["loss"], 4) for item in trainer.state.log_history if "loss" in item]
        cell: Cell = {"losses": losses, "ms": statistics.median(watch.ms)}
        if self.clock.cuda:
            cell["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        model = trainer.accelerator.unwrap_model(trainer.model)
        cell["held_out"] = [round(before, 4), round(self.held_out_loss(model), 4)]
        return cell | {"tokens": self.sizes.batch * self.sizes.length}


def make_trainer(study: FineTuning, model: Any, way: Patch | str | None, folder: str, callback: Any) -> Any:
    import transformers

    function = by_function(way) if isinstance(way, str) else None

    class StudyTrainer(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if function is not None:
                return function(model, inputs["input_ids"], inputs["labels"])
            return super().compute_loss(model, inputs, *args, **kwargs)

    cuda = study.clock.cuda
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=study.sizes.batch,
        max_steps=study.sizes.steps,
        learning_rate=RATE,
        warmup_steps=5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        use_cpu=not cuda,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_drop_last=True,
        seed=study.args.seed,
    )
    collate = transformers.default_data_collator
    trainer = StudyTrainer(model, arguments, train_dataset=study.rows, data_collator=collate, callbacks=[callback])
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def make_watch(clock: Clock) -> Any:
    import transformers

    class Watch(transformers.TrainerCallback):
        """Times steps."""

        def __init__(self) -> None:
            self.ms: list[float] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if clock.cuda and state.global_step == WARM:
                torch.cuda.reset_peak_memory_stats()
            clock.wait()
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.wait()
            if state.global_step > WARM or not clock.cuda:
                self.ms.append(1e3 * (time.perf_counter() - self.began))

    return Watch()


def table(heads: dict[str, Cell]) -> list[str]:
    """Renders a row per head: losses, and the time and memory of a step."""
    stock, lines = heads.get("stock"), []
    for name, cell in heads.items():
        before, after = cell["held_out"]
        line = [name, f"{before:.4f}", f"{after:.4f}", "-", "-"]
        if stock is not None:
            away = statistics.mean(abs(a - b) for a, b in zip(cell["losses"], stock["losses"]))
            line[3:] = [f"{after - stock['held_out'][1]:+.4f}", f"{away:.4f}"]
        line += [f"{1e3 * cell['tokens'] / cell['ms']:,.0f}", f"{cell['ms']:.1f}"]
        line += [number(cell["ms"] / stock["ms"] if stock is not None else None, ".3f")]
        lines.append([*line, number(cell.get("peak_gib"))])
    head = "head | held-out loss before | after | minus stock | curve's mean distance from stock's | tokens/s | "
    head += "ms a step | x stock | peak GiB"
    return markdown(head.split(" | "), lines)


class Runs:
    """The record: a cell per head, in the form of bench/records/studies."""

    def __init__(self, path: pathlib.Path | None, seed: int, about: dict[str, str]) -> None:
        self.path, self.seed = path, seed
        fresh: dict[str, Any] = {"sessions": [], "cells": {}, "seed": seed}
        content = read_json(path) if path is not None and path.is_file() else fresh
        if content["seed"] != seed:
            raise ValueError(f"--json: expected a record of seed {content['seed']}, got --seed {seed}: {path}")
        self.sessions, self.cells = [*content["sessions"], about], content["cells"]
        self._lock = threading.Lock()  # the time may end while a cell is written

    def put(self, name: str, cell: Cell) -> None:
        self.cells[name] = cell | {"session": len(self.sessions) - 1}
        self.save()

    def save(self) -> None:
        if self.path is not None:
            content = {"study": "fine_tuning", "seed": self.seed, "sessions": self.sessions, "cells": self.cells}
            with self._lock:
                write_json(self.path, content)

    def render(self) -> str:
        lines = table({name: cell for name, cell in self.cells.items() if cell["status"] == "ok"})
        others = {name: cell for name, cell in self.cells.items() if cell["status"] != "ok"}
        return "\n".join([*lines, *(f"- {name}: {cell['status']}: {cell['reason']}" for name, cell in others.items())])


def measured(study: FineTuning, name: str, seconds: float) -> Cell:
    try:
        with step_limit(seconds):
            return {"status": "ok"} | study.run(name)
    except ImportError as error:
        return {"status": "not installed", "reason": describe(error)}
    except (Exception, StepTimeout) as error:
        traceback.print_exc()
        return {"status": "failed", "reason": describe(error)}
    finally:
        study.clock.release()


def main() -> int:
    options = parser(__doc__, heads="stock,logitless,logitless 256 MiB,sparsified,liger,cce", minutes=6.0, json=None)
    options.add_argument(
        "--data", type=pathlib.Path, required=True, help="folder that convergence/run.py prepare wrote"
    )
    options.add_argument("--seed", type=int, default=0, help="seed of the order of the data, and of draws")
    options.add_argument(
        "--dump", type=pathlib.Path, metavar="FILE", help="train nothing, and write the initial states"
    )
    args = options.parse_args()
    unknown = [name for name in words(args.heads) if name not in WAYS]
    if unknown:
        options.error(f"--heads: expected names out of {', '.join(WAYS)}; got {unknown[0]!r}")
    if not has_device(args):
        return 2
    about = describe_machine(args.device) | {"packages": package_versions(PACKAGES)}
    try:
        runs = Runs(args.json, args.seed, about)
    except ValueError as error:
        options.error(str(error))
    study = FineTuning(args)
    if not study.start.is_file():
        runs.cells.clear()  # runs from lost weights cannot be compared with others
        study.make_start()
    if args.dump:
        states = study.states(study.new_model(), study.rows[: study.sizes.batch])
        torch.save(dict(zip(("hidden", "weight", "target"), (part.cpu() for part in states))), args.dump)
        return 0

    def measure(deadline: Deadline) -> None:
        for name in words(args.heads):
            if runs.cells.get(name, {}).get("status") != "ok" and deadline.left() > 0:
                runs.put(name, measured(study, name, deadline.left()))

    return measured_in_time(args, runs, measure, Runs.render)


if __name__ == "__main__":
    sys.exit(main())
