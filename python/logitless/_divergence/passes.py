"""Values, gradients, or both at once, of rows of two heads, tile by tile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import sizes
from .gradients import Gradients, GradientSums, unit_of
from .operands import Operand, multiply
from .problem import Problem, Wants
from .rows import Products, RowNumbers, write_gradient, write_values


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
