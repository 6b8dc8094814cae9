"""``logitless model`` and ``python -m logitless.cost_model``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from .. import options as _options
from ..errors import BudgetTooSmallError, LogitlessError
from .config import MIXERS, Model
from .devices import DEVICES, find_device
from .heads import KINDS, Head
from .published import find_model, names
from .step import OPTIMIZERS, Step, largest_batch, parameters, predict
from .sweep import OVER, draw, sweep
from .work import Batch

_GIB = 1 << 30
_HEADS = "upcast,whole,in-place,logitless,logitless:256MiB,sparsified"
_STEPS = {"tokens": 1, "vocab": 32768}  # a sweep's default values are 1 to 8 times these
_KINDS = "\n".join(f"  {name:<12}{text}" for name, text in KINDS.items())
_MODELS = "\n  ".join(textwrap.wrap(", ".join(names()), 100))
_DESCRIPTION = """Predicts parameters, FLOP, memory and time of one training step of a bf16 language model on one GPU,
and the head's share of them. Nothing is measured."""
_EPILOG = f"""models:
  {_MODELS}
  or a config.json of Hugging Face, or a folder with one
heads:
{_KINDS}
A budget may follow a head of Logitless: logitless:256MiB, or logitless:fastest.

examples:
  logitless model --model llama-3.2-1b --sequences 4 --length 4096 --memory 80GiB
  logitless model --model ~/models/my-model --optimizer adamw-fp32 --checkpoint 1 --device h100
  logitless model --fields mixer=attention,vocab=128256,hidden=2048,layers=16,intermediate=8192,heads=32,kv_heads=8
  logitless model --model qwen3-0.6b --sweep vocab --values 32768,131072,262144 --svg vocab.svg
"""


def parse_bytes(text: str) -> int:
    """Parses 256MiB, 1.5GB or a number of bytes."""
    size = _options.size(text)
    if size is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 256MiB or 80GB, got {text!r}")
    return size


def parse_threshold(text: str) -> float:
    """Parses a number, or a power of two such as 2^-9."""
    power = re.fullmatch(r"2\^(-[0-9]{1,3})", text)
    try:
        return 2.0 ** int(power[1]) if power else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a number such as 0.002 or 2^-9, got {text!r}") from error


def parse_numbers(text: str) -> list[int]:
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise argparse.ArgumentTypeError(f"expected whole numbers, separated by commas, got {text!r}")
    return [int(word) for word in text.split(",")]


def _parse_budget(text: str) -> int | str | None:
    return None if text == "" else text if text == "fastest" else parse_bytes(text)


def parse_heads(text: str, threshold: float) -> list[Head]:
    heads = []
    for word in text.split(","):
        kind, _, budget = word.partition(":")
        try:
            heads.append(Head(kind, _parse_budget(budget), threshold))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"heads: {word}: {error}") from error
    return heads


def parse_fields(text: str) -> dict[str, Any]:
    """Parses fields of a :class:`Model`, written NAME=VALUE and separated by commas."""
    types = {field.name: str(field.type) for field in dataclasses.fields(Model)}
    values: dict[str, Any] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        kind = types.get(name)
        if kind is None:
            raise ValueError(f"fields: expected names out of {', '.join(types)}, got {name!r}")
        if kind == "str":
            values[name] = value
        elif kind == "bool" and value in ("true", "false"):
            values[name] = value == "true"
        elif kind == "int" and re.fullmatch("[0-9]+", value):
            values[name] = int(value)
        else:
            raise ValueError(
                f"fields: {name}: expected {'true or false' if kind == 'bool' else 'a number'}, got {value!r}"
            )
    return values


