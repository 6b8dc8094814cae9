"""Does accumulation matter for linear RNNs? Runs of 1,000 steps that differ in the head alone, and, on the states of
the trained models, the error of each head's gradients against float64."""

from __future__ import annotations

import torch

import train
from data import Inputs
from models import Size
from reference import make_reference, relative_error
from studies import heads, lm
from studies.corpus import load_data, load_wikitext
from studies.record import Cell
from studies.session import Session
from timing import describe

MODELS = ("gla", "gated_deltanet", "kda", "transformer")
RUN_HEADS = ("logitless", "thinned", "cce_kahan_full_c", heads.BASELINE)
ERROR_HEADS: tuple[str, ...] = ("eager", heads.BASELINE, "fla", "liger", "cce", "cce_kahan_full_c")
ERROR_HEADS += ("logitless", "logitless 160 MiB", "thinned")
TOKENS = 8000  # whose gradients are checked: no power of two, see bench/gpu/reference.py


def settings(session: Session, model: str) -> train.Settings:
    vocab = load_data(session.options.data).vocab
    if session.options.tiny:
        return lm.tiny_settings(model, vocab, 6, session.options.device)
    size = Size(vocab, dim=512, layers=6, heads=8, length=1024)
    return train.Settings(
        model, size, 1000, batch=16, rate=1e-3, warmup=100, validate_every=250, device=session.options.device
    )


def gradient_errors(inputs: Inputs, names: tuple[str, ...]) -> dict[str, dict[str, float | str]]:
    """Of each head, beside the unavoidable: logits in float32, their gradients rounded to bf16."""
    reference = make_reference(inputs, rows=min(512, len(inputs.target)), columns=4096)
    found: dict[str, dict[str, float | str]] = {
        "unavoidable": {"d_hidden": reference.baseline_d_hidden, "d_weight": reference.baseline_d_weight}
    }
    for name in names:
        leaves = inputs.leaves()
        try:
            loss = heads.make_head(name)(*leaves)
            loss.backward()
        except Exception as error:
            found[name] = {"reason": describe(error)}
            continue
        assert leaves.hidden.grad is not None and leaves.weight.grad is not None
        found[name] = {
            "loss": abs(loss.item() - reference.loss),
            "d_hidden": relative_error(leaves.hidden.grad[reference.rows], reference.d_hidden),
            "d_weight": relative_error(leaves.weight.grad[reference.columns], reference.d_weight),
        }
    return found


def error_heads(session: Session) -> tuple[str, ...]:
    return session.options.heads or (("eager", "logitless", "thinned") if session.options.tiny else ERROR_HEADS)


def errors(session: Session, model: str, head: str) -> Cell:
    trainer = lm.restored(session, settings(session, model), f"{model}/{head}")
    count = -(-TOKENS // trainer.settings.size.length)
    hidden, weight, target = lm.states(trainer, trainer.validation[:count])
    count = min(TOKENS, len(target))
    inputs = Inputs(hidden[:count], weight, target[:count])
    return {"heads": gradient_errors(inputs, error_heads(session)), "tokens": count}


def wikitext(session: Session, model: str, head: str) -> Cell:
    assert session.options.data is not None
    base = settings(session, model)
    trainer = lm.restored(session, base, f"{model}/{head}")
    return {
        "perplexity": lm.perplexity(trainer, train.sequences(load_wikitext(session.options.data), base.size.length))
    }


def run_one(session: Session, model: str, head: str) -> bool:
    """Is it trained to its last step?"""
    if lm.trained(session, f"{model}/{head}", settings(session, model), head) is None:
        return False
    session.cell(f"{model}/{head}/wikitext2", lambda: wikitext(session, model, head), most=30.0, least=10.0)
    torch.cuda.empty_cache() if session.cuda else None
    return True


def run(session: Session) -> None:
    """One run of each model and the errors on its states; then the other heads."""
    tiny = session.options.tiny
    models = session.options.models or (("transformer", "recurrence") if tiny else MODELS)
    names = session.options.heads or (("logitless", "thinned", "eager") if tiny else RUN_HEADS)
    order = [(model, names[0]) for model in models] + [(model, name) for model in models for name in names[1:]]
    if not tiny:  # GLA's runs are the comparison; the others' first runs are for their states
        order.sort(key=lambda pair: (pair[0] != models[0] and pair[1] != names[0], pair[0] != models[0]))
    for model, name in order:
        if run_one(session, model, name) and name == names[0]:
            about = {"run": name, "heads": error_heads(session)}
            session.cell(f"{model}/errors", lambda: errors(session, model, name), 60.0, least=30.0, settings=about)
