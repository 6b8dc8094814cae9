"""Exact and thinned gradients in fine_tuning.py's fine-tuning, each from several seeds, and what makes them differ.

A seed decides the order of the data and what is drawn; all runs of a model start from the same weights. Arms change one
thing each. Beside the losses a run keeps norms of gradients, Adam's steps, and how far a draw is from the exact
gradient, apart for the head's rows of tokens that are targets somewhere (``used``) and those of all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import train
from step_models import BY_NAME, build_model, last_hidden, sized
from studies import lm
from studies.corpus import load_data
from studies.fine_tuning import BATCH, HELD_OUT, LENGTH, RATE, Way, logitless_patch, sequences, train_start, trainer_of
from studies.record import Cell
from studies.session import Session

SEEDS = 4
EXACT, THINNED = "exact", "2^-9"
WAYS = {EXACT: Way(logitless_patch())} | {
    f"2^-{k}": Way(logitless_patch(gradient="always-thinned", threshold=2.0**-k)) for k in (9, 10, 11)
}
# the study's own, and one whose runs take seconds: shape, steps of plain text before
SMALL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 16}
STARTS: dict[str, tuple[str, int]] = {"small": ("small", 60), "full": ("full", 60), "longer": ("small", 600)}
MODELS = ("small", "full")
TEXT_FROM = 8 * 700  # sequences of plain text that no start has seen
LOOKED_AT = (10, 25, 50, 75)  # steps whose optimizer is looked at
RUN, EIGHT = 16, 8  # of an eighth: runs of so many positions, one of so many
HUGE = 1e9  # a bound of the norm that nothing reaches


@dataclasses.dataclass(frozen=True)
class Arm:
    """A change to the study, one thing each."""

    heads: tuple[str, ...] = (EXACT, THINNED)
    start: str = ""  # instead of the model's own
    rows: str = "answers"
    rate: float = RATE
    float32: bool = False  # weights, under autocast to bf16
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the Trainer


ARMS = {
    "answers": Arm(tuple(WAYS)),
    "no clipping": Arm(arguments={"max_grad_norm": HUGE}),
    "rate x 0.9": Arm((EXACT,), rate=0.9 * RATE),
    "all tokens": Arm(rows="all"),
    "an eighth": Arm(rows="eighth"),
    "float32 weights": Arm(float32=True),
    "longer start": Arm(start="longer"),
    "plain text": Arm(rows="text"),
}


def spec_of(session: Session, model: str) -> Any:
    spec = BY_NAME["llama-1b"]
    if model == "small":
        spec = dataclasses.replace(spec, config=spec.config | SMALL)
    return sized(spec, session.options.tiny, None, None, None)


def rows_of(session: Session, kind: str) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """To train on and held out; what is held out has the labels of answers, but of plain text its own."""
    tiny = session.options.tiny
    if kind == "text":
        data, length = load_data(session.options.data), 24 if tiny else LENGTH
        train_rows, others = (train.sequences(part, length)[:, :-1] for part in (data.train, data.validation))
        first = 40 if tiny else TEXT_FROM
        return labelled(train_rows[first : first + (40 if tiny else 1200)]), labelled(others[:HELD_OUT])
    rows = sequences(session)
    count = HELD_OUT if len(rows) > 4 * HELD_OUT else len(rows) // 4
    held_out, rows = rows[:count], rows[count:]
    if kind == "all":
        rows = [row | {"labels": row["input_ids"]} for row in rows]
    elif kind == "eighth":
        hidden = torch.arange(len(rows[0]["labels"])) // (2 if tiny else RUN) % EIGHT != 0
        rows = [row | {"labels": row["labels"].masked_fill(hidden, -100)} for row in rows]
    return rows, held_out


def labelled(tokens: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in tokens.long()]


def used_tokens(session: Session, rows: list[dict[str, Tensor]], vocab: int) -> Tensor:
    """[V]: is a token a target in what is trained on?"""
    found = torch.zeros(vocab, dtype=torch.bool)
    labels = torch.stack([row["labels"] for row in rows])[:, 1:]
    found[labels[labels != -100]] = True
    return found.to(session.options.device)


def batch_of(session: Session, rows: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Tokens [B, L - 1] and their targets [N]."""
    tokens, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    return tokens[:, :-1].to(session.options.device), labels[:, 1:].flatten().to(session.options.device)


@torch.no_grad()
def held_out_loss(session: Session, model: Any, rows: list[dict[str, Tensor]], used: Tensor) -> list[float]:
    """Mean loss of float32 logits, and how much of it is the probability of tokens that are not ``used``."""
    total, unused, count = 0.0, 0.0, 0
    weight = model.lm_head.weight.float()
    for row in rows:
        tokens, target = batch_of(session, [row])
        some = target != -100
        hidden = last_hidden(model, tokens).flatten(0, 1)[some].float()
        logits, target = hidden @ weight.T, target[some]
        if len(target):
            lse = logits.logsumexp(1)
            total += float((lse - logits.gather(1, target[:, None])[:, 0]).double().sum())
            among = logits.masked_fill_(~used, -torch.inf).logsumexp(1)
            unused += float((lse - among).double().sum())
            count += len(target)
    return [total / count, unused / count]