def make_model(model: str | None, fields: str | None) -> Model:
    """Returns the model of a name or a configuration, with these fields replaced, or the model of fields alone."""
    values = parse_fields(fields) if fields else {}
    if model is not None:
        return dataclasses.replace(find_model(model), **values)
    needed = [field.name for field in dataclasses.fields(Model) if field.default is dataclasses.MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(f"expected --model, or --fields with {', '.join(needed)}; missing: {', '.join(missing)}")
    return Model(**values)


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="logitless model",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--model", "--config", metavar="MODEL", help="a name, a config.json, or a folder with one")
    command.add_argument(
        "--fields", metavar="NAME=VALUE,...", help=f"fields of the model; mixer is one of {', '.join(MIXERS)}"
    )
    command.add_argument("--sequences", type=int, default=1, help="sequences of the batch (default: %(default)s)")
    command.add_argument("--length", type=int, default=4096, help="tokens of each sequence (default: %(default)s)")
    command.add_argument("--heads", default=_HEADS, help="heads to compare (default: %(default)s)")
    command.add_argument(
        "--threshold",
        type=parse_threshold,
        default=_options.DEFAULT_THRESHOLD,
        help="threshold of sparsified gradients (default: 2^-9)",
    )
    command.add_argument(
        "--optimizer", choices=list(OPTIMIZERS), default="adamw", help="the optimizer (default: %(default)s)"
    )
    command.add_argument(
        "--checkpoint",
        type=int,
        default=0,
        metavar="LAYERS",
        help="layers of a checkpointed segment; 0, the default, is no checkpointing",
    )
    command.add_argument("--device", choices=list(DEVICES), default="h200", help="the GPU (default: %(default)s)")
    command.add_argument(
        "--memory", type=parse_bytes, metavar="SIZE", help="memory for the largest batch (default: the device's)"
    )
    command.add_argument("--sweep", choices=OVER, help="predict over tokens or vocabularies")
    command.add_argument("--values", type=parse_numbers, metavar="N,...", help="values of the sweep")
    command.add_argument("--svg", metavar="FILE", help="draw the sweep as an SVG file; needs matplotlib")
    command.add_argument("--json", action="store_true", help="print one JSON document")
    return command


def _facts(head: Head, step: Step | BudgetTooSmallError) -> dict[str, Any]:
    facts: dict[str, Any] = {"head": head.name}
    if isinstance(step, BudgetTooSmallError):
        return facts | {"error": f"{step}"}
    facts |= {name: value for name, value in dataclasses.asdict(step).items() if name != "head"}
    facts |= {"seconds": step.seconds, "head_time_share": step.head_time_share}
    return facts | {"head_memory_share": step.head_memory_share, "plan": step.head.plan}


def _cells(step: Step) -> dict[str, str]:
    return {
        "peak GiB": f"{step.peak_bytes / _GIB:.2f}",
        "at": step.peak_at,
        "head GiB": f"{step.head_bytes / _GIB:.2f}",
        "of memory": f"{100 * step.head_memory_share:.0f}%",
        "ms a step": f"{1e3 * step.seconds:.1f}",
        "head ms": f"{1e3 * step.head_seconds:.1f}",
        "of time": f"{100 * step.head_time_share:.1f}%",
    }


def _print_table(rows: list[dict[str, str]]) -> None:
    """Prints rows as aligned columns. A row with fewer columns ends with a text of any width."""
    full = max(rows, key=len)
    widths = [max([len(name), *(len(row[name]) for row in rows if len(row) == len(full))]) for name in full]
    for cells in (list(full), *(list(row.values()) for row in rows)):
        print("  ".join(text.ljust(width) for text, width in zip(cells, widths)).rstrip())


def _predicted(model: Model, batch: Batch, head: Head, options: dict[str, Any]) -> Step | BudgetTooSmallError:
    try:
        return predict(model, batch, head, **options)
    except BudgetTooSmallError as error:  # the other heads still have predictions
        return error


def _show_sweep(args: argparse.Namespace, model: Model, batch: Batch, heads: list[Head], options: Any) -> None:
    unit = _STEPS[args.sweep] * (batch.length if args.sweep == "tokens" else 1)
    points = sweep(model, batch, heads, args.sweep, args.values or [unit * i for i in range(1, 9)], **options)
    if args.svg:
        draw(points, args.sweep, args.svg)
    if args.json:
        print(json.dumps([{args.sweep: p.value} | _facts(p.head, p.step) for p in points], indent=1))
    else:
        _print_table([{args.sweep: f"{p.value}", "head": p.head.name} | _cells(p.step) for p in points])


def _show_heads(args: argparse.Namespace, model: Model, batch: Batch, heads: list[Head], options: Any) -> None:
    memory = args.memory or find_device(args.device).memory_bytes
    most = {head: largest_batch(model, batch.length, head, memory, **options) for head in heads}
    steps = {head: _predicted(model, batch, head, options) for head in heads}
    if args.json:
        document = {"predicted": True, "model": dataclasses.asdict(model), "batch": dataclasses.asdict(batch)}
        facts = [_facts(head, step) | {"largest_batch_sequences": most[head]} for head, step in steps.items()]
        print(json.dumps(document | options | {"memory_bytes": memory, "steps": facts}, indent=1))
        return
    print(f"predicted for {args.device}: {batch.sequences} x {batch.length} tokens, {parameters(model):,} parameters")
    for known in [step for step in steps.values() if isinstance(step, Step)][:1]:
        print(f"{known.model_flop:.4g} FLOP, {100 * known.head_flop_share:.1f}% of them the head's")
        fixed = (known.weight_bytes / _GIB, args.optimizer, known.optimizer_bytes / _GIB, known.saved_bytes / _GIB)
        print("weights {:.2f} GiB, states of {} {:.2f} GiB, saved activations {:.2f} GiB".format(*fixed))
    print()
    rows = []
    for head, step in steps.items():
        rows.append({"head": head.name, f"sequences in {memory / _GIB:.4g} GiB": f"{most[head]}"})
        rows[-1] |= _cells(step) if isinstance(step, Step) else {"": f"{step}"}
    _print_table(rows)


def _run(args: argparse.Namespace) -> None:
    model = make_model(args.model, args.fields)
    batch, heads = Batch(args.sequences, args.length), parse_heads(args.heads, args.threshold)
    options = {"optimizer": args.optimizer, "checkpoint": args.checkpoint, "device": args.device}
    if args.sweep is not None:
        _show_sweep(args, model, batch, heads, options)
    elif args.values or args.svg:
        raise ValueError("expected --sweep where --values or --svg are given")
    else:
        _show_heads(args, model, batch, heads, options)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        try:
            _run(parser().parse_args(arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, so Python's last flush must go nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # a shell's status for a program that SIGPIPE ended
    except (ValueError, LogitlessError, ImportError, OSError) as error:
        print(f"logitless model: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) and not isinstance(error, LogitlessError) else 1
    return 0
