"""Bias and deviation of estimates that are known: python -m pytest experiments/test_sampled_softmax.py"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("logitless", exc_type=ImportError)
HERE = pathlib.Path(__file__).resolve().parent

import sampled_softmax as study  # noqa: E402
import tokens  # noqa: E402


def head(rows: int = 16, vocab: int = 60, width: int = 8) -> study.Head:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(count, width, generator=generator) for count in (rows, vocab))
    return study.Head(hidden, weight, torch.randint(0, vocab, (rows,), generator=generator))


@pytest.mark.parametrize("bias, deviation", [(0.0, 0.5), (0.3, 0.5), (0.3, 0.0)])
def test_errors(bias: float, deviation: float) -> None:
    """Draws around a shifted truth have its shift as their bias, and the width of the draws as their deviation."""
    generator = torch.Generator().manual_seed(1)
    truth, shift = (torch.nn.functional.normalize(torch.randn(1000, generator=generator), dim=0) for _ in range(2))
    sums = study.Sums(truth.double(), 200)
    for _ in range(200):
        sums.add(truth + bias * shift + deviation * torch.randn(1000, generator=generator) / 1000**0.5)
    errors = sums.errors()
    assert abs(errors.deviation - deviation) < 0.01
    # The squared bias is off by a few of its standard errors at most.
    assert abs(errors.bias**2 - bias**2) < 3 * max(errors.resolution**2, 1e-6)
    assert errors.resolution < 0.02 if deviation == 0 else errors.resolution < 0.15


def test_estimates_of_a_small_head() -> None:
    """Few negatives have a bias. More have less, and sparsification none that can be seen."""
    given, draws = head(), 400
    truth = study.exact(given)
    torch.manual_seed(0)
    few, more = (
        study.sampled(given, study.Sampler.uniform(60), None, (16, count)) for count in (2, 20)
    )  # fmt: skip
    sparse, kept = study.sparsified(given, 2.0**-3, iter(range(1, 1000)))
    errors = []
    for draw in (few, more, sparse):
        sums = study.Sums(truth[0], draws)
        for _ in range(draws):
            sums.add(draw()[0])
        errors.append(sums.errors())
    assert errors[0].bias > 1.5 * errors[1].bias and errors[1].bias > 2 * errors[1].resolution
    assert errors[2].bias < 2 * errors[2].resolution and 1 <= kept <= 60
    assert errors[0].deviation > errors[1].deviation


def test_command(tmp_path: pathlib.Path) -> None:
    given = head()
    dump = {"hidden": given.hidden.bfloat16(), "weight": given.weight.bfloat16(), "target": given.target}
    torch.save(dump | {"validation": 3.0}, tmp_path / "head.pt")
    ids = (np.random.default_rng(0).zipf(1.5, 500) % 60).astype(np.uint32)
    for name in ("train", "validation"):
        tokens.save_tokens(tmp_path / f"{name}.npy.xz", ids)
    (tmp_path / "about.json").write_text(json.dumps({"vocab": 60}))
    command = [sys.executable, str(HERE / "sampled_softmax.py"), "--data", str(tmp_path)]
    command += ["--trained", str(tmp_path / "head.pt"), "--rows", "8", "--draws", "20", "--thresholds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "N 8, V 60, D 8, 20 draws; held-out loss 3.00" in done.stdout
    assert sum(line.startswith("| s") for line in done.stdout.splitlines()) == 7
