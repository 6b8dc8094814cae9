"""Loss and gradients of a model as it is, and patched."""

from __future__ import annotations

import torch
from torch import nn


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor], object]:
    """Loss, gradients by name and outputs of one training step without the update; the same draws each time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    outputs = model(**batch)
    outputs.loss.backward()
    gradients = {
        name.removeprefix("_orig_mod."): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }
    return outputs.loss.detach(), gradients, outputs


def difference(first: tuple, second: tuple) -> float:
    """The largest difference of loss and gradients, each in units of its largest element where that is above 1."""
    if first[1].keys() != second[1].keys():
        return float("inf")
    pairs = [(first[0], second[0]), *((first[1][name], second[1][name]) for name in first[1])]
    found = 0.0
    for a, b in pairs:
        if a.numel() == 0:
            continue
        error = float((a - b).abs().max()) / max(1.0, float(a.abs().max()))
        found = max(found, error if error == error else float("inf"))
    return found
