"""Whole training steps with other heads: tokens per second and peak memory, interleaved in one process.

    python bench/steps.py [--models llama-1b,gemma-270m,qwen3-4b,gla-1.3b] [--heads stock,logitless,liger] [--minutes 9]
        [--layers 4] [--sequences 4] [--length 4096] [--rounds 8] [--tune 8] [--json out.json]
    python bench/steps.py --show out.json      of an earlier run

LOGITLESS_LIBRARY names liblogitless.so. The models are those of transformers (gla-1.3b: flash-linear-attention's). They
are built from their published configurations with random weights in bf16, and only the head changes. The heads are:

- stock: the model's own;
- Liger's patch with everything but its fused linear cross entropy off;
- Apple's cut cross entropy and, for gla-1.3b, Liger's, as functions, because their patches do not know the model;
- the fused head of TRL's trainers;
- flash-linear-attention's own;
- ours, put in as README.md does.

A step is forward, backward and AdamW, fused with its state in bf16. The learning rate is 0: a step does all of its
work, and every head sees the same weights in every round. Each round takes one step with each head, in random order.
Tokens are random, so softmaxes are flat: the worst case for sparsified gradients and the best for Apple's filter of
small gradients. A head that is not installed or fails has a row with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
from typing import TYPE_CHECKING

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "gpu"))

from harness import has_device, in_shares, measured_in_time, parser, positive  # noqa: E402
from limits import Deadline  # noqa: E402
from step_record import StepRecord, load_steps, render_steps  # noqa: E402

if TYPE_CHECKING:  # a record can be shown without PyTorch
    from step_heads import Head
    from step_models import Spec

PACKAGES = ("transformers", "triton", "liger-kernel", "cut-cross-entropy", "trl", "fla-core", "flash-linear-attention")


def arguments() -> argparse.ArgumentParser:
    options = parser(__doc__, heads="all", rounds=8, minutes=9.0, json=None, show=None)
    options.add_argument("--models", default="all", help="names, or all")
    options.add_argument("--layers", type=positive, help="layers of every model, to reduce its depth")
    options.add_argument("--sequences", type=positive, help="sequences per step (default: 4; 2 for qwen3-4b)")
    options.add_argument("--length", type=positive, help="tokens per sequence (default: 4096)")
    options.add_argument("--prepare-seconds", type=float, default=60.0, help="most time for a head's first steps")
    options.add_argument(
        "--tune",
        type=positive,
        metavar="MOST",
        help="configurations that Triton tries for each kernel of flash-linear-attention's layers (default: all)",
    )
    return options


def measure(
    record: StepRecord, args: argparse.Namespace, specs: list[Spec], heads: list[Head], deadline: Deadline
) -> None:
    from step_heads import import_libraries
    from step_models import import_model, sized
    from step_rounds import ModelBench

    tiny = not args.device.startswith("cuda")
    import_libraries()
    for spec in specs:
        with contextlib.suppress(Exception):  # its rows report the error
            import_model(spec)

    def measure_model(spec: Spec, share: Deadline) -> None:
        spec = sized(spec, tiny, args.layers, args.sequences, args.length)
        bench = ModelBench(record, spec, args.device, args.prepare_seconds, args.tune)
        bench.clock.release()  # frees what the model before this one left
        bench.run(heads, args.rounds, share)

    in_shares(record, deadline, {spec.name: spec for spec in specs}, measure_model)


def main() -> int:
    args = arguments().parse_args()
    if args.show:
        print(render_steps(load_steps(args.show)))
        return 0
    from machine import describe_machine, package_versions
    from step_heads import chosen_heads
    from step_models import chosen_specs

    try:
        specs, heads = chosen_specs(args.models), chosen_heads(args.heads)
    except ValueError as error:
        arguments().error(str(error))
    if not has_device(args):
        return 2
    record = StepRecord(args.json, describe_machine(args.device) | {"packages": package_versions(PACKAGES)})
    return measured_in_time(args, record, lambda end: measure(record, args, specs, heads, end), render_steps)


if __name__ == "__main__":
    sys.exit(main())
