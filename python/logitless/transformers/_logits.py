"""Logits as a formula over operands: it records what a head and the model's own code do, without making logits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._zero3 import Late
from ..errors import UnsupportedError
from ..quantized import QuantizedWeight

ROWS = 8  # rows of logits that the self-check compares


def is_dtensor(tensor: Any) -> bool:
    return hasattr(type(tensor), "placements")


def on_all_ranks(tensor: Tensor, mesh: Any) -> Tensor:
    """Returns a DTensor of a tensor that is the same on all ranks of the mesh."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


@dataclass
class Session:
    """One forward pass of a patched model: the options of its loss, and a record of what happened."""

    owner: str  # class of the model, for messages
    options: dict[str, Any]
    tp_mesh: Any  # the DeviceMesh over which the head's weight is sharded, where its hidden states are plain tensors
    probing: int  # rows of logits still to be compared with those of the model's own operations, 0 for none
    gradients: bool = field(default_factory=torch.is_grad_enabled)  # whether it began with gradients
    losses: int = 0
    compared: int = ROWS  # rows at which each loss was compared; also ROWS if the batch has fewer
    unsharded: list[Any] = field(default_factory=list)  # units of FSDP2 that were gathered again for the loss
    late: Late = field(default_factory=list)  # hooks of DeepSpeed's ZeRO-3 that wait for the losses


@dataclass(frozen=True)
class Term:
    """``factor * hidden @ weight.T`` with hidden [..., D] and weight [V, D]; ``probed`` has rows of hidden."""

    hidden: Tensor
    weight: Any  # a tensor, or a QuantizedWeight
    factor: float = 1.0
    probed: Tensor | None = None
    versions: tuple[tuple[Tensor, int], ...] = ()  # hidden and weight with their versions at the head's call
    layer: nn.Module | None = None  # the owner of the weight

    def in_memory(self) -> bool:
        size: int = self.weight.numel() * self.weight.element_size()
        return bool(self.weight.untyped_storage().nbytes() >= size)

    def changed(self) -> bool:
        return any(tensor._version != version for tensor, version in self.versions)


@dataclass(frozen=True)
class Logits:
    """``z = sum(terms) + bias``, or with a cap ``cap * tanh(z)``; the shape is [..., V].

    The probe holds some rows of the same logits, [k, V]. Every operation of the model runs on it unchanged.
    """

    session: Session = field(repr=False)
    terms: tuple[Term, ...]
    dtype: torch.dtype
    bias: Tensor | None = None
    cap: float | None = None
    probe: Tensor | None = None
    as_dtensor: bool = False  # whether the loss is a DTensor, as the hidden states are

    @property
    def vocab(self) -> int:
        return int(self.terms[0].weight.shape[0])

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.terms[0].hidden.shape[:-1], self.vocab))

    def refuse(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"logitless.transformers: {self.session.owner} does {what} with its logits on the way to the loss, which "
            "the fused head does not know; logitless.transformers.unpatch(model) goes back to the original path"
        )

    @property
    def unit(self) -> float:
        """The factor that all terms share; each term may have another one besides."""
        return next((term.factor for term in self.terms if term.factor), 1.0)

    def scaled(self, factor: float) -> Logits:
        if not math.isfinite(factor):
            raise self.refuse(f"a multiplication by {factor}")
        if self.cap is not None:
            if factor <= 0:
                raise self.refuse(f"a multiplication by {factor} after tanh")
            return replace(self, cap=self.cap * factor)
        terms = tuple(replace(term, factor=term.factor * factor) for term in self.terms)
        return replace(self, terms=terms, bias=None if self.bias is None else self.bias * factor)

    def with_bias(self, bias: Tensor) -> Logits:
        if self.cap is not None:
            raise self.refuse("an addition after tanh")
        if bias.dim() == 0 or bias.shape[-1] != self.vocab or bias.numel() != self.vocab:
            raise self.refuse(f"an addition of a tensor of shape {list(bias.shape)}, which is no bias")
        bias = bias.reshape(-1)
        return replace(self, bias=bias if self.bias is None else self.bias + bias)

    def plus(self, other: Logits) -> Logits:
        if self.cap is not None or other.cap is not None:
            raise self.refuse("an addition after tanh")
        if self.shape != other.shape:
            raise self.refuse(f"an addition of logits of shapes {list(self.shape)} and {list(other.shape)}")
        total = replace(self, terms=self.terms + other.terms)
        return total if other.bias is None else total.with_bias(other.bias)

    def capped(self) -> Logits:
        if self.cap is not None:
            raise self.refuse("a second tanh")
        return replace(self, cap=1.0)

    def over_rows(self, change: Callable[[Tensor], Tensor]) -> Logits:
        """Returns logits of other rows, or of the same rows in another shape, by the same change to hidden [..., D]."""
        return replace(self, terms=tuple(replace(term, hidden=change(term.hidden)) for term in self.terms))

    def first_entries(self, count: int) -> Logits:
        """Returns the logits of the first ``count`` entries of the vocabulary."""
        terms = tuple(replace(term, weight=term.weight[:count]) for term in self.terms)
        return replace(self, terms=terms, bias=None if self.bias is None else self.bias[:count])


def fused_operands(logits: Logits) -> tuple[Tensor, dict[str, Any]]:
    """Returns hidden states [N, D] and the head's options.

    Their logits are ``cap * tanh((scale * hidden @ weight.T + bias) / cap)``.
    """
    factor, bias = logits.unit, logits.bias
    hidden, weight = joined(logits, [term.hidden for term in logits.terms])
    cap = logits.cap
    if cap is not None:
        factor, bias = factor * cap, None if bias is None else bias * cap
    return hidden, {"weight": weight, "bias": bias, "scale": factor, "softcap": cap}


def joined(logits: Logits, hiddens: list[Tensor]) -> tuple[Tensor, Any]:
    """Joins several products into one, [h, f A h] times [W, B].

    This copies the weights, and the gradient of the copy is as large. A quantised weight, the first, is not copied.
    """
    terms, unit = logits.terms, logits.unit
    if len(terms) == 1 and terms[0].factor == unit:
        return hiddens[0], terms[0].weight
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in (*hiddens, *(term.weight for term in terms))])
    first, *others = (term.weight for term in terms)
    if isinstance(first, QuantizedWeight):
        hiddens = [first.rounded(hiddens[0]), *hiddens[1:]]
        dtype = functools.reduce(torch.promote_types, [t.dtype for t in hiddens])
    parts = [h.to(dtype) * (t.factor / unit) if t.factor != unit else h.to(dtype) for t, h in zip(terms, hiddens)]
    if isinstance(first, QuantizedWeight):
        return torch.cat(parts, dim=-1), first.joined(others, hiddens[0])
    return torch.cat(parts, dim=-1), torch.cat([term.weight.to(dtype) for term in terms], dim=-1)
