"""The examples of several ranks, each run as a script at its tiny size."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(mesh, name):
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, "--tiny", "--steps", "12"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue().strip()


@pytest.mark.parametrize("name", ["parallel_fsdp2.py", "parallel_tensor.py"])
def test_the_loss_falls(two, name):
    printed, nothing = two(run, name)
    first, last = map(float, re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)", printed).groups())
    assert last < first - 0.5 and not nothing
