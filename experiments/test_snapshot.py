"""Memory of a step by category, without a GPU: python -m pytest experiments/test_snapshot.py"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
HERE = pathlib.Path(__file__).resolve().parent

import snapshot  # noqa: E402


def test_memory_of_a_step_by_category() -> None:
    from snapshot import CATEGORIES, Event, Marks, categorized, shortened

    events = [
        Event(1, 10),  # an activation
        Event(2, 30),  # the head's, from here on
        Event(3, 5),
        Event(2, -30),
        Event(2, 7),  # at the address of a gradient, but given back
        Event(2, -7),
        Event(1, -10),  # the layers' backward pass
        Event(2, 4),  # a gradient
        Event(9, -2),  # from before the step
        Event(5, 3),  # the optimizer's
        Event(2, -4),
    ]
    held = {"weights": 100, "other": 2}
    timeline, peak = categorized(events, Marks(head=1, layers=6, optimizer=9), held, {2})
    assert peak == 3 and timeline[peak] == dict(zip(CATEGORIES, (100, 0, 0, 10, 35, 2)))
    assert timeline[9] == dict(zip(CATEGORIES, (100, 0, 4, 0, 5, 0)))
    assert timeline[-1] == dict(zip(CATEGORIES, (100, 3, 0, 0, 5, 0)))
    short = shortened(timeline, 4)
    assert len(short) == 4 and short[1]["head"] == 0.0 and sum(timeline[peak].values()) == 147


def test_memory_of_a_step_is_recorded_around_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the allocator's record, which only a GPU has."""
    trace: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [list(trace)]})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)

    def take(address: int, size: int, action: str = "alloc") -> None:
        trace.append({"action": "snapshot"})
        trace.append({"action": action, "addr": address, "size": size << 20})

    body, norm, last = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2)
    model = torch.nn.Sequential(body, norm, last)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    found = snapshot.StepSnapshot(model, norm, optimizer)
    body.register_forward_hook(lambda *_: take(1, 3))
    body.register_full_backward_hook(lambda *_: take(3, 4))
    last.register_forward_hook(lambda *_: take(2, 5))
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    take(2, 5, "free_completed")
    assert model[0].weight.grad is not None
    take(model[0].weight.grad.data_ptr(), 1)
    found.optimizer_begins()
    take(7, 2)
    result = found.finish()
    assert result["at_peak"] == {**dict.fromkeys(snapshot.CATEGORIES, 0.0), "head": 5.0, "activations": 7.0}
    end = result["timeline"][-1]
    assert (end["head"], end["gradients"], end["optimizer"], end["activations"]) == (0.0, 1.0, 2.0, 7.0)


class Record:
    """A stand-in for the allocator's record, which fails where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on, self.fails = False, False
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)

    def record(self, enabled: str | None, **_: object) -> None:
        self.on = enabled is not None

    def snapshot(self) -> dict[str, Any]:
        if self.fails:
            raise KeyError("device_traces")
        return {"device_traces": [[]]}


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    return Record(monkeypatch)


def begun() -> tuple[snapshot.StepSnapshot, torch.nn.LayerNorm]:
    norm = torch.nn.LayerNorm(4)
    return snapshot.StepSnapshot(norm, norm, torch.optim.AdamW(norm.parameters())), norm


def test_a_record_that_fails_ends_without_the_step(record: Record) -> None:
    found, norm = begun()
    record.fails = True
    norm(torch.ones(2, 4)).sum().backward()  # the hooks do not raise
    found.optimizer_begins()
    assert found.finish() == {"reason": "KeyError: 'device_traces'"}
    assert not record.on and not norm._forward_hooks and norm.weight.grad is not None


def test_a_record_whose_end_fails_is_off(record: Record) -> None:
    found, norm = begun()
    assert record.on and norm._forward_hooks
    norm(torch.ones(2, 4)).sum().backward()
    record.fails = True
    assert found.finish() == {"reason": "KeyError: 'device_traces'"}
    assert not record.on and not norm._forward_hooks


def test_a_record_of_a_step_that_failed_is_closed(record: Record) -> None:
    found, norm = begun()
    found.close()
    found.close()
    assert not record.on and not norm._forward_hooks
