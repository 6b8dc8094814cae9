"""The examples of several ranks, each run as a script at its tiny size."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(mesh, name, *options):
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *options, "--steps", "12"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue().strip()


def check(printed, nothing):
    first, last = map(float, re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)", printed).groups())
    assert last < first - 0.5 and not nothing


NAMES = pytest.mark.parametrize("name", ["parallel_fsdp2.py", "parallel_tensor.py"])


@NAMES
def test_the_loss_falls(two, name):
    check(*two(run, name, "--tiny"))


@pytest.mark.gpu
@NAMES
def test_the_loss_falls_on_gpus(two_gpus, name):
    check(*two_gpus(run, name))
