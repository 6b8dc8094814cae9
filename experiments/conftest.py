"""Finds the modules shared with the benchmark, and this tree's package if LOGITLESS_LIBRARY is set."""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "convergence"), str(HERE.parent / "bench" / "gpu")]

import harness  # noqa: E402, F401
