"""Tests of the benchmark of samplers that need no GPU: its check of ids, and how peers are called and left out."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import samples

ROWS, VOCAB, HIDDEN = 512, 300, 32


def make_head() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(ROWS, HIDDEN).bfloat16(), (torch.randn(VOCAB, HIDDEN) * HIDDEN**-0.5).bfloat16()


def drawn(p: Tensor) -> Tensor:
    return torch.multinomial(p, 1)[:, 0].int()


def test_the_truncated_distribution_is_that_of_one_row_after_the_other() -> None:
    p = torch.softmax(2 * torch.randn(20, VOCAB, generator=torch.manual_seed(0)), -1)
    for row, got in zip(p, samples.truncated(p)):
        kept = row.argsort(descending=True)[: samples.TOP_K].tolist()
        expected = torch.zeros(VOCAB)
        expected[kept] = row[kept] / row[kept].sum()
        assert torch.allclose(got, expected)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "the largest": lambda z: z.argmax(-1),
    "another temperature": lambda z: drawn(torch.softmax(z / 1.5, -1)),
    "uniform": lambda z: torch.randint(VOCAB, (ROWS,)),
    "the neighbor": lambda z: (drawn(torch.softmax(z, -1)) + 1) % VOCAB,
    "beyond the vocabulary": lambda z: torch.full((ROWS,), VOCAB),
    "truncated": lambda z: drawn(samples.truncated(torch.softmax(z, -1))),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_samplers_are_found(name: str) -> None:
    hidden, weight = make_head()
    z = (hidden @ weight.T).float()
    p = torch.softmax(z, -1)
    samples.check("right", lambda: drawn(p), hidden, weight)
    samples.check("right" + samples.TRUNCATED, lambda: drawn(samples.truncated(p)), hidden, weight)
    with pytest.raises(ValueError, match="expected within 6 standard errors, got"):
        samples.check("wrong", lambda: WRONG[name](z), hidden, weight)
    with pytest.raises(ValueError, match="expected within 6 standard errors, got"):
        samples.check("whole" + samples.TRUNCATED, lambda: drawn(p), hidden, weight)


def test_peers_run_beside_ours_or_are_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("logitless")
    seen: dict[str, dict[str, Any]] = {}

    def from_logits(logits: Tensor, **random: Tensor) -> Tensor:
        seen["whole"] = random
        return drawn(torch.softmax(logits.float(), -1))

    def from_truncated(probs: Tensor, top_k: int, **random: Tensor) -> Tensor:
        seen["truncated"] = {"top_k": top_k, **random}
        return drawn(samples.truncated(probs))

    def fused(weights: Tensor, hidden_states: Tensor, num_samples: int, temperature: Tensor, seed: int) -> Tensor:
        seen["fused"] = {"num_samples": num_samples, "temperature": temperature, "seed": seed}
        return (hidden_states @ weights.T).argmax(-1, keepdim=True)

    stand_ins: dict[str, dict[str, Any]] = {
        "flashinfer": {},
        "flashinfer.sampling": {
            "sampling_from_logits": from_logits,
            "top_k_sampling_from_probs": from_truncated,
        },
        "fused_mm_sampling": {},
        "fused_mm_sampling.core": {"fused_mm_sample_triton": fused},
    }
    for name, functions in stand_ins.items():
        module = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    words = f"{ROWS},{VOCAB},{HIDDEN} --rounds 2 --calls 1 --device cpu"
    monkeypatch.setattr(sys, "argv", ["samples.py", *words.split()])
    torch.manual_seed(0)
    samples.main()
    out = capsys.readouterr().out
    times, ratios = (line for line in out.splitlines() if line.startswith(f"{ROWS},"))
    truncated = "FlashInfer" + samples.TRUNCATED
    assert all(f"'{name}': " in line for name in ("FlashInfer", truncated) for line in (times, ratios)), out
    assert "FlashSampling is left out: ValueError: log-probabilities of ids: expected within" in out
    ours = f"'{samples.OURS_TRUNCATED}'"
    assert "FlashSampling" not in times and ours in times and ours not in ratios
    assert seen["truncated"]["top_k"] == 50
    assert seen["fused"]["num_samples"] == 1 and seen["fused"]["temperature"].shape == ()
    for random in (seen["whole"], seen["truncated"]):
        assert random["seed"].dtype == random["offset"].dtype == torch.int64
        assert random["seed"].shape == random["offset"].shape == (1,)

    monkeypatch.setitem(sys.modules, "flashinfer.sampling", None)
    samples.main()
    out = capsys.readouterr().out
    assert "FlashInfer is left out: ModuleNotFoundError: " in out and "'FlashInfer'" not in out
