"""Compares Logitless's CUDA backend with bare matrix products and every installed peer, interleaved in one process.

    python bench/gpu/run.py [--shapes gemma-2-2b,8192x131072x1024 | --grid heads|nvidia | --random 5 --seed 1]
        [--budgets unlimited,2560,160] [--peers auto|none|liger,quack] [--engines auto,portable,sm90]
        [--data std1,std3,std8,peaked] [--timing-data std1] [--ignored 0.5] [--sparsified 8,9,11] [--screened 8,9]
        [--fp8] [--passes loss,gradients,tokens,entropy] [--minutes 9] [--json out.json]
    python bench/gpu/run.py --trained FILE [--train-on FOLDER] ...      hidden states and head of a trained model
    python bench/gpu/run.py --show out.json      tables of an earlier run
    python bench/gpu/run.py --against RECORD [--within 5%,19%]      measures a record's rows of Logitless again, and
        fails if one is missing, slower or takes more memory; --show out.json --against RECORD compares two records

LOGITLESS_LIBRARY names liblogitless.so. Data are bf16. Ratios are to the bare matrix products of the same round, as
medians over the rounds: one product for the loss, three for forward and backward. After idle: each call follows a short
idle. Steady: back to back on a warm chip. Memory is the peak of PyTorch's allocator over the inputs. Errors are
relative to fp64, beside those of fp32 logits with dz in bf16. Passes are the mean loss alone, gradients of the mean,
gradients of a loss for each token, and of these losses and entropies. requirements-peers.txt lists the peers' packages.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import subprocess
import sys
import time

from bars import RUN, Within, bars_in, compared, parse_within, read, words_of
from harness import OPTIONS, ROOT, START, has_device, in_shares, measured_in_time, parsed, parser, words
from limits import Deadline, DeviceFault
from machine import describe_machine, package_versions
from record import MEAN_PASSES, PASSES, Record
from shapes import GRIDS, Shape, checked_share, random_shapes
from table import render


def arguments() -> argparse.ArgumentParser:
    options = parser(__doc__, budgets="unlimited,2560,160", peers="auto", rounds=10, minutes=9.0, json=None)
    which = options.add_mutually_exclusive_group()
    which.add_argument("--shapes", **OPTIONS["shapes"])
    which.add_argument("--grid", choices=list(GRIDS), default="heads", help="a set of shapes")
    which.add_argument("--random", type=int, metavar="COUNT", help="number of random shapes; see --seed")
    which.add_argument("--trained", metavar="FILE", help="a dump of experiments/convergence/run.py hidden")
    which.add_argument("--show", **OPTIONS["show"])
    options.add_argument(
        "--against", type=pathlib.Path, metavar="RECORD", help="compare with a record, whose command gives the options"
    )
    options.add_argument(
        "--within", type=parsed(parse_within), help="growth of ratios after idle and steady that passes: 5%%,19%%"
    )
    options.add_argument("--seed", type=int, default=0, help="seed of --random")
    options.add_argument("--engines", default="auto", help="auto (the library's choice), mma, portable, sm90")
    options.add_argument("--data", default="std1,std3,std8,peaked", help="inputs for the errors; none leaves them out")
    options.add_argument("--timing-data", default="std1", help="inputs of the timing (trained, with --trained)")
    options.add_argument(
        "--ignored", type=parsed(checked_share), default=0.0, help="share of tokens without a target in the timing"
    )
    options.add_argument(
        "--sparsified", default="8,9,11", help="thresholds 2^-K of sparsified gradients; none leaves them out"
    )
    options.add_argument("--screened", default="none", help="those of sparsified gradients behind an 8-bit screen")
    options.add_argument("--fp8", action="store_true", help="also fp8 logits, with the first budget")
    options.add_argument(
        "--train-on",
        metavar="FOLDER",
        help="folder of convergence/run.py prepare; makes a missing FILE of --trained, with hidden size 2048",
    )
    options.add_argument("--train-minutes", type=float, default=1.0)
    options.add_argument("--passes", type=parsed(parse_passes), default=MEAN_PASSES, help=f"out of {', '.join(PASSES)}")
    options.add_argument(
        "--peer-errors", action=argparse.BooleanOptionalAction, default=True, help="also measure errors of the peers"
    )
    options.add_argument("--leave-out", default="", metavar="METHODS", help="peers' methods not to run, separated by ;")
    options.add_argument("--prepare-seconds", type=float, default=60.0, help="most time to compile a peer's pass")
    return options


def parse_passes(text: str) -> tuple[str, ...]:
    for word in words(text):
        if word not in PASSES:
            raise ValueError(f"expected names out of {', '.join(PASSES)}; got {word!r}")
    return tuple(words(text))


def measure(record: Record, args: argparse.Namespace, shapes: list[Shape], deadline: Deadline) -> None:
    from bench import measure_shape
    from methods import our_methods
    from peer_heads import peer_methods

    engines = ["" if name == "auto" else name for name in args.engines.split(",")]
    try:
        given = (args.sparsified, args.screened)
        exponents, screened = ([] if one == "none" else [int(word) for word in words(one)] for one in given)
        ours = our_methods(args.budgets, engines, exponents, args.passes, screened, args.fp8)
    except Exception as error:
        ours = []
        record.note(f"logitless is not available: {type(error).__name__}: {error}")
    peers, missing = peer_methods(args.peers, args.passes)
    left_out = [name for name in args.leave_out.split(";") if name]
    for reason in (*missing, *(f"{name} is left out" for name in left_out)):
        record.note(reason)
    peers = [method for method in peers if method.name not in left_out]
    in_shares(
        record,
        deadline,
        {shape.name: shape for shape in shapes},
        lambda shape, share: measure_shape(record, args, shape, ours, peers, share),
    )


def trained_shape(args: argparse.Namespace) -> Shape:
    """Returns the shape of --trained's file, and makes the file first if needed. All data then come from it."""
    from data import use_trained

    if not os.path.exists(args.trained):
        if not args.train_on:
            raise ValueError(f"--trained: expected a file, or --train-on FOLDER with it, got {args.trained}")
        script = ROOT / "experiments" / "convergence" / "run.py"
        words = ["hidden", "--data", args.train_on, "--file", args.trained, "--device", args.device]
        subprocess.run([sys.executable, script, *words, "--minutes", str(args.train_minutes)], check=True)
    args.data = args.timing_data = "trained"
    return use_trained(args.trained)


