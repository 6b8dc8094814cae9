"""Inputs of one problem: logits of a chosen spread, or a peaked softmax like a trained model's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shapes import Shape, checked_share

IGNORED = -100  # the target that all libraries ignore
CANDIDATES = 16  # likely tokens per row of the peaked data
DATA = ("std1", "std3", "std8", "peaked")
_trained: dict[str, str] = {}  # shape's name: file


class Inputs(NamedTuple):
    hidden: Tensor  # [N, D] bf16
    weight: Tensor  # [V, D] bf16
    target: Tensor  # [N] int64

    def leaves(self) -> Inputs:
        """Returns tensors on the same storage that are leaves and require gradients."""
        return Inputs(self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_(), self.target)

    def upstream(self, pass_: str) -> tuple[Tensor, ...]:
        """Returns upstream gradients of a pass: none of a mean, else of the losses of tokens and of their entropies."""
        tokens = len(self.target)
        generator = torch.Generator(device=self.target.device).manual_seed(4)
        both = torch.randn(2, tokens, device=self.target.device, generator=generator) / tokens
        return tuple(both[: {"tokens": 1, "entropy": 2}.get(pass_, 0)])


def use_trained(path: str) -> Shape:
    """Registers a dump of ``experiments/convergence/run.py hidden`` as the data kind ``trained``, and returns its
    shape."""
    content = torch.load(path, mmap=True, weights_only=True)
    (tokens, hidden), vocab = content["hidden"].shape, content["weight"].shape[0]
    shape = Shape("trained", tokens, vocab, hidden)
    _trained[shape.name] = path
    return shape


def _load_trained(shape: Shape, device: str) -> Inputs:
    if shape.name not in _trained:
        raise ValueError("data: expected --trained FILE with the kind trained, got none")
    content = torch.load(_trained[shape.name], weights_only=True)
    return Inputs(*(content[name].to(device) for name in ("hidden", "weight", "target")))


def make_inputs(shape: Shape, kind: str, device: str, seed: int = 0) -> Inputs:
    """Makes inputs of a kind.

    ``stdS``: logits ~ N(0, S^2) with uniform targets. ``peaked``: 16 Zipf-drawn tokens carry a row's mass. ``trained``:
    hidden states and head of a trained model.
    """
    if kind == "trained":
        return _load_trained(shape, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    weight = torch.randn(shape.vocab, shape.hidden, device=device, generator=generator)
    weight /= weight.norm(dim=1, keepdim=True)
    if kind == "peaked":
        hidden, target = _peaked(shape, weight, generator)
    elif kind.startswith("std"):
        hidden = torch.randn(shape.tokens, shape.hidden, device=device, generator=generator) * float(kind[3:])
        target = torch.randint(0, shape.vocab, (shape.tokens,), device=device, generator=generator)
    else:
        raise ValueError(f"data: expected trained or one of {', '.join(DATA)}, got {kind!r}")
    return Inputs(hidden.bfloat16(), weight.bfloat16(), target)


def _peaked(shape: Shape, weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Makes rows that are sums of their candidates' directions; a row's candidate k has a logit of about 16 - log k."""
    device = weight.device
    ranks = torch.arange(1, CANDIDATES + 1, device=device, dtype=torch.float32)
    frequency = 1.0 / torch.arange(1, shape.vocab + 1, device=device, dtype=torch.float64)
    cumulative = frequency.cumsum(0)
    cumulative /= cumulative[-1].clone()
    draws = torch.rand(shape.tokens * CANDIDATES, device=device, dtype=torch.float64, generator=generator)
    order = torch.randperm(shape.vocab, device=device, generator=generator)
    ids = order[torch.searchsorted(cumulative, draws).clamp_(max=shape.vocab - 1)].view(shape.tokens, CANDIDATES)
    hidden = torch.zeros(shape.tokens, shape.hidden, device=device)
    for candidate in range(CANDIDATES):
        hidden += (16.0 - ranks[candidate].log()) * weight[ids[:, candidate]]
    pick = torch.multinomial((1.0 / ranks).expand(shape.tokens, CANDIDATES), 1, generator=generator)
    return hidden, ids.gather(1, pick).squeeze(1)


def with_ignored(inputs: Inputs, share: float) -> Inputs:
    """Removes the targets of a share of the tokens, spread evenly."""
    count = round(checked_share(share) * len(inputs.target))
    generator = torch.Generator(device=inputs.target.device).manual_seed(3)
    rows = torch.randperm(len(inputs.target), device=inputs.target.device, generator=generator)[:count]
    return inputs._replace(target=inputs.target.index_fill(0, rows, IGNORED))
