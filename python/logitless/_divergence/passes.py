"""Values, gradients, or both at once, of rows of two heads, tile by tile; and these as passes of the operator.

A forward pass tells the divergence of each row and what gradients need. Flags say which gradients come later, for which
the budget must be enough, too. A pass of both tells the sum of the rows' divergences times given weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import Found, OtherPasses, other_passes
from ..options import BACKWARD, F32, FORWARD, Wants, name_of
from ..passes import GRADIENTS, Pass, Result, stats_of
from ..run import DTYPES
from . import sizes
from .problem import Heads, Numbers, Operand, Problem, Products, RowNumbers, multiply, write_gradient, write_values

SAVED = ("student_lse", "teacher_lse", "student_kl")


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
        """Stores the rows of the range, which are complete."""
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


# ---- passes


def _parts(count: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, size):
        yield start, min(start + size, count)


def _multiply_rows(hiddens: list[Tensor], weights: list[Operand], window: int, out: Products) -> None:
    """All products of some rows, of both heads."""
    for hidden, weight, products in zip(hiddens, weights, out):
        for start, end in _parts(products.shape[1], window):
            multiply(hidden, weight.rows(start, end).T, products[:, start:end])


def _gradient_tile(p: Problem, products: Products) -> Tensor:
    """Where the gradients of a tile's logits go."""
    rows, columns = products.student.shape
    return products.student if p.gradient_in_place else p.new_tile(rows, columns, p.dtypes[0])


def _costs_of_windows(p: Problem, wants: Wants) -> tuple[sizes.Costs, sizes.Costs]:
    """The least for gradients in tiles of some rows, and of all."""
    return p.costs(wants, whole=False), p.costs(wants, whole=False, all_rows=True)


def _windows(p: Problem, wants: Wants) -> sizes.Tile:
    """Those of the gradients."""
    rows, (of_some, of_all) = max(1, p.rows), _costs_of_windows(p, wants)
    if p.budget == 0 or p.budget >= sizes.least_of_windows(of_some, rows, p.vocab):
        tile = sizes.windows(of_some, rows, p.vocab, p.budget, p.device.type)
        if tile.rows < rows:
            return tile
    return sizes.windows(of_all, rows, p.vocab, p.budget, p.device.type, all_rows=True)


def _least_of_values(p: Problem) -> int:
    return sizes.least_of_whole_rows(p.costs(None, whole=True), p.vocab)


def _least_of_gradients(p: Problem, wants: Wants) -> int:
    rows, (of_some, of_all) = max(1, p.rows), _costs_of_windows(p, wants)
    return min(
        sizes.least_of_windows(of_some, rows, p.vocab), sizes.least_of_windows(of_all, rows, p.vocab, all_rows=True)
    )


def _least_of_kept_logits(p: Problem, wants: Wants) -> int:
    return sizes.least_of_kept_logits(p.costs(wants, whole=True), max(1, p.rows), p.vocab, p.device.type)


def check_budget(p: Problem, wants: Wants, together: bool) -> None:
    """That it is enough, before anything is computed: for values, and for the gradients that are wanted with them or
    (together False) later."""
    least = _least_of_values(p)
    if any(wants):
        least = max(least, _least_of_gradients(p, wants))
        least = min(least, _least_of_kept_logits(p, wants)) if together else least
    sizes.check(p.budget, least)


def values(p: Problem) -> RowNumbers:
    """Divergences and what gradients need, of rows that count: one product of each head."""
    out = RowNumbers.empty(p.rows, p.new(0))
    tile = sizes.whole_rows(p.costs(None, whole=True), p.rows, p.vocab, p.budget, p.device.type)
    hiddens, weights = p.hidden_operands(tile.rows), p.weight_operands(tile.window)
    both = p.new_products(min(tile.rows, p.rows), p.vocab)
    for start, end in _parts(p.rows, tile.rows):
        products = both.part(end - start, p.vocab)
        _multiply_rows([hidden.rows(start, end) for hidden in hiddens], weights, tile.window, products)
        write_values(products, p.biases, p.options, out.rows(slice(start, end)))
    return out


def gradients(p: Problem, wants: Wants, numbers: RowNumbers, grad: Tensor, bias_dtype: torch.dtype | None) -> Gradients:
    """From the values of rows that count and upstream gradients ``[rows]``: the logits are made again, a window of the
    vocabulary at a time. One product of each head, and one of the student's for hidden states and for the weight."""
    tile = _windows(p, wants)
    hiddens, weights = p.hidden_operands(tile.rows), p.weight_operands(tile.window)
    both = p.new_products(tile.rows, tile.window)
    dz, unit = _gradient_tile(p, both), unit_of(p.dtypes[0], grad)
    grad = grad if unit is None else grad * unit.factor
    sums = GradientSums(p, wants, p.rows, tile.window, tile.rows, unit)
    for columns in _parts(p.vocab if p.rows > 0 else 0, tile.window):
        window = [weight.rows(*columns) for weight in weights]
        biases = p.biases.columns(slice(*columns))
        if sums.weight is not None:
            sums.weight.begin(columns[0])
        for rows in _parts(p.rows, tile.rows):
            part, sizes_of_tile = slice(*rows), (rows[1] - rows[0], columns[1] - columns[0])
            operands, products = [hidden.rows(*rows) for hidden in hiddens], both.part(*sizes_of_tile)
            for hidden, weight, out in zip(operands, window, products):
                multiply(hidden, weight.T, out)
            tile_dz = dz[: sizes_of_tile[0], : sizes_of_tile[1]]
            write_gradient(products, biases, p.options, numbers.rows(part), grad[part], tile_dz)
            sums.add(tile_dz, operands[0], window[0], rows, columns)
        if sums.weight is not None:
            sums.weight.store(*columns)
    if sums.hidden is not None:
        for rows in _parts(p.rows, tile.rows):
            sums.hidden.store(*rows)
    return sums.found(bias_dtype, p.rows)


