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
    allowed = _rounding(logits, operands["softcap"] or 1.0)
    if not difference <= allowed:
        raise UnsupportedError(
            f"headroom.transformers: on {rows} tokens of the first batch the loss of {logits.session.owner} differs "
            f"from the fused head's by {difference:.3g}, of which rounding explains {allowed:.3g}; "
            "headroom.transformers.unpatch(model) goes back to the original path"
        )


def _rounding(logits: Logits, cap: float) -> float:
    """Bound of the probe's rounding: of dot products of D terms, of their results, and of four operations on these."""
    sums = largest = 0.0
    for term in logits.terms:
        assert term.probed is not None
        rows, factor = term.probed, abs(term.factor * cap)
        norms = [torch.linalg.vector_norm(matrix, dim=-1).max() for matrix in (rows, term.weight)]
        sums += factor * float(norms[0]) * float(norms[1]) * rows.shape[-1] ** 0.5
        dtype = torch.promote_types(rows.dtype, term.weight.dtype)
        largest += factor * float((rows.to(dtype) @ term.weight.to(dtype).T).abs().max())
    bias = 0.0 if logits.bias is None else abs(cap) * float(logits.bias.abs().max())
    products, results = _units(logits)
    return 8 * products * sums + 5 * results * (largest + bias + 1.0)


def _units(logits: Logits) -> tuple[float, float]:
    """Units of rounding: that in which products are made, and the coarsest that a result may have been rounded to."""
    dtypes = [logits.dtype, *(t.weight.dtype for t in logits.terms), *(t.hidden.dtype for t in logits.terms)]
    device = logits.terms[0].hidden.device.type
    products = torch.finfo(torch.float64 if set(dtypes) == {torch.float64} else torch.float32).eps
    if device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        products = max(products, 2.0**-10 / 8)
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
        products = max(products, torch.finfo(dtypes[-1]).eps / 8)  # rounded before they are multiplied
    return products, max(torch.finfo(dtype).eps for dtype in dtypes)
