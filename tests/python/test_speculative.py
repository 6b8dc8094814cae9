"""examples/speculative.py: tokens have the target's probabilities, whatever the draft."""

import re
import runpy
import sys

import logitless
import pytest
import torch
from support import EXAMPLES

ROWS, VOCAB, WIDTH, TEMPERATURE = 20_000, 9, 6, 0.8


@pytest.fixture(scope="module")
def verify():
    return runpy.run_path(str(EXAMPLES / "speculative.py"))["verify"]


def chi_square_is_likely(counts, probs):
    expected = probs * counts.sum()
    free = len(probs) - 1
    return ((counts - expected) ** 2 / expected).sum() < free + 5 * (2 * free) ** 0.5


@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0], ids=["equal", "near", "far"])
def test_tokens_have_the_targets_probabilities(verify, noise):
    torch.manual_seed(1)
    states, weight = torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH)
    draft_weight = weight + noise * torch.randn(VOCAB, WIDTH)
    tokens = torch.zeros(ROWS, 1, dtype=torch.int64)
    for _ in range(2):
        out = logitless.sample(states[tokens[:, -1]], draft_weight, temperature=TEMPERATURE)
        tokens = torch.cat([tokens, out.ids], -1)
    hidden = states[tokens]
    got, count = verify(tokens[:, 1:], (hidden, weight), (hidden[:, :-1], draft_weight), TEMPERATURE)
    p = (states @ weight.T / TEMPERATURE).double().softmax(-1)
    assert got.shape == (ROWS, 3) and int(count.min()) >= 1 and int(count.max()) == 3
    assert (noise == 0) == bool((count == 3).all())
    assert chi_square_is_likely(got[:, 0].bincount(minlength=VOCAB).double(), p[0])
    for place in (1, 2):  # each later token, after each token before it
        for before in range(VOCAB):
            following = got[(count > place) & (got[:, place - 1] == before), place]
            if len(following) > 1000:
                assert chi_square_is_likely(following.bincount(minlength=VOCAB).double(), p[before])
    accepted = torch.minimum(p[0], (states[0] @ draft_weight.T / TEMPERATURE).double().softmax(-1)).sum()
    assert abs((count > 1).double().mean() - accepted) < 5 * (0.25 / ROWS) ** 0.5


def test_rejected_tokens_of_nearly_equal_models_end(verify, monkeypatch):
    """p and q differ by rounding alone, so that no sample of p is of the residual distribution."""
    monkeypatch.setitem(verify.__globals__, "PASSES", 3)
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, 1 - 2**-24))
    torch.manual_seed(1)
    hidden, weight = torch.randn(50, 3, WIDTH), torch.randn(VOCAB, WIDTH)
    drafted = logitless.sample(hidden[:, :-1], weight).ids[..., 0]
    got, count = verify(drafted, (hidden, weight), (hidden[:, :-1] * (1 + 1e-6), weight))
    assert (count == 1).any() and ((got >= 0) & (got < VOCAB)).all()


def test_the_example(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["speculative.py", "--rows", "2000"])
    runpy.run_path(str(EXAMPLES / "speculative.py"), run_name="__main__")
    line = capsys.readouterr().out
    tokens, within = map(float, re.match(r"([\d.]+) tokens a pass, .* within ([\d.]+) of", line).groups())
    assert 2 < tokens < 5 and within < 0.05
