"""Where the memory of a training step goes: PyTorch's allocator records it, and each block gets a category."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from timing import describe

CATEGORIES = ("weights", "optimizer", "gradients", "activations", "head", "other")
MIB = 1 << 20
POINTS = 150  # of a timeline that is kept


class Event(NamedTuple):
    """A block is taken (size above 0) or given back."""

    address: int
    size: int


@dataclasses.dataclass
class Marks:
    """How many events there were when the head began, when its gradients were there, and when the optimizer began."""

    head: int = 0
    layers: int = 0
    optimizer: int = 0


def categorized(
    events: list[Event], marks: Marks, held: dict[str, int], gradients: set[int]
) -> tuple[list[dict[str, int]], int]:
    """Bytes of each category after each event, the first before any, and the index of the peak. ``held`` is what there
    is before the step; ``gradients`` are addresses of parameters' gradients when the optimizer begins."""
    kinds = _kinds(events, marks, gradients)
    now = {name: held.get(name, 0) for name in CATEGORIES}
    live: dict[int, tuple[str, int]] = {}
    timeline = [dict(now)]
    for index, event in enumerate(events):
        if event.size > 0:
            live[event.address] = kinds[index], event.size
            now[kinds[index]] += event.size
        else:
            # of a block from before the step only its size is known
            kind, size = live.pop(event.address, ("other", -event.size))
            now[kind] -= size
        timeline.append(dict(now))
    peak = max(range(len(timeline)), key=lambda index: sum(timeline[index].values()))
    return timeline, peak


def _kinds(events: list[Event], marks: Marks, gradients: set[int]) -> list[str]:
    """An address is used again and again: a gradient is the block that is there when the optimizer begins."""
    last: dict[int, int] = {}
    for index, event in enumerate(events[: marks.optimizer]):
        if event.size > 0:
            last[event.address] = index
        else:
            last.pop(event.address, None)
    of_gradients = {index for address, index in last.items() if address in gradients}

    def kind(index: int) -> str:
        if index in of_gradients:
            return "gradients"
        if index >= marks.optimizer:
            return "optimizer"
        return "head" if marks.head <= index < marks.layers else "activations"

    return [kind(index) for index in range(len(events))]


def shortened(timeline: list[dict[str, int]], points: int = POINTS) -> list[dict[str, float]]:
    """MiB, at the highest point of each part."""
    length = max(1, -(-len(timeline) // points))
    parts = [timeline[start : start + length] for start in range(0, len(timeline), length)]
    highest = [max(part, key=lambda now: sum(now.values())) for part in parts]
    return [{name: round(size / MIB, 1) for name, size in now.items()} for now in highest]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


class StepSnapshot:
    """Records one step of a model whose head follows ``norm``, its last layer. The allocator's record is no public
    interface: what fails with it is the result's reason, and the step goes on."""

    def __init__(self, model: nn.Module, norm: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.marks, self.gradients = Marks(), set[int]()
        self.problem = ""
        weights = bytes_of(model.parameters())
        states = bytes_of(t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
        everything = torch.cuda.memory_allocated()
        self.held = {"weights": weights, "optimizer": states, "other": max(0, everything - weights - states)}
        self.hooks: list[RemovableHandle] = [norm.register_forward_hook(self._head_begins)]
        with self._noting():
            torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)

    def _trace(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        return [item for item in found if item["action"] in ("alloc", "free_completed")]

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.problem = self.problem or describe(error)

    def _head_begins(self, _: nn.Module, __: Any, output: Tensor) -> None:
        with self._noting():
            self.marks.head = len(self._trace())
            if output.requires_grad:
                self.hooks.append(output.register_hook(self._head_ends))

    def _head_ends(self, _: Tensor) -> None:
        with self._noting():
            self.marks.layers = len(self._trace())

    def optimizer_begins(self) -> None:
        with self._noting():
            self.marks.optimizer = len(self._trace())
            self.gradients = {p.grad.data_ptr() for p in self.model.parameters() if p.grad is not None}

    def close(self) -> None:
        """The hooks are removed and nothing is recorded any more. May be called again."""
        while self.hooks:
            self.hooks.pop().remove()
        with self._noting():
            torch.cuda.memory._record_memory_history(None)

    def finish(self) -> dict[str, Any]:
        """MiB of each category at the peak, and over the step, or why there are none."""
        items: list[dict[str, Any]] = []
        with self._noting():
            items = self._trace()
        self.close()
        if self.problem:
            return {"reason": self.problem}
        signs = {"alloc": 1, "free_completed": -1}
        events = [Event(item["addr"], signs[item["action"]] * item["size"]) for item in items]
        timeline, peak = categorized(events, self.marks, self.held, self.gradients)
        at_peak = {name: round(size / MIB, 1) for name, size in timeline[peak].items()}
        return {"at_peak": at_peak, "timeline": shortened(timeline)}
