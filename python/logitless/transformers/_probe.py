"""The self-check: it compares some rows of the logits, as the model itself makes them, with the fused head's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..functional import linear_cross_entropy
from ..quantized import QuantizedWeight
from ._logits import ROWS, Logits, fused_operands, is_dtensor, on_all_ranks

_BLOCK = 1 << 22  # elements of the weight that are widened at a time


def some_rows(hidden: Tensor) -> Tensor:
    """Returns at most ROWS rows of hidden [..., D], spread over all; for a DTensor one that all ranks have."""
    if is_dtensor(hidden):
        return on_all_ranks(some_rows(_whole(hidden.detach())), hidden.device_mesh)  # type: ignore[attr-defined]
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    if rows.shape[0] <= ROWS:
        return rows
    return rows[torch.linspace(0, rows.shape[0] - 1, ROWS).long().to(rows.device)]


@torch.no_grad()
def logits_of(own: Callable[..., Any] | None, weight: Any, bias: Tensor | None, rows: Tensor, owner: str) -> Tensor:
    """Returns the head's logits of these rows, in float32 where the head makes 16 bits.

    16 bits would hide a wrong factor of 1.01. The head makes the logits by its ``own`` forward, or where that is None
    as torch.nn.Linear does, with the weight that was read. A result in 16 bits must be the rounded float32 product,
    where neither overflows. A quantised head has no logits of its own here, as it may round the hidden states, too.
    """
    if isinstance(weight, QuantizedWeight):
        return _product(weight.rounded(rows), weight, bias, weight.dtype_for(rows))[0]
    made: Tensor = nn.functional.linear(rows, weight, bias) if own is None else own(rows)
    if made.dtype not in (torch.bfloat16, torch.float16) or type(weight) not in (Tensor, nn.Parameter):
        return made
    wide, size = _product(rows, weight, bias, made.dtype)
    unit = torch.finfo(made.dtype)
    longest = float(torch.linalg.vector_norm(_numbers(rows.float()), dim=-1).max()) if len(rows) else 0.0
    sums = 8 * torch.finfo(torch.float32).eps * rows.shape[-1] ** 0.5 * longest * size
    both = made.isfinite() & wide.isfinite()
    error = torch.linalg.vector_norm((made.float() - wide).where(both, 0.0), dim=-1)
    length = torch.linalg.vector_norm(wide.where(both, 0.0), dim=-1)
    allowed = unit.eps * length + sums + unit.tiny * unit.eps * wide.shape[-1] ** 0.5
    if not bool((error <= allowed).all()):
        raise UnsupportedError(
            f"logitless.transformers: on {rows.shape[0]} tokens of this batch the head of {owner} makes something "
            "else than the product with its weight; logitless.transformers.unpatch(model) takes the original path"
        )
    return wide


def _product(rows: Tensor, weight: Any, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Returns the product of operands in ``dtype``, in float32 or more, and the norm of the weight's finite numbers."""
    with torch.autocast(rows.device.type, enabled=False):
        wide = torch.promote_types(dtype, torch.float32)
        left, parts, norms = rows.to(dtype).to(wide), [], []
        for part in _blocks(weight, dtype):
            right = part.to(dtype).to(wide)
            parts.append(left @ right.T)
            norms.append(torch.linalg.vector_norm(_numbers(right)))
        product = torch.cat(parts, dim=-1)
        if bias is not None:
            product += bias.to(dtype).to(wide)
        return product, float(torch.linalg.vector_norm(torch.stack(norms)))


