"""Arguments that benchmarks share, shares of their time, and rounds in which all calls take turns."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from limits import Deadline, reported_by
from record import Record
from shapes import parse_budgets, parse_shapes
from table import markdown, number

if TYPE_CHECKING:  # a record is shown without PyTorch
    from clock import Call, Clock

START = time.monotonic()
ROOT = pathlib.Path(__file__).resolve().parents[2]
if os.environ.get("LOGITLESS_LIBRARY"):
    sys.path.insert(0, str(ROOT / "python"))

Key = TypeVar("Key")
Item = TypeVar("Item")
MIB = 1 << 20


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return int(text)


def parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argument's type; what ``parse`` expected is the error."""

    def of(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return of


OPTIONS: dict[str, dict[str, Any]] = {
    "shapes": {"type": parsed(parse_shapes), "help": "NxVxD or names of heads, separated by commas"},
    "budgets": {"type": parsed(parse_budgets), "help": "MiB, unlimited or default, separated by commas"},
    "peers": {"help": "auto, none or names of methods.py"},
    "heads": {"help": "names, separated by commas"},
    "dtype": {"choices": ("float32", "bfloat16")},
    "rounds": {"type": positive},
    "ranks": {"type": positive},
    "minutes": {"type": float, "help": "after which it ends with what was measured"},
    "json": {"type": pathlib.Path, "metavar": "FILE", "help": "where the record goes"},
    "show": {"type": pathlib.Path, "metavar": "FILE", "help": "measure nothing: show this record"},
}


def parser(doc: str | None, device: str = "cuda", **defaults: Any) -> argparse.ArgumentParser:
    """With --device, and those of OPTIONS that have a default here."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--device", default=device, help="cuda, or cpu: a try-out without a GPU, of small shapes")
    for name, default in defaults.items():
        options = {"help": f"default: {default}"} | OPTIONS[name]
        found.add_argument(f"--{name}", default=default, **options)
    return found


def has_device(args: argparse.Namespace) -> bool:
    import torch

    if not args.device.startswith("cuda") or torch.cuda.is_available():
        return True
    print("no CUDA device: nothing is measured (try --device cpu, with small shapes)", file=sys.stderr)
    return False


@contextlib.contextmanager
def reported(record: Record, minutes: float, show: Callable[[], None]) -> Iterator[None]:
    """The record is written and shown at the end of the block, or when the minutes are over."""

    def last_words() -> None:
        record.save()
        show()

    with reported_by(START, 60 * minutes, last_words):
        yield


def in_shares(record: Record, end: Deadline, items: Mapping[str, Item], run: Callable[[Item, Deadline], None]) -> None:
    """Each item with an equal part of the time that is left. One that fails is noted, and the others go on."""
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


def interleaved(clock: Clock, calls: Mapping[Key, Call], rounds: int) -> dict[Key, list[float]]:
    """Milliseconds of each call in each round; a round runs all of them, shuffled, each after a short idle."""
    times: dict[Key, list[float]] = {key: [] for key in calls}
    order = random.Random(0)
    for _ in range(rounds):
        for key in order.sample(list(calls), len(calls)):
            times[key].append(clock.burst_ms(calls[key]))
    return times


def ratio_of(times: list[float], base: list[float]) -> float | None:
    """The median of the ratios of the same rounds."""
    ratios = [one / other for one, other in zip(times, base)]
    return statistics.median(ratios) if ratios else None


@dataclasses.dataclass
class Case:
    """A call to time, and the names of those that its ratios are to."""

    name: str
    call: Call
    bases: tuple[str, ...] = ()
    gradient_bytes: int = 0  # of its memory


def measured(clock: Clock, cases: Iterable[Case], rounds: int) -> list[str]:
    """A row a case: median of its times, their range, ratios to its bases, and memory beyond gradients."""
    found = {case.name: case for case in cases}
    memory = {}
    for name, case in found.items():
        case.call()  # compiles and plans
        memory[name] = (clock.extra_bytes(case.call) - case.gradient_bytes) / MIB
        clock.release()
    times = interleaved(clock, {name: case.call for name, case in found.items()}, rounds)
    lines = []
    for name, case in found.items():
        own = times[name]
        ratios = ", ".join(f"{number(ratio_of(own, times[base]), '.3f')} x {base}" for base in case.bases)
        line = [name, f"{statistics.median(own):.2f}", f"{min(own):.2f} to {max(own):.2f}"]
        lines.append([*line, ratios or "-", f"{memory[name]:.0f}"])
    return markdown(["case", "ms", "least to most", "of the same round's", "MiB beyond gradients"], lines)
