"""How sparse is the softmax of a fine-tuned linear RNN, and what do filters and thinned gradients gain there?

The models are those that the accumulation study trained with the exact head; they are fine-tuned on instruction text.
"""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

import train
from clock import Call
from data import Inputs
from methods import Method
from studies import accumulation, heads, lm
from studies.corpus import Instructions, load_instructions
from studies.record import Cell
from studies.session import Session
from timing import describe, pass_call

STEPS, RATE = 150, 2e-4
TOKENS = 16000
FILTER, THINNED = 2.0**-12, 2.0**-9
BLOCK = 128  # tokens and columns of a block that Apple's filter keeps or leaves out
HEADS = (heads.BASELINE, "cce", "cce_kahan_full_c", "logitless", "logitless 160 MiB", "thinned")


def rows_of(found: Instructions, length: int) -> tuple[Tensor, Tensor]:
    """[S, L + 1] ids, and which of them are answers."""
    ids, answered = (train.sequences(part, length) for part in found)
    return ids, answered.bool()


def fine_tune(trainer: train.Trainer, ids: Tensor, answered: Tensor, steps: int) -> list[float]:
    """On answers only; the losses."""
    for group in trainer.optimizer.param_groups:
        group["lr"] = RATE
    head, losses = heads.make_head("logitless"), []
    for step in range(steps):
        index = torch.arange(step * trainer.settings.batch, (step + 1) * trainer.settings.batch) % len(ids)
        tokens, target = trainer.batch(ids, index)
        target = target.masked_fill(~answered[index][:, 1:].reshape(-1).to(target.device), -100)
        loss = head(trainer.hidden(tokens), trainer.model.head.bfloat16(), target)
        trainer.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


@torch.no_grad()
def softmax_statistics(hidden: Tensor, weight: Tensor) -> dict[str, float]:
    """Of all elements of the softmax: what is above the filter's threshold, in which blocks, what thinning keeps."""
    vocab = weight.shape[0]
    parts = hidden.split(BLOCK * max(1, (1 << 28) // (BLOCK * vocab)))
    mean = sum((part.float() @ weight.float().T).sum(0) for part in parts)
    assert isinstance(mean, Tensor)
    order = mean.argsort(descending=True)  # Apple's filter sorts the vocabulary by its mean logit
    above = kept = blocks = sorted_blocks = 0.0
    count = 0
    for part in parts:
        p = torch.softmax(part.float() @ weight.float().T, dim=1)
        above += float((p > FILTER).sum())
        kept += float((p / THINNED).clamp(max=1.0).sum())
        blocks += float(kept_blocks(p).sum())
        sorted_blocks += float(kept_blocks(p[:, order]).sum())
        count += kept_blocks(p).numel()
    elements = hidden.shape[0] * vocab
    return {
        "above": above / elements,
        "above_a_row": above / hidden.shape[0],
        "blocks": blocks / count,
        "sorted_blocks": sorted_blocks / count,
        "kept_a_row": kept / hidden.shape[0],
    }


def kept_blocks(p: Tensor) -> Tensor:
    """Of [rows, V] padded to whole blocks: has any element above the threshold?"""
    rows, columns = (-size % BLOCK for size in p.shape)
    wide = torch.nn.functional.pad(p > FILTER, (0, columns, 0, rows))
    return wide.view(wide.shape[0] // BLOCK, BLOCK, -1, BLOCK).any(dim=3).any(dim=1)


def times(session: Session, inputs: Inputs, names: tuple[str, ...]) -> dict[str, dict[str, float | str]]:
    """Milliseconds of loss, and of loss and gradients, medians of interleaved rounds; of a head that fails the
    reason."""
    calls: dict[str, dict[str, Call]] = {}
    found: dict[str, dict[str, float | str]] = {}
    for name in names:
        try:
            method = Method(name, heads.make_head(name))
            ready = {pass_: pass_call(method, inputs, pass_) for pass_ in ("loss", "gradients")}
            for call in ready.values():
                call()
            calls[name] = ready
        except Exception as error:
            found[name] = {"reason": describe(error)}
            session.clock.release()
    taken = {name: {pass_: list[float]() for pass_ in ready} for name, ready in calls.items()}
    for _ in range(max(3, session.options.rounds)):
        for name in list(calls):
            try:
                for pass_, call in calls[name].items():
                    taken[name][pass_].append(session.clock.burst_ms(call))
            except Exception as error:
                found[name] = {"reason": describe(error)}
                del calls[name]
                session.clock.release()
    found |= {name: {pass_: statistics.median(taken[name][pass_]) for pass_ in ready} for name, ready in calls.items()}
    return {name: found[name] for name in names}


def head_names(session: Session) -> tuple[str, ...]:
    return session.options.heads or (("eager", "logitless", "thinned") if session.options.tiny else HEADS)


def study(session: Session, model: str) -> Cell:
    assert session.options.data is not None
    base = accumulation.settings(session, model)
    trainer = lm.restored(session, base, f"{model}/logitless")
    ids, answered = rows_of(load_instructions(session.options.data), base.size.length)
    held_out = max(1, min(len(ids) // 10, 2 * TOKENS // base.size.length))
    losses = fine_tune(trainer, ids[held_out:], answered[held_out:], 4 if session.options.tiny else STEPS)
    hidden, weight, target = lm.states(trainer, ids[:held_out])
    chosen = answered[:held_out, 1:].reshape(-1).nonzero().flatten().to(target.device)[:TOKENS]
    inputs = Inputs(hidden[chosen], weight, target[chosen])
    names = head_names(session)
    found = {"losses": [losses[0], losses[-1]], "tokens": len(chosen)} | softmax_statistics(hidden[chosen], weight)
    found["errors"] = accumulation.gradient_errors(inputs, names)  # type: ignore[assignment]
    found["times"] = times(session, inputs, names)  # type: ignore[assignment]
    return found


def run(session: Session) -> None:
    tiny = session.options.tiny
    for model in session.options.models or (("transformer", "recurrence") if tiny else ("gla", "transformer")):
        about = {"heads": head_names(session)}
        session.cell(model, lambda: study(session, model), most=75.0, least=45.0, settings=about)