def again_without(args: argparse.Namespace, method: str, seconds: float) -> list[str]:
    """Returns the further words of a run in the time that is left, without the method that broke the device."""
    names = ";".join(name for name in (args.leave_out, method) if name)
    return ["--leave-out", names, "--minutes", f"{args.minutes - seconds / 60:.2f}"]


def main() -> int:
    options, command = arguments(), sys.argv[1:]
    args = options.parse_args(command)
    try:
        if args.within and not args.against:
            raise ValueError("--within: expected --against RECORD, too")
        against, within = bars_in(args.against) if args.against else None, args.within or Within()
        if args.show:
            record = read(args.show)
        else:
            if against:
                command = [*words_of(against), *command]
                args = options.parse_args(command)
            shapes = args.shapes or GRIDS[args.grid]
            if args.random is not None:
                shapes = random_shapes(args.random, args.seed)
            if args.trained:
                shapes = [trained_shape(args)]
    except ValueError as error:
        options.error(str(error))

    def tables(record: Record) -> str:
        return compared(against, record, within)[0] if against else render(record)

    if args.show:
        print(tables(record))
    else:
        if not has_device(args):
            return 2
        facts = {"command": shlex.join([*RUN, *command]), "packages": package_versions()}
        record = Record(args.json, describe_machine(args.device) | facts)
        record.shapes = list(shapes)
        try:
            measured_in_time(args, record, lambda deadline: measure(record, args, shapes, deadline), tables)
        except DeviceFault as fault:
            print(f"{fault} broke the device, which this process has lost: a new one runs without it", flush=True)
            more = again_without(args, str(fault), time.monotonic() - START)
            os.execv(sys.executable, [*sys.orig_argv, *more])
    return 1 if against and not compared(against, record, within)[1] else 0


if __name__ == "__main__":
    sys.exit(main())
