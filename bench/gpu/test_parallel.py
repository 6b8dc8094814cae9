"""The benchmark of several GPUs, tried out with processes on the CPU."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch.distributed as dist

HERE = pathlib.Path(__file__).resolve().parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "parallel.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.skipif(
    not dist.is_gloo_available() or not os.environ.get("LOGITLESS_LIBRARY"), reason="needs gloo and the library"
)
def test_all_ways_give_the_same_loss(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "record.json"
    done = run("--device", "cpu", "--shapes", "64x101x32", "--rounds", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())["shapes"]["64x101x32"]
    losses = [way["loss"] for name, way in found.items() if way["loss"] is not None and "thinned" not in name]
    # A logit is a sum of 32 products in float32; of a standard deviation of 3, none of these reaches 16.
    assert len(losses) == 5 and max(losses) - min(losses) <= 2 * 32 * 2.0**-24 * 16
    for data in ("flat", "peaked"):
        one, shared = (found[f"thinned, {data}, {how}"]["loss"] for how in ("one GPU", "vocabulary parallel"))
        assert abs(one - shared) <= 2 * 32 * 2.0**-24 * 16
    assert all(way["same_on_all_ranks"] and len(way["ms"]) == 2 for way in found.values())
    again = run("--show", str(path))
    assert again.stdout == done.stdout and "| sequence parallel |" in again.stdout


@pytest.mark.skipif(not dist.is_gloo_available() or not os.environ.get("LOGITLESS_LIBRARY"), reason="needs gloo")
def test_without_time_nothing_is_measured() -> None:
    done = run("--device", "cpu", "--shapes", "64x101x32", "--minutes", "0")
    assert done.returncode == 0 and "|" not in done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [("--ranks", "1"), ("--shapes", "65x100x32"), ("--shapes", "none")])
def test_bad_arguments_are_named(arguments: tuple[str, ...]) -> None:
    done = run("--device", "cpu", *arguments)
    assert done.returncode != 0 and f"{arguments[0]}: expected" in done.stderr
