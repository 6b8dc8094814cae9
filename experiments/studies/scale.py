"""Whole steps of models of 24 layers and width 2048: share of the head, the largest batch under a cap of memory, and
whether larger batches are worth it. The steps are those of bench/steps.py; their heads are these studies' own."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from limits import Deadline, StepTimeout
from step_heads import Head, Loss
from step_models import BY_NAME, TINY, TINY_ATTENTION, Spec, Training, last_hidden, random_tokens, sized
from step_record import StepRecord
from step_rounds import ModelBench
from studies import heads
from studies.grids import LEAST_SHARE
from studies.record import Cell, with_status
from studies.session import Session
from timing import describe

GIB = 1 << 30
LENGTH = 2048
LARGEST_SECONDS = 45.0
BATCHES = (8, 4, 1, 16)  # the first is the baseline's
BODY = "no head"
OWN_HEADS = (heads.BASELINE, "liger", "cce_kahan_full_c", "fla", "logitless", "logitless 160 MiB", "thinned")
LARGEST_HEADS = {  # for each of the models, by default
    "gla": (heads.BASELINE, "thinned", "logitless", "cce_kahan_full_c"),
    "transformer": (heads.BASELINE, "thinned", "logitless"),
}
WIDE = {"vocab_size": 128000, "hidden_size": 2048, "num_hidden_layers": 24}
SPECS = {
    "gla": BY_NAME["gla-1.3b"],
    "transformer": Spec(
        "transformer-1.3b",
        "LlamaConfig",
        WIDE
        | {"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}
        | {"tie_word_embeddings": False},
        TINY | TINY_ATTENTION,
    ),
    "gated_deltanet": Spec("gdn-1.3b", "GatedDeltaNetConfig", WIDE | {"num_heads": 6, "head_dim": 256}, TINY, fla=True),
    "kda": Spec("kda-1.3b", "KDAConfig", WIDE | {"num_heads": 16, "head_dim": 128}, TINY, fla=True),
}


def targets(tokens: Tensor) -> Tensor:
    """[B * L]: the next token; of the last ones none."""
    return functional.pad(tokens[:, 1:], (0, 1), value=-100).flatten()


def by_function(name: str) -> Head:
    """A head that is given the last hidden states. Ratios of the bench are to the head that it calls ``stock``."""

    def prepare(model: Any, tokens: Tensor) -> Loss:
        target = targets(tokens)
        if name == BODY:
            return lambda: last_hidden(model, tokens).float().mean()
        if name == heads.BASELINE and "torch._dynamo" in sys.modules:  # each batch is compiled anew
            torch.compiler.reset()
        head = heads.make_head(name)
        return lambda: head(last_hidden(model, tokens).flatten(0, 1), model.lm_head.weight, target)

    return Head("stock" if name == heads.BASELINE else name, prepare, name in heads.OURS)


def spec_of(session: Session, model: str, batch: int) -> Spec:
    return sized(SPECS[model], session.options.tiny, None, batch, 24 if session.options.tiny else LENGTH)


def steps(session: Session, model: str, batch: int, names: tuple[str, ...], seconds: float) -> Cell:
    """All heads at one batch, interleaved: tokens a second and peak memory."""
    record = StepRecord(None, {})
    bench = ModelBench(record, spec_of(session, model, batch), session.options.device, 40.0, session.options.tune)
    chosen = [by_function(name) for name in (*names, BODY)]
    cut: Cell = {}
    try:
        bench.run(chosen, session.options.rounds, Deadline(time.monotonic(), seconds))
    except StepTimeout as error:  # what was measured before is kept
        bench.summarize()
        cut = {"status": "partial", "reason": describe(error)}
        for row in record.steps:
            if row.status == "ok" and row.ms is None:
                row.status, row.reason = "skipped", describe(error)
    rows = [dataclasses.asdict(row) for row in record.steps]
    if not any(row["status"] == "ok" for row in rows):
        reason = rows[0]["reason"] if rows else "nothing was measured"
        return {"status": "failed", "reason": "; ".join(record.notes) or reason}
    for row in rows:
        row["head"] = heads.BASELINE if row["head"] == "stock" else row["head"]
    found = {"rows": rows, "model": dataclasses.asdict(record.models[0]), "notes": record.notes}
    return found | {"model_flop": model_flop(bench.spec)} | with_status(rows, "head") | cut


def warm(session: Session, model: str) -> Cell:
    """Compiles and tunes the layers' kernels, which their caches keep."""
    training = Training(spec_of(session, model, BATCHES[0]), session.options.device)
    with session.tuning():
        last_hidden(training.model, training.tokens).float().mean().backward()
    session.clock.wait()
    return {"parameters": training.parameters}


def model_flop(spec: Spec) -> float | None:
    """Of a step, by the model of cost, which needs the native library."""
    try:
        from logitless.cost_model import Batch, Head, from_config, predict

        from step_models import make_config

        model = from_config(make_config(spec).to_dict())
        return predict(model, Batch(spec.sequences, spec.length), Head("upcast")).model_flop
    except Exception as error:
        print(f"no count of FLOP: {error}")
        return None


