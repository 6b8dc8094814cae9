"""Whole training steps of one model with every head, interleaved: a round takes a step with each, in random order."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from clock import Clock
from harness import describe, ratio_of, tried
from limits import Deadline, StepTimeout, step_limit
from step_heads import Head, Loss
from step_models import Spec, Training, last_hidden
from step_record import GIB, ModelRow, StepRecord, StepRow
from timing import Cell

STOCK = "stock"
LAYERS_SHARE = 0.6  # largest share of a model's time to compile and tune its layers' kernels
ROUNDS_SHARE = 0.3  # share kept free for the rounds while heads are prepared
LEAST_ROUNDS = 3
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of a loss; float32's is negligible


def loss_tolerance(stock: Tensor) -> Callable[[Tensor], float]:
    """Returns the allowed difference of two losses.

    The stock head rounds logits, which are about 1 in size, to bf16. A loss may be rounded itself.
    """

    def of(loss: Tensor) -> float:
        return 2.0**-8 + (ROUNDOFF.get(loss.dtype, 0.0) + ROUNDOFF.get(stock.dtype, 0.0)) * abs(stock.item())

    return of


@contextlib.contextmanager
def fewer_configurations(most: int | None) -> Iterator[None]:
    """Limits Triton's autotuners to a random choice of that many configurations per kernel, within the block."""
    if most is None:
        yield
        return
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.prune_configs

    def prune_configs(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        configurations = list(original(self, kwargs))
        return random.Random(0).sample(configurations, min(most, len(configurations)))

    with mock.patch.object(Autotuner, "prune_configs", prune_configs):
        yield


class ModelBench:
    def __init__(self, record: StepRecord, spec: Spec, device: str, prepare_seconds: float, tune: int | None) -> None:
        self.record, self.spec = record, spec
        self.clock = Clock(device, idle_seconds=0.0)
        self.prepare_seconds, self.tune = prepare_seconds, tune
        config = spec.config
        sizes = (config["vocab_size"], config["hidden_size"], config["num_hidden_layers"])
        self.row = ModelRow(spec.name, spec.sequences, spec.length, *sizes)
        self.cells: list[Cell] = []
        self.stock: tuple[Tensor, Tensor] | None = None  # loss, and gradient of the last norm's weight

    def run(self, heads: list[Head], rounds: int, deadline: Deadline) -> None:
        total = deadline.left()
        self.record.models.append(self.row)
        heads = [head for head in heads if head.fla in (None, self.spec.fla)]
        reason = self._build(LAYERS_SHARE * total)
        for head in heads:
            row = StepRow(self.spec.name, head.name, head.ours)
            self.record.steps.append(row)
            if reason:
                row.status, row.reason = "skipped", reason
            else:
                self._add(head, row, min(self.prepare_seconds, deadline.left() - ROUNDS_SHARE * total))
        self.record.save()
        self._rounds(rounds, deadline)
        self.summarize()
        self.record.save()

    def _build(self, seconds: float) -> str:
        """Makes the model, and lets its layers compile and tune their kernels. Returns the error if that fails."""
        reason = ""
        try:
            with step_limit(seconds), fewer_configurations(self.tune if self.spec.fla else None):
                self.training = Training(self.spec, self.clock.device)
                self.row.parameters = self.training.parameters
                self.row.weights_gib = self.training.weight_bytes / GIB
                last_hidden(self.training.model, self.training.tokens).float().mean().backward()
                self.training.finish_step()
                self.clock.wait()
        except (Exception, StepTimeout) as error:
            reason = f"the model itself: {describe(error)}"
        if reason:
            self.record.note(f"{self.spec.name}: {reason}")
        self.clock.release()
        return reason

    def _add(self, head: Head, row: StepRow, seconds: float) -> None:
        """Prepares a head: its first step with the check, then memory, then the time of a step."""

        def prepare() -> None:
            loss = head.prepare(self.training.model, self.training.tokens)
            self._check(loss, row)
            self._measure_memory(loss, row)
            self.cells.append(Cell(row.head, loss, row, self._step_ms(loss)))

        if not tried(row, seconds, prepare):
            self.training.forget()
        self.clock.release()
        said = f"loss {row.loss:.4f}" if row.status == "ok" and row.loss is not None else row.status
        print(f"  {row.head}: {said} {row.reason}", flush=True)
        self.record.save()

    def _step(self, loss: Loss) -> None:
        loss().backward()
        self.training.finish_step()

    def _step_ms(self, loss: Loss) -> float:
        self.clock.wait()
        return self.clock.back_to_back_ms([lambda: self._step(loss)])[0]

    def _check(self, loss: Loss, row: StepRow) -> None:
        """Checks the first step: its loss, and the gradient of one weight that depends on the head's whole gradient."""
        value = loss()
        value.backward()
        gradient = self.training.model.base_model.norm.weight.grad
        result = (value.detach(), gradient.detach().float().clone())
        self.training.finish_step()
        row.loss = result[0].item()
        if row.head == STOCK:
            self.stock = result
        if self.stock is None:
            return
        row.gradient_difference = ((result[1] - self.stock[1]).norm() / self.stock[1].norm()).item()
        expected, tolerance = self.stock[0].item(), loss_tolerance(self.stock[0])(result[0])
        if not abs(row.loss - expected) <= tolerance:
            row.reason = f"its loss differs: {row.loss:.5f}, the stock head's {expected:.5f}"

    def _measure_memory(self, loss: Loss, row: StepRow) -> None:
        beyond = self.clock.peak_bytes(lambda: self._step(loss))
        self.row.optimizer_gib = self.training.optimizer_bytes / GIB
        if beyond is not None:
            row.peak_gib = torch.cuda.max_memory_allocated() / GIB
            row.beyond_gib = beyond / GIB

    def _rounds(self, rounds: int, deadline: Deadline) -> None:
        """Runs the rounds. Round 0 warms the chip and the allocator and does not count."""
        order = random.Random(0)
        for index in range(rounds + 1):
            if not self.cells or deadline.left() < 1.2 * 1e-3 * sum(cell.milliseconds for cell in self.cells):
                break
            for cell in order.sample(self.cells, len(self.cells)):
                try:
                    milliseconds = self._step_ms(cell.call)
                except Exception as error:
                    cell.row.status, cell.row.reason = "failed", f"in round {index}: {describe(error)}"
                    self.cells.remove(cell)
                    self.training.forget()
                    self.clock.release()
                    continue
                if index:
                    cell.times[index] = milliseconds

    def summarize(self) -> None:
        """Summarizes the rounds so far."""
        stock = next((cell.times for cell in self.cells if cell.row.head == STOCK), {})
        for cell in self.cells:
            row, times = cell.row, list(cell.times.values())
            row.rounds = len(times)
            if not times:
                row.status, row.reason = "skipped", "no time left for its rounds"
                continue
            row.ms, row.ms_least, row.ms_most = statistics.median(times), min(times), max(times)
            row.tokens_per_second = 1e3 * self.row.tokens / row.ms
            row.ratio = ratio_of(cell.times, stock)
            if len(times) < LEAST_ROUNDS:
                self.record.note(f"{row.model}, {row.head}: {len(times)} rounds only")
