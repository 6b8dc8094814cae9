"""The handshake: some rows of the logits as the model itself makes them, beside the fused head's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..functional import linear_cross_entropy
from ._logits import Logits

ROWS = 8


def some_rows(hidden: Tensor) -> Tensor:
    """At most ROWS rows of hidden [..., D], spread over all."""
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    if rows.shape[0] <= ROWS:
        return rows
    return rows[torch.linspace(0, rows.shape[0] - 1, ROWS).long().to(rows.device)]


@torch.no_grad()
def compare(logits: Logits, operands: dict[str, Any]) -> None:
    """Raises where the losses of the probed rows differ by more than rounding explains.

    Each is compared at the entry of largest logit and at one elsewhere.
    """
    probe = logits.probe
    if probe is None or any(term.probed is None for term in logits.terms):
        raise UnsupportedError(f"headroom.transformers: the handshake with {logits.session.owner} found no logits")
    from ._loss import joined

    hidden, weight = joined(logits.terms, [term.probed for term in logits.terms if term.probed is not None])
    rows = probe.shape[0]
    elsewhere = torch.arange(rows, device=probe.device) * 7919 % logits.vocab
    targets = torch.cat((probe.argmax(-1), elsewhere))
    values = probe if probe.dtype == torch.float64 else probe.float()
    expected = torch.nn.functional.cross_entropy(values.repeat(2, 1), targets, reduction="none")
    arguments = dict(operands, linear_weight=weight.detach())
    if arguments["linear_bias"] is not None:
        arguments["linear_bias"] = arguments["linear_bias"].detach()
    got = linear_cross_entropy(hidden.repeat(2, 1), target=targets, reduction="none", **arguments)
    assert isinstance(got, Tensor)
    difference = float((got.to(expected.dtype) - expected).abs().max())
    allowed = _rounding(logits, hidden, weight, operands["scale"])
    if not difference <= allowed:
        raise UnsupportedError(
            f"headroom.transformers: on {rows} tokens of the first batch the loss of {logits.session.owner} differs "
            f"from the fused head's by {difference:.3g}, of which rounding explains {allowed:.3g}; "
            "headroom.transformers.unpatch(model) goes back to the original path"
        )


def _rounding(logits: Logits, hidden: Tensor, weight: Tensor, scale: float) -> float:
    """Bound of the probe's rounding: a dot product's of D terms, and those of its result and four operations on it."""
    length = torch.linalg.vector_norm(hidden.double(), dim=-1).max() * torch.linalg.vector_norm(weight, dim=-1).max()
    largest = abs(scale) * float(length) + (0.0 if logits.bias is None else float(logits.bias.abs().max())) + 1.0
    accumulated = hidden.dtype if hidden.dtype == torch.float64 else torch.float32
    units = 8 * max(1.0, hidden.shape[-1] ** 0.5) * torch.finfo(accumulated).eps
    return float((units + _coarsest(logits)) * largest)


def _coarsest(logits: Logits) -> float:
    """Five halves of a unit in the coarsest dtype that the probe may have been in, twice: at the target and in lse."""
    dtypes = [logits.dtype, *(t.weight.dtype for t in logits.terms), *(t.hidden.dtype for t in logits.terms)]
    device = logits.terms[0].hidden.device.type
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    unit = max(torch.finfo(dtype).eps for dtype in dtypes)
    if device == "cuda" and torch.backends.cuda.matmul.allow_tf32 and unit < 2**-10:
        unit = 2.0**-10
    return 5 * unit
