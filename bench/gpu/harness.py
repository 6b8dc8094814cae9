"""Shared arguments of benchmarks, shares of their time, and rounds in which all calls take turns."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from limits import Deadline, StepTimeout, reported_by, step_limit
from record import Record
from shapes import parse_budgets, parse_shapes
from table import markdown, number

if TYPE_CHECKING:  # a record can be shown without PyTorch
    from clock import Call, Clock

START = time.monotonic()
ROOT = pathlib.Path(__file__).resolve().parents[2]
if os.environ.get("LOGITLESS_LIBRARY"):
    sys.path.insert(0, str(ROOT / "python"))

Item = TypeVar("Item")
GRACE = 0.92  # share of the minutes; the rest is for the current step and the tables
MIB = 1 << 20


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return int(text)


def parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Makes a type of an argument, whose error is what ``parse`` expected."""

    def of(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return of


OPTIONS: dict[str, dict[str, Any]] = {
    "shapes": {"type": parsed(parse_shapes), "help": "NxVxD or names of heads, separated by commas"},
    "budgets": {"type": parsed(parse_budgets), "help": "MiB, unlimited or default, separated by commas"},
    "peers": {"help": "auto, none or names of peer_heads.py"},
    "heads": {"help": "names, separated by commas"},
    "dtype": {"choices": ("float32", "bfloat16")},
    "rounds": {"type": positive},
    "ranks": {"type": positive},
    "minutes": {"type": float, "help": "time limit; the record then has the results so far"},
    "json": {"type": pathlib.Path, "metavar": "FILE", "help": "write the record to FILE"},
    "show": {"type": pathlib.Path, "metavar": "FILE", "help": "measure nothing, and show the record in FILE"},
}


def parser(doc: str | None, device: str = "cuda", **defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser with --device and those of OPTIONS that have a default here."""
    arguments = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", default=device, help="cuda, or cpu for a trial of small shapes without a GPU")
    for name, default in defaults.items():
        options = {"help": f"default: {default}"} | OPTIONS[name]
        arguments.add_argument(f"--{name}", default=default, **options)
    return arguments


def has_device(args: argparse.Namespace) -> bool:
    import torch

    if not args.device.startswith("cuda") or torch.cuda.is_available():
        return True
    print("no CUDA device: nothing is measured (try --device cpu, with small shapes)", file=sys.stderr)
    return False


def measured_in_time(
    args: argparse.Namespace, record: Any, measure: Callable[[Deadline], None], render: Callable[[Any], str]
) -> int:
    """Measures, then writes and shows the record, at the latest when the minutes are over. Returns an exit status."""

    def last_words() -> None:
        record.save()
        print(render(record), flush=True)

    with reported_by(START, 60 * args.minutes, last_words):
        measure(Deadline(START, 60 * args.minutes * GRACE))
    return 0


def in_shares(record: Record, end: Deadline, items: Mapping[str, Item], run: Callable[[Item, Deadline], None]) -> None:
    """Runs each item with an equal part of the time left. A failing item is noted, and the others go on."""
    for index, (name, item) in enumerate(items.items()):
        share = end.share(len(items) - index)
        if share.left() <= 0:
            record.note(f"{name}: left out: no time left")
            continue
        print(f"{name}: {time.monotonic() - START:.0f} s so far, {share.left():.0f} s for it", flush=True)
        try:
            run(item, share)
        except Exception as error:
            traceback.print_exc()
            record.note(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        record.save()


def describe(error: BaseException) -> str:
    """Returns an error's name and text, or the line that raised it, as assertions of other libraries have no text."""
    text = str(error) or next((frame.line or "" for frame in traceback.extract_tb(error.__traceback__)[-1:]), "")
    return f"{type(error).__name__}: {' '.join(text.split())[:240]}"


def refusal(error: BaseException, ours: bool) -> str | None:
    """Returns why a method declined a problem, or None if it failed. Peers also decline by an assertion."""
    if type(error).__name__ in ("BudgetTooSmallError", "Refused"):
        return " ".join(str(error).split())[:240]
    return describe(error) if isinstance(error, (NotImplementedError, AssertionError)) and not ours else None


def tried(row: Any, seconds: float, work: Callable[[], object]) -> bool:
    """Does the work within a time limit. An error becomes the row's status and reason."""
    if seconds <= 0:
        row.status, row.reason = "skipped", "no time left to prepare it"
        return False
    try:
        with step_limit(seconds):
            work()
        return True
    except ImportError as error:
        row.status, row.reason = "skipped", describe(error)
    except (Exception, StepTimeout) as error:
        reason = refusal(error, row.ours)
        row.status, row.reason = "failed" if reason is None else "refused", reason or describe(error)
    return False


def ratio_of(times: Mapping[int, float], *bases: Mapping[int, float]) -> float | None:
    """Returns the median ratio to the sum of the bases, over the rounds that have all of them."""
    shared = set(times).intersection(*bases) if bases else ()
    ratios = [times[index] / sum(base[index] for base in bases) for index in shared]
    return statistics.median(ratios) if ratios else None


@dataclasses.dataclass
class Case:
    """A call to time, and the names of the cases that its ratios refer to."""

    name: str
    call: Call
    bases: tuple[str, ...] = ()
    gradient_bytes: int = 0  # memory of the call's gradients


def measured(clock: Clock, cases: Iterable[Case], rounds: int) -> list[str]:
    """Returns a row per case: median time, range, ratios to its bases, and memory beyond gradients.

    A round runs all cases in random order, each after a short idle.
    """
    by_name = {case.name: case for case in cases}
    memory = {}
    for name, case in by_name.items():
        case.call()  # compiles and plans
        memory[name] = (clock.extra_bytes(case.call) - case.gradient_bytes) / MIB
        clock.release()
    times: dict[str, dict[int, float]] = {name: {} for name in by_name}
    order = random.Random(0)
    for index in range(rounds):
        for name in order.sample(list(by_name), len(by_name)):
            times[name][index] = clock.burst_ms(by_name[name].call)
    lines = []
    for name, case in by_name.items():
        own = times[name]
        ratios = ", ".join(f"{number(ratio_of(own, times[base]), '.3f')} x {base}" for base in case.bases)
        each = own.values()
        line = [name, f"{statistics.median(each):.2f}", f"{min(each):.2f} to {max(each):.2f}"]
        lines.append([*line, ratios or "-", f"{memory[name]:.0f}"])
    return markdown(["case", "ms", "least to most", "of the same round's", "MiB beyond gradients"], lines)
