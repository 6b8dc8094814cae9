"""Studies of whole training runs with other heads. docs/studies says what each asks, predicts and found.

    python experiments/study.py prepare --data FOLDER --text FILES [--wikitext FILE] [--instructions FILE]      no GPU
    python experiments/study.py grids [--minutes 5]                    heads alone, at the shapes of papers and blogs
    python experiments/study.py mve --data FOLDER                      a small linear RNN with every head
    python experiments/study.py scale                                  models of 24 layers: memory, batches, speed
    python experiments/study.py crossover                              heads alone over the vocabulary
    python experiments/study.py accumulation --data FOLDER             losses and gradient errors of trained models
    python experiments/study.py sparsity --data FOLDER                 the same models, fine-tuned
    python experiments/study.py fine_tuning --data FOLDER              a Llama of 1.2 billion parameters with Trainer
    python experiments/study.py fine_tuning_seeds --data FOLDER [--part 1/4]   the same, exact and thinned, four seeds
    python experiments/study.py pages [--check]                        tables and plots of docs/studies, of the records

A study goes on where an earlier call stopped: what is in its record (--record, or bench/records/studies/STUDY.json.xz)
is not measured again. LOGITLESS_LIBRARY names liblogitless.so. --cache FOLDER keeps what Triton and TorchInductor
compiled and tuned. --device cpu --tiny tries a study out at tiny sizes, in a temporary folder or beside its --record.
A cell of a record is of one model, list of heads and so on: a call that asks for others is refused, and takes another
--record.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import shlex
import sys
import tempfile
import time

START = time.monotonic()
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from studies import RECORDS  # noqa: E402  # which puts the folders of what is imported below on the path

GRACE = 0.95  # of the minutes; the rest is for what is under way and the record
# name, which is a module of studies: minutes
STUDIES = {
    "grids": 5.0,
    "mve": 6.0,
    "scale": 4.5,
    "crossover": 1.5,
    "accumulation": 6.0,
    "sparsity": 1.5,
    "fine_tuning": 6.0,
    "fine_tuning_seeds": 24.0,
}
PACKAGES = ("triton", "liger-kernel", "fla-core", "cut-cross-entropy", "transformers", "trl")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = found.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="tokenizer and token files; needs no GPU")
    prepare.add_argument("--data", type=pathlib.Path, required=True, help="the folder to write")
    prepare.add_argument("--text", nargs="+", type=pathlib.Path, required=True, help="files (.xz too) and folders")
    prepare.add_argument("--wikitext", type=pathlib.Path, help="WikiText-2's test set")
    prepare.add_argument("--instructions", type=pathlib.Path, help="GSM8K: lines of JSON, question and answer")
    prepare.add_argument("--vocab", type=int, default=32768)
    prepare.add_argument("--tokens", type=int, default=1000 * 16384 + 1, help="most to train on")
    prepare.add_argument("--megabytes", type=float, default=180.0, help="most text to read")
    pages = commands.add_parser("pages", help="tables and plots of docs/studies")
    pages.add_argument("--check", action="store_true", help="only say whether the tables are those of the records")
    for name, minutes in STUDIES.items():
        study = commands.add_parser(name)
        study.add_argument(
            "--record",
            type=pathlib.Path,
            help=f"default: bench/records/studies/{name}.json.xz; of --tiny a temporary file",
        )
        study.add_argument("--minutes", type=float, default=minutes)
        study.add_argument("--data", type=pathlib.Path, help="a folder that prepare wrote")
        study.add_argument("--checkpoints", type=pathlib.Path, help="of models in training (default: beside --data)")
        study.add_argument("--heads", default="", help="names, separated by commas (default: the study's own)")
        study.add_argument("--models", default="", help="names, separated by commas (default: the study's own)")
        study.add_argument(
            "--part", type=part, default=(1, 1), help="I/N: every N-th seed, in a record of its own (fine_tuning_seeds)"
        )
        study.add_argument("--rounds", type=int, default=5)
        study.add_argument(
            "--tune", type=int, default=2, help="configurations that Triton tries of each kernel of models' layers"
        )
        study.add_argument("--cap-gb", type=float, default=80.0, help="of the allocator, for the largest batch, 10^9")
        study.add_argument("--cache", type=pathlib.Path, help="folder of Triton's and TorchInductor's caches")
        study.add_argument("--device", default="cuda")
        study.add_argument("--tiny", action="store_true", help="tiny sizes, for a try-out on the CPU")
    return found


def part(text: str) -> tuple[int, int]:
    """1/4: the first of four."""
    one, _, of = text.partition("/")
    if not (one.isdecimal() and of.isdecimal() and 1 <= int(one) <= int(of)):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 <= I <= N, got {text!r}")
    return int(one), int(of)


def words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def places(args: argparse.Namespace) -> tuple[pathlib.Path, pathlib.Path | None]:
    """The record's file and the folder of checkpoints (None: beside the data). A try-out has its own, else it would go
    among the measured ones."""
    one, of = args.part
    name = f"{args.command}.json.xz" if of == 1 else f"{args.command}-{one}-of-{of}.json.xz"
    if not args.tiny:
        return args.record or RECORDS / name, args.checkpoints
    record = args.record or pathlib.Path(tempfile.mkdtemp(prefix="logitless-study-")) / name
    return record, args.checkpoints or record.parent / "checkpoints"


def run(args: argparse.Namespace, start: float) -> int:
    if args.cache:
        os.environ.setdefault("TRITON_CACHE_DIR", str(args.cache.resolve() / "triton"))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(args.cache.resolve() / "inductor"))
    import torch

    from limits import reported_by
    from machine import describe_machine, package_versions
    from studies import heads
    from studies.record import SettingsDiffer, StudyRecord
    from studies.session import Options, Session

    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("no CUDA device: nothing is measured (try --device cpu --tiny)", file=sys.stderr)
        return 2
    module = importlib.import_module(f"studies.{args.command}")
    known = getattr(module, "WAYS", heads.NAMES)
    unknown = [name for name in words(args.heads) if name not in known]
    if unknown:
        parser().error(f"--heads: expected names out of {', '.join(known)}; got {unknown[0]!r}")
    path, checkpoints = places(args)
    record = StudyRecord(args.command, path)
    command = " ".join(["python", "experiments/study.py", *map(shlex.quote, sys.argv[1:])])
    about = describe_machine(args.device) | {"command": command, "packages": package_versions(PACKAGES)}
    try:
        record.begin(about, {"tiny": args.tiny, "device": args.device.split(":")[0]})
    except SettingsDiffer as error:
        parser().error(str(error))
    options = Options(
        device=args.device,
        data=args.data,
        checkpoints=checkpoints,
        heads=words(args.heads),
        models=words(args.models),
        part=args.part,
        tune=args.tune,
        rounds=args.rounds,
        cap_gib=args.cap_gb * 1e9 / 2**30,
        tiny=args.tiny,
    )
    session = Session(record, options, 60 * args.minutes * GRACE - (time.monotonic() - start))

    def last_words() -> None:
        record.save()
        if session.left_out:
            print(f"left for the next call: {', '.join(session.left_out)}")
        print(
            f"{record.path}: {sum(record.final(key) for key in record.cells)} cells, {time.monotonic() - start:.0f} s"
        )

    with reported_by(start, 60 * args.minutes, last_words):
        try:
            module.run(session)
        except SettingsDiffer as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if args.command == "prepare":
        from studies import corpus

        files = (args.data, args.text, args.wikitext, args.instructions)
        print(json.dumps(corpus.prepare(*files, args.vocab, args.tokens, args.megabytes), indent=1))
        return 0
    if args.command == "pages":
        from studies import pages

        pages.write(args.check)
        return 0
    return run(args, START if arguments is None else time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