def _blocks(weight: Any, dtype: torch.dtype = torch.float32) -> Iterable[Tensor]:
    """Returns the rows of the weight, some at a time, of a quantised one in ``dtype``."""
    count = max(1, _BLOCK // weight.shape[1])
    return weight.blocks(count, dtype) if isinstance(weight, QuantizedWeight) else torch.split(weight, count)


def _numbers(values: Tensor) -> Tensor:
    return values.nan_to_num(0.0, 0.0, 0.0)


@torch.no_grad()
def compare(logits: Logits) -> None:
    """Raises UnsupportedError where losses of the probed rows differ by more than rounding explains.

    Each row is compared at the entry of its largest logit and at another one. Rows with a value or loss that is not
    finite are left out, and so are entries of the vocabulary that are not finite: neither says anything about the
    formula.
    """
    if logits.probe is None or any(term.probed is None for term in logits.terms):
        raise UnsupportedError(f"logitless.transformers: the self-check of {logits.session.owner} found no logits")
    session, (logits, values) = logits.session, _comparable(logits)
    targets = _targets(logits, values)
    losses = [nn.functional.cross_entropy(values, target, reduction="none") for target in targets]
    finite = [term.hidden.isfinite().all(-1) for term in logits.terms]
    kept = torch.stack([*finite, *(loss.isfinite() for loss in losses)]).all(0)
    logits = logits.over_rows(lambda hidden: hidden[kept])
    rows = int(kept.sum()) if targets else 0
    allowed = _rounding(logits) if rows else 0.0
    if not math.isfinite(allowed):
        rows = 0
    session.compared = min(session.compared, ROWS if 0 < rows == len(kept) else rows)
    if rows == 0:
        return
    hidden, operands = fused_operands(logits)
    target, expected = (torch.cat([part[kept] for part in parts]) for parts in (targets, losses))
    got = linear_cross_entropy(hidden.repeat(2, 1), targets=target, reduction="none", **operands)
    assert isinstance(got, Tensor)
    difference = float((got.to(expected.dtype) - expected).abs().max())
    if not difference <= allowed:
        raise UnsupportedError(
            f"logitless.transformers: on {rows} tokens of this batch the loss of {session.owner} differs "
            f"from the fused head's by {difference:.3g}, of which rounding explains {allowed:.3g}; "
            "logitless.transformers.unpatch(model) takes the original path"
        )


def _comparable(logits: Logits) -> tuple[Logits, Tensor]:
    """Returns the probed rows as a formula and as values, without entries whose weights or bias are not finite.

    A bias of minus infinity stays: entries that pad the vocabulary have it, and they add nothing to other targets'
    losses.
    """
    terms = tuple(replace(t, hidden=_whole(t.probed), weight=_detached(t.weight)) for t in logits.terms)
    values, bias = _whole(logits.probe), _whole(logits.bias)
    values = values if values.dtype == torch.float64 else values.float()
    if any(isinstance(term.weight, QuantizedWeight) for term in terms):
        return replace(logits, terms=terms, bias=bias if bias is None else bias.detach()), values
    finite = [torch.linalg.vector_norm(term.weight, ord=math.inf, dim=-1).isfinite() for term in terms]
    if bias is not None:
        bias = bias.detach()
        finite.append(bias.isfinite() | (bias == -math.inf))
    kept = torch.stack(finite).all(0)
    if not bool(kept.all()):
        terms = tuple(replace(term, weight=term.weight[kept]) for term in terms)
        values, bias = values[:, kept], None if bias is None else bias[kept]
    return replace(logits, terms=terms, bias=bias), values


def _targets(logits: Logits, values: Tensor) -> list[Tensor]:
    """Returns two targets for each row: the entry of its largest logit, and another one with a finite bias."""
    entries = torch.arange(logits.vocab, device=values.device)
    if logits.bias is not None:
        entries = entries[logits.bias.isfinite()]
    if len(entries) == 0:
        return []
    return [values.argmax(-1), entries[torch.arange(len(values), device=values.device) * 7919 % len(entries)]]


def _detached(weight: Any) -> Any:
    return weight if isinstance(weight, QuantizedWeight) else _whole(weight).detach()


def _whole(tensor: Any) -> Any:
    """Returns the whole of a DTensor; the self-check does this once."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def _rounding(logits: Logits) -> float:
    """Returns a bound of the rounding: of dot products with D terms, their results, and four operations and a tanh.

    The probe's precision is at least float32. Two tensors may have 16 bits, and are rounded once more: a bias that is
    multiplied by factors, and hidden states that :func:`joined` multiplies by the factor between two products.
    """
    sums = rounded = largest = 0.0
    dtype, cap = logits.terms[0].weight.dtype, abs(logits.cap or 1.0)
    for term in logits.terms:
        norm = abs(term.factor * cap) * _longest(term.hidden) * _longest(term.weight)
        sums += norm * term.hidden.shape[-1] ** 0.5
        rounded += norm if term.factor != logits.unit else 0.0
        dtype = torch.promote_types(dtype, torch.promote_types(term.hidden.dtype, term.weight.dtype))
        largest += norm
    products, results, cast = _units(logits)
    bound = 8 * products * sums + 5 * results * (largest + 1.0 + cap)
    bound += max(cast, torch.finfo(dtype).eps) * rounded
    if logits.bias is not None:
        unit = max(cast, results, torch.finfo(logits.bias.dtype).eps)
        bound += 5 * unit * cap * float(_numbers(logits.bias).abs().max())
    return bound


def _longest(matrix: Any) -> float:
    """Returns the largest norm of a row, in at least float32, as 16 bits may not hold it."""
    wide = torch.promote_types(matrix.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(part, dim=-1, dtype=wide).max() for part in _blocks(matrix)]
    return float(torch.stack(norms).max())


def _units(logits: Logits) -> tuple[float, float, float]:
    """Returns the rounding units of products, of their results, and of autocast (0 without autocast)."""
    dtypes = {d for term in logits.terms for d in (term.weight.dtype, term.hidden.dtype)}
    device = logits.terms[0].hidden.device.type
    results = products = torch.finfo(torch.float64 if dtypes == {torch.float64} else torch.float32).eps
    if device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        products = max(products, 2.0**-10 / 8)
    cast = torch.is_autocast_enabled(device) and dtypes != {torch.float64}
    return products, results, torch.finfo(torch.get_autocast_dtype(device)).eps if cast else 0.0