def gradients(model: Any, tokens: Tensor, target: Tensor, **options: Any) -> dict[str, Tensor]:
    import logitless

    model.zero_grad(set_to_none=True)
    hidden = last_hidden(model, tokens)
    hidden.retain_grad()
    loss = logitless.linear_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, target, **options)
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found | {"hidden": hidden.grad}


def squares(model: Any, found: dict[str, Tensor], used: Tensor, minus: dict[str, Tensor] | None = None) -> Tensor:
    """Squared norms of hidden states' gradients, the layers', the head's used rows and its others."""
    sums = torch.zeros(4, dtype=torch.float64, device=used.device)
    head = next(name for name, parameter in model.named_parameters() if parameter is model.lm_head.weight)
    for name, value in found.items():
        value = value.float() if minus is None else value.float() - minus[name].float()
        if name == head:
            rows = value.square().sum(1).double()
            sums[2] += rows[used].sum()
            sums[3] += rows[~used].sum()
        else:
            sums[0 if name == "hidden" else 1] += value.square().sum().double()
    return sums


GROUPS = ("hidden states", "layers", "used rows", "other rows")


def noise(session: Session, model: Any, rows: list[dict[str, Tensor]], used: Tensor) -> dict[str, Any]:
    """How far a draw's gradients are from exact ones, in parts of these, and how far those of another batch are; and
    the squared norm of the whole gradient, in parts of the exact one's."""
    count = 2 if session.options.tiny else BATCH
    tokens, target = batch_of(session, rows[:count])
    exact = gradients(model, tokens, target)
    norms = squares(model, exact, used)

    def entry(found: dict[str, Tensor], share: float = 1.0) -> dict[str, float]:
        parts = (share * squares(model, found, used, exact) / norms).sqrt().tolist()
        whole = float(squares(model, found, used)[1:].sum() / norms[1:].sum()) ** 0.5
        return {name: float(f"{part:.4g}") for name, part in zip(GROUPS, parts)} | {"norm": round(whole, 5)}

    result: dict[str, Any] = {"norms": {n: float(f"{v:.4g}") for n, v in zip(GROUPS, norms.sqrt().tolist())}}
    # of two batches that differ by chance alone each is off by half of the squared distance
    result["another batch"] = entry(gradients(model, *batch_of(session, rows[count : 2 * count])), 0.5)
    for name in WAYS:
        if name != EXACT:
            threshold = 2.0 ** -int(name.rpartition("-")[2])
            options = {"gradient": "always-thinned", "threshold": threshold, "seed": 0}
            result[name] = entry(gradients(model, tokens, target, **options))
    return result


