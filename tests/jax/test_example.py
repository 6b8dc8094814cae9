"""examples/jax_training.py runs, and both heads learn alike."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "jax_training.py"


def test_both_heads_learn_alike(monkeypatch, capsys):
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, "--steps", "25", "--width", "32", "--vocab", "512", "--batch", "8"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = re.findall(r"^(\w+): loss ([\d.]+) -> ([\d.]+), \d+ ms a step$", capsys.readouterr().out, re.MULTILINE)
    (_, *plain), (name, first, last) = lines
    assert name == "logitless" and float(last) < float(first) - 1
    # Rounding differs, and 25 steps of Adam let it grow.
    assert abs(float(first) - float(plain[0])) < 1e-3 and abs(float(last) - float(plain[1])) < 0.05
