"""Tests of the benchmarks of several GPUs, with processes on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch.distributed as dist

HERE = pathlib.Path(__file__).resolve().parent
needs_ranks = pytest.mark.skipif(
    not dist.is_gloo_available() or not os.environ.get("LOGITLESS_LIBRARY"), reason="needs gloo and the library"
)


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@needs_ranks
def test_all_ways_give_the_same_loss(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "record.json"
    done = run("parallel.py", "--device", "cpu", "--shapes", "64x101x32", "--rounds", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    ways = json.loads(path.read_text())["shapes"]["64x101x32"]
    losses = [way["loss"] for name, way in ways.items() if way["loss"] is not None and "sparsified" not in name]
    # A logit is a sum of 32 products in float32. Its standard deviation is 3, and none reaches 16.
    assert len(losses) == 5 and max(losses) - min(losses) <= 2 * 32 * 2.0**-24 * 16
    for data in ("flat", "peaked"):
        one, shared = (ways[f"sparsified, {data}, {how}"]["loss"] for how in ("one GPU", "vocabulary parallel"))
        assert abs(one - shared) <= 2 * 32 * 2.0**-24 * 16
    assert all(way["same_on_all_ranks"] and len(way["ms"]) == 2 for way in ways.values())
    again = run("parallel.py", "--show", str(path))
    assert again.stdout == done.stdout and "| sequence parallel |" in again.stdout


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@needs_ranks
def test_all_heads_give_the_same_loss(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "record.json"
    done = run("fsdp.py", "--device", "cpu", "--rounds", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    heads = json.loads(path.read_text())["heads"]
    losses = [head["loss"] for name, head in heads.items() if name != "no head"]
    # Stock's logits are rounded to bfloat16, and are less than 4.
    assert len(losses) == 4 and max(losses) - min(losses) <= 4 * 2.0**-8
    assert all(len(head["ms"]) == 1 for head in heads.values())
    again = run("fsdp.py", "--show", str(path))
    assert again.stdout == done.stdout and "| logitless sparsified |" in again.stdout


@needs_ranks
def test_without_time_nothing_is_measured() -> None:
    done = run("parallel.py", "--device", "cpu", "--shapes", "64x101x32", "--minutes", "0")
    assert done.returncode == 0 and "|" not in done.stdout, done.stderr


@pytest.mark.parametrize("script", ["parallel.py", "fsdp.py"])
def test_one_rank_is_refused(script: str) -> None:
    done = run(script, "--device", "cpu", "--ranks", "1")
    assert done.returncode == 2 and "--ranks: expected" in done.stderr


@pytest.mark.parametrize("shapes", ["65x100x32", "none"])
def test_bad_shapes_are_named(shapes: str) -> None:
    done = run("parallel.py", "--device", "cpu", "--shapes", shapes)
    assert done.returncode != 0 and "--shapes: expected" in done.stderr
