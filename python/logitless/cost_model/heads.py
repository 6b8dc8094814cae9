"""Heads: what each implementation holds and how long it takes."""

from __future__ import annotations

import dataclasses

from .. import options as _options
from ..inspection import plan
from .config import Model
from .devices import BANDWIDTH_SHARE, Device
from .work import BF16, Batch

KINDS = {
    "upcast": "whole logits in bf16 and their cross entropy in float32, as transformers computes it",
    "whole": "whole logits and their cross entropy in bf16, by PyTorch",
    "in-place": "whole logits in bf16, whose gradient takes their place, as flash-linear-attention has it",
    "logitless": "Logitless, exact",
    "sparsified": "Logitless, sparsified gradients",
}
# Bytes a logit: held at most, and moved beside the products. PyTorch's softmax reads a row that is longer than a
# multiprocessor's memory three times and writes it once; its backward reads gradients twice and the result once.
# upcast: forward bf16 + fp32 + softmax 4, backward softmax 4 + gradients 4 + 4; to float32 6, softmax 16, zeros 4,
# backward 16, to bf16 6. whole: the same in bf16 without conversions. in-place: one reading, one reading and writing.
_HELD = {"upcast": 12, "whole": 6, "in-place": 2}
_MOVED = {"upcast": 48, "whole": 18, "in-place": 6}
_SOFTCAP_HELD, _SOFTCAP_MOVED = 2, 26  # tanh's result is kept; division, tanh and product, and their backward passes


@dataclasses.dataclass(frozen=True)
class Head:
    """An implementation.

    Attributes:
        kind: a name of :data:`KINDS`.
        max_workspace_bytes: Logitless's budget, as of :func:`logitless.plan`.
        threshold: of sparsified gradients.
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
    """Predicted.

    Attributes:
        flop: of products that the head computes, those that it computes twice included.
        held_bytes: at most at once, beyond weights and what the layers save; the gradients that it makes included where
            they are alive then.
        gradient_bytes: of the weight's gradient, which stays.
        seconds: of forward and backward.
        plan: of Logitless's, for people.
    """

    flop: float
    held_bytes: float
    gradient_bytes: float
    seconds: float
    plan: str = ""


def head_cost(head: Head, model: Model, batch: Batch, device: Device) -> HeadCost:
    """What a head costs; Logitless's own by the library's planner.

    Raises:
        BudgetTooSmallError: no plan fits its budget.
    """
    tokens, vocab, hidden = batch.tokens, model.vocab, model.hidden
    product = 2.0 * tokens * vocab * hidden
    d_weight, d_hidden = float(BF16) * vocab * hidden, float(BF16) * tokens * hidden
    if head.ours:
        found = plan(
            tokens,
            vocab,
            hidden,
            dtype="bfloat16",
            device=device.name,
            max_workspace_bytes=head.max_workspace_bytes,
            gradient="sparsified" if head.kind == "sparsified" else "exact",
            threshold=head.threshold,
        )
        held = found.workspace_bytes + d_weight + d_hidden
        text = f"{found.kind}, {found.cost_matmuls:g} F, {found.workspace_bytes / (1 << 20):.0f} MiB"
        return HeadCost(found.cost_matmuls * product, held, d_weight, found.predicted_seconds, text)
    logits = float(tokens) * vocab
    capped = (_SOFTCAP_HELD, _SOFTCAP_MOVED) if model.softcap else (0, 0)
    products = 3 * plan(tokens, vocab, hidden, dtype="bfloat16", gradients=(), device=device.name).predicted_seconds
    moved = logits * (_MOVED[head.kind] + capped[1]) / (BANDWIDTH_SHARE * device.peak_bandwidth)
    held = max(logits * (_HELD[head.kind] + capped[0]), logits * BF16 + d_weight + d_hidden)
    return HeadCost(3 * product, held, d_weight, products + moved)
