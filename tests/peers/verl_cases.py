"""verl's cases of its fused head. verl runs the file as a program: pytest does not collect a class with __init__."""

import importlib.util
import os
from pathlib import Path

import pytest


def their_file():
    path = Path(os.environ["LOGITLESS_PEER_REPOSITORY"]) / "tests" / "utils" / "test_linear_cross_entropy.py"
    spec = importlib.util.spec_from_file_location("their_test_linear_cross_entropy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case", range(5))
def test_verify_correctness(case):
    # Two runs are needed: it leaves the first out of its times.
    their_file().TestLinearCrossEntropy(case).verify_correctness(iterations=2)
