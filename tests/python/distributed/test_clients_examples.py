"""The example of several ranks, run as a script at its tiny size."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
from client_oracle import on

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(mesh, how, *options):
    sys.argv = ["parallel_train.py", how, *options, "--steps", "12"]
    sys.path.insert(0, str(EXAMPLES))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / "parallel_train.py"), run_name="__main__")
    return printed.getvalue().strip()


@on("two")
@pytest.mark.parametrize("how", ["fsdp2", "tensor"])
def test_the_loss_falls(ranks, how):
    printed, nothing = ranks(run, how, *(["--tiny"] if ranks.device == "cpu" else []))
    line, names, seconds, memory = printed.splitlines()
    first, last = map(float, re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)", line).groups())
    assert last < first - 0.5 and not nothing
    assert names.split()[-3:] == ["logitless", "whole", "logits"] and "ms" in seconds and "MiB" in memory
