"""The benchmark of FSDP2 steps, tried out with processes on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch.distributed as dist

FSDP = pathlib.Path(__file__).resolve().parent / "fsdp.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FSDP), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.skipif(
    not dist.is_gloo_available() or not os.environ.get("LOGITLESS_LIBRARY"), reason="needs gloo and the library"
)
def test_all_heads_give_the_same_loss(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "record.json"
    done = run("--device", "cpu", "--rounds", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    heads = json.loads(path.read_text())["heads"]
    losses = [head["loss"] for name, head in heads.items() if name != "no head"]
    # Stock's logits are rounded to bfloat16, and are less than 4.
    assert len(losses) == 4 and max(losses) - min(losses) <= 4 * 2.0**-8
    assert all(len(head["ms"]) == 1 for head in heads.values())
    again = run("--show", str(path))
    assert again.stdout == done.stdout and "| logitless thinned |" in again.stdout


def test_bad_arguments_are_named() -> None:
    done = run("--device", "cpu", "--ranks", "1")
    assert done.returncode == 2 and "--ranks" in done.stderr and "expected" in done.stderr