def make_probe(model: Any, used: Tensor) -> Any:
    """Looks at Adam: the size of its step in parts of the rate, and how many weights such a step moves at all, as one
    below half of a rounding unit is lost."""
    import transformers

    class Probe(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.found: dict[str, dict[str, list[float]]] = {}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in LOOKED_AT or args.max_steps == state.global_step < LOOKED_AT[0]:
                optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
                self.found[str(state.global_step)] = adam_steps(optimizer, model.lm_head.weight, used)

    return Probe()


@torch.no_grad()
def adam_steps(optimizer: Any, head: Tensor, used: Tensor) -> dict[str, list[float]]:
    sums = {name: [0.0, 0.0, 0] for name in GROUPS[1:]}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state:
                continue
            done = float(state["step"])
            first = state["exp_avg"].float() / (1 - group["betas"][0] ** done)
            second = state["exp_avg_sq"].float() / (1 - group["betas"][1] ** done)
            step = first / (second.sqrt() + group["eps"])
            moved = (parameter.float() - group["lr"] * step).to(parameter.dtype) != parameter
            parts = [("layers", step, moved)]
            if parameter is head:
                parts = [(n, step[mask], moved[mask]) for n, mask in zip(GROUPS[2:], (used, ~used))]
            for name, one, other in parts:
                sums[name][0] += float(one.abs().double().sum())
                sums[name][1] += float(other.double().sum())
                sums[name][2] += one.numel()
    return {name: [round(size / max(n, 1), 5), round(moved / max(n, 1), 5)] for name, (size, moved, n) in sums.items()}


def start_path(session: Session, start: str) -> Any:
    return lm.checkpoint_path(session, f"fine-tuning-seeds/start {start}")


def begin(session: Session, start: str) -> Cell:
    model, steps = STARTS[start]
    path = start_path(session, start)
    return train_start(session, build_model(spec_of(session, model), session.options.device), steps, path)


def started(session: Session, model: str, start: str) -> Any:
    found = build_model(spec_of(session, model), session.options.device)
    found.load_state_dict(torch.load(start_path(session, start), weights_only=True))
    return found


def tuned(session: Session, model_name: str, arm_name: str, head: str, seed: int) -> Cell:
    arm, way = ARMS[arm_name], WAYS[head]
    model = started(session, model_name, arm.start or model_name)
    rows, held_out = rows_of(session, arm.rows)
    used = used_tokens(session, rows, model.lm_head.weight.shape[0])
    looks = head == EXACT and seed == 0 and not arm.float32
    found: Cell = {"noise": {"start": noise(session, model, rows, used)}} if looks else {}
    before = held_out_loss(session, model, held_out, used)
    options: dict[str, Any] = {"seed": seed, "learning_rate": arm.rate} | arm.arguments
    if arm.float32:
        model, options = model.float(), options | {"bf16": True}
    assert way.patch is not None
    way.patch(model)
    probe = make_probe(model, used)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(session, model, way, rows, folder, probe, **options)
        trainer.train()
    logs = [item for item in trainer.state.log_history if "loss" in item]
    model = trainer.accelerator.unwrap_model(trainer.model)
    if looks:
        found["noise"]["end"] = noise(session, model, rows, used)
    if arm.float32:
        model = model.bfloat16()
    after = held_out_loss(session, model, held_out, used)
    limit = float(trainer.args.max_grad_norm)
    norms = [float(item["grad_norm"]) for item in logs]
    batch = trainer.args.per_device_train_batch_size
    return found | {
        "held_out": [[round(value, 5) for value in pair] for pair in (before, after)],
        "losses": [round(item["loss"], 4) for item in logs],
        "grad_norms": [round(norm, 4) for norm in norms],
        "clipped": round(sum(norm > limit for norm in norms) / len(norms), 3),
        "adam": probe.found,
        "used": int(used.sum()),
        "supervised": round(batch * statistics.mean(int((row["labels"][1:] != -100).sum()) for row in rows), 1),
    }


@contextlib.contextmanager
def others_may_come(session: Session) -> Iterator[None]:
    """Other parts use the GPU, too: what the allocator keeps of a run is given back."""
    yield
    if session.cuda:
        torch.cuda.empty_cache()


def awaited(session: Session, start: str, ours: bool) -> bool:
    """Are its weights there? One part trains them, the others wait for its file."""
    path = start_path(session, start)
    while not path.is_file() and not ours and session.deadline.left() > 0:
        time.sleep(0.2)
    return path.is_file()


def make_starts(session: Session, starts: list[str]) -> None:
    """Each by one part. Weights that are lost are trained again, and the runs from them with it."""
    one, of = session.options.part
    data = {"vocab": load_data(session.options.data).vocab}
    for index, start in enumerate(starts):
        if index % of != one - 1:
            continue
        key = f"start/{start}"
        if not start_path(session, start).is_file():
            session.record.cells.pop(key, None)
        session.cell(key, functools.partial(begin, session, start), most=150.0, least=30.0, settings=data)


def forget_runs_from_others(session: Session, start: str, keys: list[str]) -> int:
    """Runs from weights that were lost cannot stand beside those from others. Returns when these were made."""
    made = start_path(session, start).stat().st_mtime_ns
    for key in keys:
        if session.record.cells.get(key, {}).get("start", made) != made:
            print(f"{key}: its start is another one, it is measured again", flush=True)
            del session.record.cells[key]
    return made


def run(session: Session) -> None:
    tiny, (one, of) = session.options.tiny, session.options.part
    models = session.options.models or MODELS
    for name in models:
        if name not in MODELS:
            raise SystemExit(f"--models: expected names out of {', '.join(MODELS)}; got {name!r}")
    seeds = range(one - 1, of if tiny else SEEDS, of)
    # the study's own comparison of every model first, then what is changed, with the small one
    work = [(model, "answers", head, seed) for model in models for seed in seeds for head in ARMS["answers"].heads]
    if "small" in models:
        work += [("small", arm, head, seed) for seed in seeds for arm in ARMS for head in ARMS[arm].heads]
    work = [item for item in dict.fromkeys(work) if not session.options.heads or item[2] in session.options.heads]
    start_of = {item: ARMS[item[1]].start or item[0] for item in work}
    starts = [start for start in STARTS if start in start_of.values()]
    make_starts(session, starts)
    made: dict[str, int] = {}
    data = {"vocab": load_data(session.options.data).vocab}
    for item, start in start_of.items():
        key = "{}/{}/{}/seed {}".format(*item)
        if start not in made:
            if not awaited(session, start, starts.index(start) % of == one - 1):
                session.left_out.append(key)
                continue
            keys = ["{}/{}/{}/seed {}".format(*other) for other in start_of if start_of[other] == start]
            made[start] = forget_runs_from_others(session, start, keys)
        least = 40.0 if item[0] == "full" else 15.0

        def one_run(item: tuple[str, str, str, int] = item, when: int = made[start]) -> Cell:
            return tuned(session, *item) | {"start": when}

        with others_may_come(session):
            session.cell(key, one_run, most=4 * least, least=least, settings=data)
