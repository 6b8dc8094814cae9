"""Gradients as sums of products over tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .operands import multiply
from .problem import Problem, Wants


class Gradients(NamedTuple):
    """None where one is not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Unit(NamedTuple):
    """The power of two that upstream gradients are multiplied by before dz is rounded, and its inverse: scalars."""

    factor: Tensor
    inverse: Tensor


def unit_of(dtype: torch.dtype, grad: Tensor) -> Unit | None:
    """So that the largest of ``grad`` is in [16, 32) where dz is rounded to float16; None where it is not.

    Probabilities down to 2^-18 are normal numbers then, and dz is finite up to 2,000 times the upstream gradient.
    """
    if dtype != torch.float16 or grad.numel() == 0:
        return None
    largest = grad.abs().amax()
    exponent = 5 - torch.frexp(largest).exponent.clamp(-90, 90)
    exponent = torch.where(largest.isfinite() & (largest > 0), exponent, 0)
    one = torch.ones_like(largest)
    return Unit(torch.ldexp(one, exponent), torch.ldexp(one, -exponent))


class _RowSums:
    """A gradient that is added up a range of its rows after the other, in a buffer unless it is of the sums' dtype.

    Args:
        gradient: what is to be written, ``[R, D]``.
        buffer: of the sums of a range, ``[rows, D]``; None where they are the gradient's own rows.
        index: which row of the gradient each sum is, None for the same.
        unit: of the sums, if they have one.
    """

    def __init__(self, gradient: Tensor, buffer: Tensor | None, index: Tensor | None, unit: Unit | None) -> None:
        self.gradient, self._buffer, self._index, self._unit = gradient, buffer, index, unit
        self._first = 0

    def begin(self, first: int) -> None:
        """The range that begins with this row."""
        self._first = first

    def rows(self, start: int, end: int) -> Tensor:
        if self._buffer is None:
            return self.gradient[start:end]
        return self._buffer[start - self._first : end - self._first]

    def store(self, start: int, end: int) -> None:
        """Of the range, rows that are complete."""
        sums = self.rows(start, end)
        if self._unit is not None:
            sums *= self._unit.inverse
        if self._buffer is None:
            return
        if self._index is None:
            self.gradient[start:end] = sums
        else:
            self.gradient.index_copy_(0, self._index[start:end], sums.to(self.gradient.dtype))


class GradientSums:
    """The gradients that are wanted, of tiles in any order of rows within a range of columns, or the other way round.

    Args:
        rows, columns: of the ranges that are added up at once.
        tile_rows: the most of a tile; with all of them, each range of columns is one product.
        unit: of dz, if it has one; sums are in float32 then.
    """

    def __init__(self, p: Problem, wants: Wants, rows: int, columns: int, tile_rows: int, unit: Unit | None) -> None:
        self._factor, self._unit = p.options.student_scale, unit
        self.hidden = self.weight = self.bias = None
        hidden, weight = p.hiddens[0], p.weights[0]
        if wants.hidden:
            new = torch.empty if p.index is None else torch.zeros
            gradient = new((p.all_rows, p.width), dtype=hidden.dtype, device=p.device)
            self.hidden = _RowSums(gradient, None if p.writes_hidden else p.new(rows, p.width), p.index, unit)
        if wants.weight:
            gradient = torch.empty((p.vocab, p.width), dtype=weight.dtype, device=p.device)
            is_direct = p.writes_weight or (p.rounds_weight_once and tile_rows >= p.rows)
            self.weight = _RowSums(gradient, None if is_direct else p.new(columns, p.width), None, unit)
        if wants.bias:
            self.bias = p.new(p.vocab)
            self._ones = torch.ones((1, tile_rows), dtype=p.dtypes[0], device=p.device)

    def add(self, dz: Tensor, hidden: Tensor, weight: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        """dz: ``[rows, columns]`` of logits before softcap and scale; hidden ``[rows, D]``, weight ``[columns, D]``."""
        if self.hidden is not None:
            multiply(dz, weight, self.hidden.rows(*rows), factor=self._factor, add=columns[0] > 0)
        if self.weight is not None:
            multiply(dz.T, hidden, self.weight.rows(*columns), factor=self._factor, add=rows[0] > 0)
        if self.bias is not None:
            multiply(self._ones[:, : dz.shape[0]], dz, self.bias[None, slice(*columns)], add=rows[0] > 0)

    def found(self, bias_dtype: torch.dtype | None, rows: int) -> Gradients:
        """rows: how many there were."""
        hidden, weight = (None if sums is None else sums.gradient for sums in (self.hidden, self.weight))
        bias = self.bias
        if bias is not None and self._unit is not None:
            bias *= self._unit.inverse
        if rows == 0:
            for gradient in (weight, bias):
                if gradient is not None:
                    gradient.zero_()
        return Gradients(hidden, weight, None if bias is None else bias.to(bias_dtype))
