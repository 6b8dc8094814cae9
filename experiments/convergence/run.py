"""Trains with several heads that differ in nothing but the head's gradient.

    python experiments/convergence/run.py prepare --data FOLDER [--text PATH ...]      needs no GPU
    python experiments/convergence/run.py train --data FOLDER --output FOLDER [--model transformer|gla]
        [--heads exact,sparsified-2^-9,...] [--steps 1000] [--minutes 9]
    python experiments/convergence/run.py report --output FOLDER                       a table
    python experiments/convergence/run.py hidden --data FOLDER --file FILE [--dim 2048] [--minutes 1]

"train" resumes where an earlier call stopped. LOGITLESS_LIBRARY names liblogitless.so.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parents[1] / "bench" / "gpu"))  # this folder's run.py comes first

import harness  # noqa: E402, F401  # which finds this tree's package


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = arguments.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="tokenizer and token files")
    prepare.add_argument("--text", nargs="*", default=[], type=pathlib.Path, metavar="PATH",
                         help="files (.xz too) and folders; default: this interpreter's Python sources")  # fmt: skip
    prepare.add_argument("--megabytes", type=float, default=180, help="most text to read")
    prepare.add_argument("--vocab", type=int, default=131072)
    prepare.add_argument("--tokens", type=int, default=1250 * 16384 + 1, help="most training tokens to keep")
    prepare.add_argument("--validation-tokens", type=int, default=16 * 16384 + 1)
    prepare.add_argument("--instructions", type=pathlib.Path, metavar="FILE",
                         help="GSM8K for fine_tuning.py: lines of JSON, question and answer")  # fmt: skip
    train = commands.add_parser("train", help="one model with each of the heads")
    train.add_argument("--heads", default="exact,sparsified-2^-9,sparsified-2^-11,apple,apple-kahan,canonical",
                       help="exact, sparsified-2^-K, screened-2^-K, or peers of bench/gpu/peer_heads.py")  # fmt: skip
    train.add_argument("--checkpoints", type=pathlib.Path, help="default: OUTPUT/checkpoints")
    report = commands.add_parser("report", help="a table of the logs")
    hidden = commands.add_parser("hidden", help="train a model, and write its hidden states, head and targets")
    hidden.add_argument("--file", type=pathlib.Path, required=True)
    hidden.add_argument("--tokens", type=int, default=8192)
    for command in (train, hidden):
        command.add_argument("--model", default="transformer", help="kind of layers, one of models.py's MIXERS")
        command.add_argument("--dim", type=int, default=1024 if command is train else 2048)
        command.add_argument("--layers", type=int, default=8 if command is train else 4)
        command.add_argument("--attention-heads", type=int, default=16)
        command.add_argument("--length", type=int, default=1024, help="tokens per sequence")
        command.add_argument("--tied", action="store_true", help="the head is the embedding")
        command.add_argument("--expand", type=float, nargs=2, default=[0.5, 1.0], metavar=("K", "V"),
                             help="widths of GLA's keys and values, relative to the model's")  # fmt: skip
        command.add_argument("--batch", type=int, default=16, help="sequences per step")
        command.add_argument("--steps", type=int, default=1000)
        command.add_argument("--validate-every", type=int, default=100, metavar="STEPS")
        command.add_argument("--minutes", type=float, default=9.0 if command is train else 1.0)
        command.add_argument("--rate", type=float, default=6e-4)
        command.add_argument("--warmup", type=int, default=100)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--compile", action="store_true", help="torch.compile of the model's body")
        command.add_argument("--device", default="cuda")
    for command in (prepare, train, hidden):
        command.add_argument("--data", type=pathlib.Path, required=True)
    for command in (train, report):
        command.add_argument("--output", type=pathlib.Path, required=True)
    return arguments


def prepare(args: argparse.Namespace) -> None:
    import tokens
    from text import Documents

    documents = Documents(args.text, args.megabytes, seed=0)
    print(documents.summary(), flush=True)
    about = tokens.prepare(args.data, documents, args.vocab, args.tokens, args.validation_tokens)
    if args.instructions:
        about["instructions"] = tokens.prepare_instructions(args.data, args.instructions)
    print(json.dumps(about, indent=1))


def train_head(args: argparse.Namespace, name: str, data: Any, seconds: float) -> None:
    """Trains one head from its checkpoint on, and adds a line per record to its log."""
    import torch

    import report
    import train
    from peer_heads import loss_named

    log = args.output / f"{args.model}--{name}.jsonl"
    checkpoint = (args.checkpoints or args.output / "checkpoints") / f"{args.model}--{name}.pt"
    if log.is_file() and max(report.Run(log).loss, default=0) >= args.steps:
        print(f"{name}: all {args.steps} steps are in {log}", flush=True)
        return
    try:
        head = loss_named(name)
    except ImportError as error:
        print(f"{name}: left out: {error}", flush=True)
        return
    trainer = train.Trainer(args, data, head)
    if checkpoint.is_file():
        trainer.restore(checkpoint)
    elif log.is_file():
        log.unlink()  # these steps have no model any more
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as lines:
        if trainer.step == 0:
            device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
            about = {
                "device": device,
                "torch": torch.__version__,
                "parameters": sum(p.numel() for p in trainer.model.parameters()),
            }
            options = {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in vars(args).items()}
            lines.write(json.dumps({"step": 0, "about": about, "options": options}) + "\n")
        for record in train.run(trainer, seconds):
            lines.write(json.dumps(record) + "\n")
            lines.flush()
            if "validation" in record:
                print(f"{name}: step {record['step']}: validation {record['validation']:.4f}", flush=True)
    trainer.save(checkpoint)


def train_heads(args: argparse.Namespace) -> None:
    import torch

    import tokens

    end = time.monotonic() + 60 * args.minutes
    data = tokens.load(args.data)
    for name in args.heads.split(","):
        left = end - time.monotonic()
        if left <= 0:
            print(f"{name}: left for the next call: the {args.minutes:g} minutes are over", flush=True)
            continue
        train_head(args, name, data, left)
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
    show(args)


def show(args: argparse.Namespace) -> None:
    import report

    text = report.table(report.load(args.output))
    print(text)
    args.output.mkdir(parents=True, exist_ok=True)  # no head had time to begin
    (args.output / "table.md").write_text(text + "\n")


def hidden(args: argparse.Namespace) -> None:
    """Writes a dump for benchmarks: bf16 hidden [N, D] and weight [V, D], int64 target [N], from held-out text."""
    import torch

    import tokens
    import train
    from peer_heads import loss_named

    data = tokens.load(args.data)
    trainer = train.Trainer(args, data, loss_named("exact"))
    for record in train.run(trainer, 60 * args.minutes):
        if "validation" in record:
            print(f"step {record['step']}: validation {record['validation']:.4f}", flush=True)
    count = -(-args.tokens // args.length)
    with torch.no_grad():
        batches = [trainer.batch(trainer.validation, torch.arange(count)[i : i + 1]) for i in range(count)]
        states = torch.cat([trainer.hidden(ids) for ids, _ in batches])[: args.tokens]
    target = torch.cat([ids for _, ids in batches])[: args.tokens]
    dump = {"hidden": states.cpu(), "weight": trainer.model.head.detach().bfloat16().cpu(), "target": target.cpu()}
    args.file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dump | {"step": trainer.step, "validation": trainer.validate()}, args.file)
    print(f"{args.file}: N {len(target)}, V {data.vocab}, D {args.dim}, after {trainer.step} steps")


def main() -> int:
    args = parser().parse_args()
    if args.command in ("train", "hidden"):
        from models import MIXERS

        if args.model not in MIXERS:
            parser().error(f"--model: expected one of {', '.join(MIXERS)}, got {args.model!r}")
    try:
        {"prepare": prepare, "train": train_heads, "report": show, "hidden": hidden}[args.command](args)
    except ImportError as error:  # a model's or a head's package is missing
        raise SystemExit(str(error)) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
