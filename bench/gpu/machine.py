"""Facts about the machine that produced a figure."""

from __future__ import annotations

import datetime
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]


def program() -> str:
    path = pathlib.Path(sys.argv[0]).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def describe_machine(device: str) -> dict[str, str]:
    """Returns date, versions, driver and command, without which a figure means nothing."""
    import torch

    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python", program(), *map(shlex.quote, sys.argv[1:])]),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "device": "CPU",
    }
    if device.startswith("cuda"):
        facts["device"] = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        try:
            facts["driver, power limit, top clock"] = subprocess.run(
                query, capture_output=True, text=True, timeout=20, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError) as error:
            facts["driver"] = f"unknown ({type(error).__name__})"
    return facts


PEERS = "liger-kernel fla-core quack-kernels nvidia-cutlass-dsl cut-cross-entropy cuda-tile verl trl megatron-core"


def package_versions(names: Sequence[str] = ("triton", *PEERS.split())) -> str:
    from importlib import metadata

    versions = []
    for name in names:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)
