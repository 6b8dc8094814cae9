"""Every language model class of the installed transformers that takes labels, tiny, unpatched and patched.

    python tests/python/huggingface/table.py [--only REGEX] [--write docs/hugging_face.md]
    python tests/python/huggingface/table.py --record classes.jsonl --minutes 5    # again and again, until it is whole

The table replaces everything from "## Classes" on in the file. A record keeps the results, so that the next call
resumes where the last one stopped. It examines the missing classes, and those that a larger --seconds may finish.

Each class runs in its own process. The exit status is 1 if a loss or a gradient differs by more than rounding explains
(see Reference in compare.py), or if that is undecided.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import pathlib
import re
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import logitless.transformers
import torch
import transformers
import transformers.modeling_utils  # before a process is forked for each class, as it takes seconds
from compare import Reference, difference, step
from precision import exact_step
from tiny import build, inputs

KINDS = (
    r"(ForCausalLM|LMHead\w*Model|WithLMHeadModel|ForConditionalGeneration|ForMaskedLM|ForPreTraining|EncoderDecoderModel)"
    r"$"
)
CONTEXT = multiprocessing.get_context("fork")


def names() -> list[str]:
    return sorted(n for n in dir(transformers) if re.search(KINDS, n) and not n.startswith(("TF", "Flax", "Auto")))


def one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:240]


def examine(name: str) -> tuple[str, str] | None:
    """Returns (verdict, detail) of a class, or None if it takes no labels."""
    try:
        kind = getattr(transformers, name)
        if "labels" not in inspect.signature(kind.forward).parameters:
            return None
        model = build(kind)
        try:
            batch = inputs(model)
            stock = step(model, batch)
        except Exception:
            batch = inputs(model, time_first=True)
            stock = step(model, batch)
    except Exception as error:
        return "unbuildable", one_line(error)
    if not torch.isfinite(stock[0]):
        return "unbuildable", f"its own loss is {float(stock[0])}"
    if (noise := difference(stock, step(model, batch))) > 0:
        return "unbuildable", f"its own gradients differ by {noise:.1e} from run to run"
    try:
        reference = Reference.of(model, batch)
    except Exception as error:
        return "undecided", f"not run in float64: {one_line(error)}"
    try:
        logitless.transformers.patch(model)
        exact, fused = exact_step(model, batch), step(model, batch)
    except NotImplementedError as error:
        return "refused", one_line(error)
    if getattr(fused.outputs, "logits", None) is not None:
        return "different", "its logits were made"
    shares = reference.share(fused), reference.share(exact)
    if max(shares) > 1:
        return "different", "in float32 by {:.2g} and in float64 by {:.2g} of what is allowed".format(*shares)
    if unseen := reference.unseen(torch.float64):
        return "undecided", f"rounding hides a thousandth of {', '.join(unseen)}"
    weak = "*" if reference.unseen(torch.float32) else ""
    return "equal", f"{difference(reference.exact, fused):.0e}{weak}"


def child(name: str, pipe: object) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        pipe.send(examine(name))
    except BaseException as error:
        pipe.send(("different", one_line(error)))


def run(name: str, seconds: float) -> tuple[str, tuple[str, str] | None]:
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=child, args=(name, there))
    process.start()
    there.close()
    try:
        result = here.recv() if here.poll(seconds) else ("unbuildable", f"took more than {seconds:.0f} s at this size")
    except EOFError:
        result = ("unbuildable", "its process died, as for want of memory")
    process.kill()
    process.join()
    return name, result


class Record:
    """Results for the classes of the installed transformers, in a file with a line of JSON for each."""

    def __init__(self, file: pathlib.Path | None, seconds: float) -> None:
        self.file, self.results = file, {}
        for line in file.read_text().splitlines() if file and file.exists() else ():
            row = json.loads(line)
            if row["transformers"] == transformers.__version__ and (row["within"] is None or row["within"] >= seconds):
                self.results[row["class"]] = tuple(row["found"]) if row["found"] else None

    def add(self, name: str, result: tuple[str, str] | None, seconds: float) -> None:
        self.results[name] = result
        if self.file:
            late = seconds if result and result[1].startswith("took more than") else None
            row = {"transformers": transformers.__version__, "class": name, "found": result, "within": late}
            with self.file.open("a") as lines:
                lines.write(json.dumps(row) + "\n")


KINDS_OF_VERDICT = {
    "equal": "equal",
    "refused": "not supported",
    "unbuildable": "not built at this size",
    "undecided": "undecided",
    "different": "DIFFERENT",
}
PER_ROW = 2  # classes in a row of the table


def reason(name: str, detail: str) -> str:
    """Returns the first sentence of a detail, without the class's name, as a cell of a table."""
    text = detail.removeprefix("UnsupportedError: ").removeprefix("logitless.transformers: ")
    text = re.split(r";|\. ", text.replace(f"{name}.", "").replace(name, "the model"))[0]
    return re.sub(r"[\w.]+\(\)", r"`\g<0>`", text.replace("|", "/").strip())