def values_and_gradients(
    p: Problem, wants: Wants, grad: Tensor, bias_dtype: torch.dtype | None
) -> tuple[RowNumbers, Gradients]:
    """Both, for upstream gradients ``[rows]`` that are known: of rows whose logits stay until their gradients are made,
    or one after the other where a budget is too small for that."""
    costs = p.costs(wants, whole=True)
    if 0 < p.budget < _least_of_kept_logits(p, wants):
        numbers = values(p)
        return numbers, gradients(p, wants, numbers, grad, bias_dtype)
    out = RowNumbers.empty(p.rows, p.new(0))
    tile = sizes.whole_rows(costs, p.rows, p.vocab, p.budget, p.device.type)
    hiddens, weights = p.hidden_operands(tile.rows), p.weight_operands(tile.window)
    both = p.new_products(min(tile.rows, p.rows), p.vocab)
    dz, unit = _gradient_tile(p, both), unit_of(p.dtypes[0], grad)
    grad = grad if unit is None else grad * unit.factor
    sums = GradientSums(p, wants, tile.rows, p.vocab, tile.rows, unit)
    for rows in _parts(p.rows, tile.rows):
        count, part = rows[1] - rows[0], slice(*rows)
        operands = [hidden.rows(*rows) for hidden in hiddens]
        products, numbers = both.part(count, p.vocab), out.rows(part)
        _multiply_rows(operands, weights, tile.window, products)
        write_values(products, p.biases, p.options, numbers)
        write_gradient(products, p.biases, p.options, numbers, grad[part], dz[:count])
        if sums.hidden is not None:
            sums.hidden.begin(rows[0])
        for columns in _parts(p.vocab, tile.window):
            sums.add(dz[:count, slice(*columns)], operands[0], weights[0].rows(*columns), rows, columns)
        if sums.hidden is not None:
            sums.hidden.store(*rows)
    if sums.weight is not None and p.rows > 0:
        for columns in _parts(p.vocab, tile.window):
            sums.weight.store(*columns)
    return out, sums.found(bias_dtype, p.rows)


# ---- as passes of the operator


def weighted_sum(divergence: Tensor, weight: Tensor) -> Tensor:
    """In float64, where a weight of 0 leaves out what a row holds."""
    return torch.where(weight == 0, 0, divergence.double() * weight.double()).sum().to(divergence.dtype)


def _run(asked: Pass, given: Mapping[str, Tensor], main_grad: Tensor | None, options: Mapping[str, Any]) -> Found:
    rounded = None if options["compute_dtype"] == F32 else DTYPES[options["compute_dtype"]]
    heads = Heads(*map(given.get, Heads._fields))  # type: ignore[arg-type]
    p = Problem(heads, Numbers(*options["numbers"]), int(options["max_workspace_bytes"]), rounded)
    wants, bias_dtype = asked.flags.wants(), None if heads.student_bias is None else heads.student_bias.dtype
    if asked.kind == FORWARD:
        check_budget(p, wants, together=False)
        return {name: p.of_all_rows(numbers).clone() for name, numbers in values(p)._asdict().items()}
    if asked.kind == BACKWARD:
        grad, *saved = (p.of_counted_rows(given[name].to(p.stats)) for name in ("grad", *SAVED))
        found = gradients(p, wants, RowNumbers(grad, grad, *saved), grad, bias_dtype)  # values, which no gradient reads
        told = {}
    else:
        check_budget(p, wants, together=True)
        numbers, found = values_and_gradients(p, wants, p.of_counted_rows(given["row_weight"]), bias_dtype)
        told = {name: p.of_all_rows(getattr(numbers, name)).clone() for name in ("divergence", "entropy")}
        told = {"loss": weighted_sum(told["divergence"], given["row_weight"]), **told}
    return told | {name: gradient for name, gradient in zip(GRADIENTS, found) if gradient is not None}


def _results(asked: Pass, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Result]:
    row = Result(given["student"].shape[:1], stats_of(given["student"]))
    if asked.kind == FORWARD:
        return dict.fromkeys(RowNumbers._fields, row)
    found = {} if asked.kind == BACKWARD else {"loss": row._replace(shape=()), "divergence": row, "entropy": row}
    trained = [given.get(name) for name in Heads._fields[:3]]
    return found | {
        name: Result(tuple(tensor.shape), name_of(tensor.dtype))
        for name, tensor, on in zip(GRADIENTS, trained, asked.flags.wants())
        if on and tensor is not None
    }


def _flops(asked: Pass, shapes: Mapping[str, Any]) -> int:
    """Rows that do not count, which only the data tells apart, are counted though they are not multiplied; and where a
    budget makes logits twice they are counted once."""
    rows, width = shapes["student"]
    wants = asked.flags.wants()
    of_student = 1 if asked.kind == FORWARD else 1 + int(wants.hidden) + int(wants.weight)
    return 2 * int(rows) * int(shapes["student_weight"][0]) * (of_student * int(width) + int(shapes["teacher"][1]))


other_passes["linear_divergence"] = OtherPasses(_run, _results, _flops)
