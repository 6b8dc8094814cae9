"""The handshake: some rows of the logits as the model itself makes them, beside the fused head's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..functional import linear_cross_entropy
from ._logits import Logits

ROWS = 8
_BLOCK = 1 << 22  # elements of the weight that are widened at a time


def some_rows(hidden: Tensor) -> Tensor:
    """At most ROWS rows of hidden [..., D], spread over all; of a DTensor, one that all ranks have."""
    if hasattr(type(hidden), "placements"):
        from torch.distributed.tensor import DTensor, Replicate

        mesh: Any = hidden.device_mesh  # type: ignore[attr-defined]
        return DTensor.from_local(some_rows(_whole(hidden.detach())), mesh, [Replicate()] * mesh.ndim)
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    if rows.shape[0] <= ROWS:
        return rows
    return rows[torch.linspace(0, rows.shape[0] - 1, ROWS).long().to(rows.device)]


@torch.no_grad()
def logits_of(original: Callable[..., Any], layer: nn.Linear, rows: Tensor, owner: str) -> Tensor:
    """What the layer makes of these rows, in float32 where it makes 16 bits: those would hide a wrong factor of 1.01.

    The layer's own result must then be the float32 product, rounded.
    """
    made: Tensor = original(rows)
    if made.dtype not in (torch.bfloat16, torch.float16) or type(layer.weight) not in (Tensor, nn.Parameter):
        return made
    wide, size = _product(layer, rows, made.dtype)
    unit = torch.finfo(made.dtype)
    sums = 8 * torch.finfo(torch.float32).eps * rows.shape[-1] ** 0.5 * float(rows.float().norm(dim=-1).max()) * size
    error = torch.linalg.vector_norm(made.float() - wide, dim=-1)
    allowed = unit.eps * torch.linalg.vector_norm(wide, dim=-1) + sums + unit.tiny * unit.eps * wide.shape[-1] ** 0.5
    if not bool((error <= allowed).all()):
        raise UnsupportedError(
            f"headroom.transformers: on {rows.shape[0]} tokens of the first batch the head of {owner} makes something "
            "else than the product with its weight; headroom.transformers.unpatch(model) goes back to the original path"
        )
    return wide


def _product(layer: nn.Linear, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The float32 product of operands in ``dtype``, and the norm of the weight."""
    with torch.autocast(rows.device.type, enabled=False):
        left, parts, norms = rows.to(dtype).float(), [], []
        for part in torch.split(layer.weight, max(1, _BLOCK // layer.weight.shape[1])):
            right = part.to(dtype).float()
            parts.append(left @ right.T)
            norms.append(torch.linalg.vector_norm(right))
        product = torch.cat(parts, dim=-1)
        if layer.bias is not None:
            product += layer.bias.to(dtype).float()
        return product, float(torch.linalg.vector_norm(torch.stack(norms)))


@torch.no_grad()
def compare(logits: Logits, operands: dict[str, Any]) -> None:
    """Raises where the losses of the probed rows differ by more than rounding explains.

    Each is compared at the entry of largest logit and at one elsewhere.
    """
    probe = logits.probe
    if probe is None or any(term.probed is None for term in logits.terms):
        raise UnsupportedError(f"headroom.transformers: the handshake with {logits.session.owner} found no logits")
    from ._loss import joined

    terms = tuple(replace(t, weight=_whole(t.weight), probed=_whole(t.probed)) for t in logits.terms)
    logits, probe = replace(logits, terms=terms, bias=_whole(logits.bias)), _whole(probe)
    hidden, weight = joined(terms, [term.probed for term in terms if term.probed is not None])
    rows = probe.shape[0]
    elsewhere = torch.arange(rows, device=probe.device) * 7919 % logits.vocab
    targets = torch.cat((probe.argmax(-1), elsewhere))
    values = probe if probe.dtype == torch.float64 else probe.float()
    expected = torch.nn.functional.cross_entropy(values.repeat(2, 1), targets, reduction="none")
    arguments = dict(operands, linear_weight=weight.detach())
    if arguments["linear_bias"] is not None:
        arguments["linear_bias"] = _whole(arguments["linear_bias"]).detach()
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


def _whole(tensor: Any) -> Any:
    """All of a DTensor: the formula is compared with it, once."""
    return tensor.full_tensor() if hasattr(type(tensor), "placements") else tensor


def _rounding(logits: Logits, cap: float) -> float:
    """Bound of the rounding: of dot products of D terms, of their results, and of four operations on these and a tanh.

    The probe has no coarser precision than float32. In 16 bits may be a bias, which factors are applied to, and hidden
    states that :func:`joined` multiplies by the factor between two products: these are rounded once more.
    """
    sums = rounded = largest = 0.0
    dtype = logits.terms[0].weight.dtype
    for term in logits.terms:
        assert term.probed is not None
        rows, factor = term.probed, abs(term.factor * cap)
        norms = [torch.linalg.vector_norm(matrix, dim=-1).max() for matrix in (rows, term.weight)]
        norm = factor * float(norms[0]) * float(norms[1])
        sums += norm * rows.shape[-1] ** 0.5
        rounded += norm if term.factor != logits.terms[0].factor else 0.0
        wide = torch.promote_types(rows.dtype, term.weight.dtype)
        dtype = torch.promote_types(dtype, wide)
        largest += factor * float((rows.to(wide) @ term.weight.to(wide).T).abs().max())
    products, results, cast = _units(logits)
    found = 8 * products * sums + 5 * results * (largest + 1.0 + abs(cap))
    found += max(cast, torch.finfo(dtype).eps) * rounded
    if logits.bias is not None:
        unit = max(cast, results, torch.finfo(logits.bias.dtype).eps)
        found += 5 * unit * abs(cap) * float(logits.bias.abs().max())
    return found


def _units(logits: Logits) -> tuple[float, float, float]:
    """Units of rounding: that in which products are made, that of their results, and that of autocast (0 without)."""
    dtypes = {d for term in logits.terms for d in (term.weight.dtype, term.hidden.dtype)}
    device = logits.terms[0].hidden.device.type
    results = products = torch.finfo(torch.float64 if dtypes == {torch.float64} else torch.float32).eps
    if device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        products = max(products, 2.0**-10 / 8)
    cast = torch.is_autocast_enabled(device) and dtypes != {torch.float64}
    return products, results, torch.finfo(torch.get_autocast_dtype(device)).eps if cast else 0.0