def folded(title: str, rows: list[str]) -> list[str]:
    """Returns a table that a reader opens."""
    return ["", f'??? note "{title}"', "", *(f"    {row}" for row in rows)]


def table(results: dict[str, tuple[str, str]]) -> str:
    sizes = {verdict: sum(v == verdict for v, _ in results.values()) for verdict in KINDS_OF_VERDICT}
    shown = [v for v in KINDS_OF_VERDICT if sizes[v] or v in ("equal", "refused", "unbuildable")]
    counts = ", ".join(f"{sizes[v]} {KINDS_OF_VERDICT[v]}" for v in shown)

    def title(verdict: str) -> str:
        return f"{sizes[verdict]} classes are {KINDS_OF_VERDICT[verdict]}"

    lines = [
        f"transformers {transformers.__version__}, classes: {counts}.",
        "",
        "The error is the largest of the loss and the gradients in float32, against float64. Its unit is each tensor's",
        "largest element, or a thousandth of the model's largest gradient where that is more. A star marks classes in",
        "which float32 cannot show a difference of a thousandth, and float64 does.",
    ]
    cells = [f"{name} | {detail}" for name, (verdict, detail) in results.items() if verdict == "equal"]
    rows = [cells[start : start + PER_ROW] for start in range(0, len(cells), PER_ROW)]
    rows = [row + [" | "] * (PER_ROW - len(row)) for row in rows]
    head = ["| " + " | ".join(["Class | Error"] * PER_ROW) + " |", "|" + "---|" * (2 * PER_ROW)]
    lines += folded(title("equal"), head + [f"| {' | '.join(row)} |" for row in rows])
    for verdict in shown[1:]:
        reasons: dict[str, list[str]] = {}
        for name, (_, detail) in ((n, f) for n, f in results.items() if f[0] == verdict):
            reasons.setdefault(reason(name, detail), []).append(name)
        if reasons:
            rows_of = [f"| {', '.join(names)} | {why} |" for why, names in reasons.items()]
            lines += folded(title(verdict), ["| Class | Why |", "|---|---|", *rows_of])
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="regular expression of class names")
    parser.add_argument("--write", help="file for the table")
    parser.add_argument("--seconds", type=float, default=120, help="time limit per class")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--record", type=pathlib.Path, help="file of results; classes in it are not examined again")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no class after this time")
    options = parser.parse_args()
    record = Record(options.record, options.seconds)
    chosen = [name for name in names() if re.search(options.only, name)]
    start = time.monotonic()

    def turn(name: str) -> tuple[str, tuple[str, str] | None] | None:
        return run(name, options.seconds) if time.monotonic() - start < 60 * options.minutes else None

    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(turn, [name for name in chosen if name not in record.results]):
            if result is not None:
                record.add(*result, options.seconds)
                if result[1]:
                    print(f"{result[1][0]:12} {result[0]}: {result[1][1]}", flush=True)
    missing = [name for name in chosen if name not in record.results]
    results = {name: record.results[name] for name in chosen if record.results.get(name)}
    text = table(results)
    print(text.split("\n", 1)[0], f"({time.monotonic() - start:.0f} s; {len(missing)} still to do)")
    if options.write and not missing:
        file = pathlib.Path(options.write)
        kept = file.read_text().split("## Classes\n")[0]
        file.write_text(f"{kept}## Classes\n\n{text}")
    return int(bool(missing) or any(verdict in ("different", "undecided") for verdict, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
