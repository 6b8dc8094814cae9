"""The minimum viable experiment of the proposal "CCE Fused Loss for Linear RNN Pretraining": a small GLA, all heads.

Two layers, width 256, four heads with keys of 64 and values of 128, vocabulary 32,768, embedding and head tied (10
million parameters), 5 million tokens in steps of 8 x 2048.
"""

from __future__ import annotations

import dataclasses
import functools

import train
from models import Size
from studies import heads, lm
from studies.corpus import load_data
from studies.record import Cell
from studies.session import Session

STEPS = 305  # of 16,384 tokens: 5 million
FACTORS = (1, 2, 4)  # of the batch, where throughput is looked at
TINY_HEADS = ("eager", "logitless", "thinned")


def settings(session: Session) -> train.Settings:
    model = (session.options.models or ("gla",))[0]
    vocab = load_data(session.options.data).vocab
    if session.options.tiny:
        return lm.tiny_settings(model, vocab, 6, session.options.device)
    size = Size(vocab, dim=256, layers=2, heads=16, length=2048, tied=True, expand_k=1.0, expand_v=2.0)
    return train.Settings(
        model, size, STEPS, batch=8, rate=1e-3, warmup=30, validate_every=100, device=session.options.device
    )


def throughput(session: Session, base: train.Settings, head: str, factor: int) -> Cell:
    """Time and memory of a step with a larger batch, from the first weights."""
    larger = dataclasses.replace(base, batch=base.batch * factor)
    trainer = lm.make_trainer(session, larger, load_data(session.options.data), head)
    ms = lm.step_milliseconds(session, trainer, session.options.rounds)
    tokens = larger.batch * larger.size.length
    return {"ms": ms, "tokens_per_second": 1e3 * tokens / ms, "batch": larger.batch} | lm.memory_of_step(
        session, trainer
    )


def run(session: Session) -> None:
    """The runs that the criteria compare come first, then larger batches."""
    names = session.options.heads or (TINY_HEADS if session.options.tiny else heads.ALL)
    base = settings(session)
    about = lm.run_settings(session, base, load_data(session.options.data))
    for head in names:
        lm.trained(session, f"run/{head}", base, head, most=75.0)
    for head in names:
        for factor in FACTORS:
            key = f"batch/{head}/x{factor}"
            work = functools.partial(throughput, session, base, head, factor)
            session.cell(key, work, most=40.0, least=15.0, settings=about)