def largest(session: Session, model: str, head: str, start: int, seconds: float = float("inf")) -> Cell:
    """The most sequences whose step fits under the cap, from a guess on: steps that double until one fits and one does
    not, then halves. What is not narrowed down in time is partial, and the next call goes on from there."""
    cap = session.options.cap_gib * GIB
    total = torch.cuda.get_device_properties(0).total_memory
    before = session.record.holds(f"{model}/largest/{head}") or {}
    best: dict[str, Any] = {name: before[name] for name in ("batch", "ms") if name in before}
    low, high = best.get("batch", 0), before.get("too_large")
    end, longest = Deadline(time.monotonic(), seconds), 0.0
    training = Training(spec_of(session, model, 1), session.options.device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
    try:
        batch, stride = next_batch(low, high, start, 1)
        while batch is not None and end.left() > longest:
            began = time.monotonic()
            ms = timed_step(session, training, model, head, batch)
            longest = max(longest, time.monotonic() - began)
            if ms:
                low, best = batch, {"batch": batch, "ms": ms}
            else:
                high = batch
            batch, stride = next_batch(low, high, start, stride)
    except StepTimeout:
        pass
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    if high == 1:
        return {"status": "refused", "reason": "no batch fits"}
    if best:
        best["tokens_per_second"] = 1e3 * best["batch"] * LENGTH / best["ms"]
    found = best | {"cap_gib": cap / GIB} | ({"too_large": high} if high else {})
    if before:
        found["sessions"] = [*before.get("sessions", []), before["session"]]
    if low + 1 == high:
        return found
    return found | {"status": "partial", "reason": f"between {low} and {high or 'more'} sequences: no time left"}


def next_batch(low: int, high: int | None, start: int, stride: int) -> tuple[int | None, int]:
    """Where ``low`` sequences fit (0: none was tried) and ``high`` do not: what to try next, and the stride after."""
    if low == 0 and high is None:
        return max(1, start), stride
    if high is None:
        return low + stride, 2 * stride
    if low + 1 == high:
        return None, stride
    if low == 0:
        return max(1, high - stride), 2 * stride
    return (low + high) // 2, stride


def timed_step(session: Session, training: Training, model: str, head: str, batch: int) -> float:
    """Milliseconds of a step, the median of three after two; 0 where memory does not do."""
    tokens = random_tokens(spec_of(session, model, batch), session.options.device)
    try:
        with session.tuning():
            last_hidden(training.model, tokens).float().mean().backward()
        training.finish_step()
        loss = by_function(head).prepare(training.model, tokens)

        def step() -> None:
            loss().backward()
            training.finish_step()

        for _ in range(2):
            step()
        return sorted(session.clock.back_to_back_ms([step])[0] for _ in range(3))[1]
    except torch.OutOfMemoryError:
        return 0.0
    finally:
        training.forget()
        session.clock.release()


def guess(session: Session, model: str, head: str) -> int:
    """From the peaks of two batches; a step's memory is a line over the batch."""
    peaks: dict[int, float] = {}
    for batch in BATCHES:
        cell = session.record.holds(f"{model}/B{batch}")
        rows = [] if cell is None else [row for row in cell["rows"] if row["head"] == head and row["peak_gib"]]
        peaks |= {batch: row["peak_gib"] for row in rows}
    if len(peaks) < 2:
        return 8
    low, high = min(peaks), max(peaks)
    slope = (peaks[high] - peaks[low]) / (high - low)
    return max(1, int((0.985 * session.options.cap_gib - peaks[low]) / slope + low))


def run(session: Session) -> None:
    """Baseline batch of each model, a second batch, the largest, then the rest of the sweep."""
    tiny = session.options.tiny
    models = session.options.models or (("transformer",) if tiny else ("gla", "transformer"))
    names = session.options.heads or (("eager", "logitless", "thinned") if tiny else OWN_HEADS)
    sweep = tuple(name for name in names if name in (heads.BASELINE, "eager", "logitless", "thinned"))

    def at(model: str, batch: int, chosen: tuple[str, ...], seconds: float) -> None:
        work = min(seconds, session.deadline.left() - 5)
        key = f"{model}/B{batch}"
        about = {"heads": chosen, "tune": session.options.tune}
        of_batch = functools.partial(steps, session, model, batch, chosen, work)
        session.cell(key, of_batch, seconds + 20, least=5 + LEAST_SHARE * seconds, settings=about)

    def most(model: str, head: str) -> None:
        seconds = min(LARGEST_SECONDS, session.deadline.left() - 5)
        about = {"cap_gib": session.options.cap_gib, "tune": session.options.tune}

        def work() -> Cell:
            return largest(session, model, head, guess(session, model, head), seconds - 5)

        session.cell(f"{model}/largest/{head}", work, LARGEST_SECONDS, least=30.0, settings=about)

    for model in models:
        if session.cuda and session.cell(f"{model}/warm", lambda: warm(session, model), least=10.0) is None:
            continue
        largest_heads = LARGEST_HEADS.get(model, LARGEST_HEADS["transformer"])
        at(model, BATCHES[0], names, 100.0)
        at(model, BATCHES[1], tuple(name for name in names if name in largest_heads or tiny), 40.0)
        for head in largest_heads if session.cuda else ():
            if head in names:
                most(model, head)
    for batch in BATCHES[2:]:
        for model in models:
            at(model, batch, sweep, 30.0)
