"""Heads: the memory that each implementation holds, and the time that it takes."""

from __future__ import annotations

import dataclasses

from .. import options as _options
from ..inspection import plan
from .config import Model
from .devices import BANDWIDTH_SHARE, Device
from .work import BF16, Batch

KINDS = {
    "upcast": "materialized logits in bf16, cross entropy in float32, as in transformers",
    "whole": "materialized logits and cross entropy in bf16, as in PyTorch",
    "in-place": "materialized logits in bf16, overwritten by their gradient, as in flash-linear-attention",
    "logitless": "Logitless, exact gradients",
    "sparsified": "Logitless, sparsified gradients",
}
# Bytes for each logit: the most that is held, and what moves beside the products.
# PyTorch's softmax reads a row three times if it is longer than a multiprocessor's memory, and writes it once. Its
# backward pass reads gradients twice and the result once.
# upcast holds in the forward pass 2 (bf16) + 4 (float32) + 4 (softmax), in the backward pass 4 (softmax) + 4 + 4
# (gradients). It moves 6 (to float32), 16 (softmax), 4 (zeros), 16 (backward pass) and 6 (to bf16).
# whole does the same in bf16 without conversions. in-place reads once, then reads and writes once.
_HELD = {"upcast": 12, "whole": 6, "in-place": 2}
_MOVED = {"upcast": 48, "whole": 18, "in-place": 6}
# A softcap keeps tanh's result, and moves the operands of division, tanh, product and their backward passes.
_SOFTCAP_HELD, _SOFTCAP_MOVED = 2, 26


@dataclasses.dataclass(frozen=True)
class Head:
    """An implementation.

    Attributes:
        kind: A name of :data:`KINDS`.
        max_workspace_bytes: The budget of a head of Logitless, as in :func:`logitless.plan`.
        threshold: The threshold of sparsified gradients.
    """

    kind: str
    max_workspace_bytes: int | str | None = None
    threshold: float = _options.DEFAULT_THRESHOLD

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"head: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.max_workspace_bytes is not None and not self.ours:
            raise ValueError(f"max_workspace_bytes: expected a head of Logitless's, got {self.kind!r}")

    @property
    def ours(self) -> bool:
        return self.kind in ("logitless", "sparsified")

    @property
    def name(self) -> str:
        budget = self.max_workspace_bytes
        if budget is None or budget == "fastest":
            return self.kind if budget is None else f"{self.kind} fastest"
        return f"{self.kind} {_options.budget(budget) / (1 << 20):g} MiB"


@dataclasses.dataclass(frozen=True)
class HeadCost:
    """The predicted cost of a head.

    Attributes:
        flop: FLOP of the head's products, including products that it computes twice.
        held_bytes: The most that it holds at once, beyond weights and what the layers save. This includes its gradients
            where they exist then.
        gradient_bytes: Bytes of the weight's gradient, which stays.
        seconds: Time of the forward and backward pass.
        plan: The plan of a head of Logitless, as text.
    """

    flop: float
    held_bytes: float
    gradient_bytes: float
    seconds: float
    plan: str = ""


def head_cost(head: Head, model: Model, batch: Batch, device: Device) -> HeadCost:
    """Predicts the cost of a head; the library's planner predicts Logitless's own.

    Raises:
        BudgetTooSmallError: No plan fits the head's budget.
    """
    tokens, vocab, hidden = batch.tokens, model.vocab, model.hidden
    product = 2.0 * tokens * vocab * hidden
    d_weight, d_hidden = float(BF16) * vocab * hidden, float(BF16) * tokens * hidden
    if head.ours:
        chosen = plan(
            tokens,
            vocab,
            hidden,
            dtype="bfloat16",
            device=device.name,
            max_workspace_bytes=head.max_workspace_bytes,
            gradient="sparsified" if head.kind == "sparsified" else "exact",
            threshold=head.threshold,
        )
        held = chosen.workspace_bytes + d_weight + d_hidden
        text = f"{chosen.kind}, {chosen.cost_matmuls:g} F, {chosen.workspace_bytes / (1 << 20):.0f} MiB"
        return HeadCost(chosen.cost_matmuls * product, held, d_weight, chosen.predicted_seconds, text)
    logits = float(tokens) * vocab
    capped = (_SOFTCAP_HELD, _SOFTCAP_MOVED) if model.softcap else (0, 0)
    products = 3 * plan(tokens, vocab, hidden, dtype="bfloat16", gradients=(), device=device.name).predicted_seconds
    moved = logits * (_MOVED[head.kind] + capped[1]) / (BANDWIDTH_SHARE * device.peak_bandwidth)
    held = max(logits * (_HELD[head.kind] + capped[0]), logits * BF16 + d_weight + d_hidden)
    return HeadCost(3 * product, held, d_weight, products + moved)
