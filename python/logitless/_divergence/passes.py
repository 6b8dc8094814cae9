"""Computes values, gradients, or both at once, for rows of two heads, tile by tile; has these as the operator's passes.

A forward pass returns each row's divergence and the numbers that gradients need. Its flags say which gradients come
later, as the budget must be enough for these as well. A pass of both returns the weighted sum of the rows' divergences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..autograd import OtherPasses, Outputs, other_passes
from ..native import DivergenceTiles as Tiles
from ..options import BACKWARD, F32, FORWARD, Wants, name_of
from ..passes import GRADIENTS, PassKey, Result, stats_of
from ..run import DTYPES
from .problem import SAVED, Heads, Numbers, Problem, RowNumbers, multiply

Range = tuple[int, int]


def unit_of(dtype: torch.dtype, grad: Tensor) -> Tensor | None:
    """Returns the power of two by which upstream gradients are multiplied before dz is rounded to float16, else None.

    It brings the largest gradient into [16, 32). Probabilities down to 2^-18 are then normal numbers, and dz is finite
    up to 2,000 times the upstream gradient.
    """
    if dtype != torch.float16 or grad.numel() == 0:
        return None
    largest = grad.abs().amax()
    exponent = 5 - torch.frexp(largest).exponent.clamp(-90, 90)
    exponent = torch.where(largest.isfinite() & (largest > 0), exponent, 0)
    return torch.ldexp(torch.ones_like(largest), exponent)


class _RowSums:
    """A gradient that is added up one range of rows after another, in a buffer unless it has the dtype of the sums.

    Args:
        gradient: The gradient to write, ``[R, D]``.
        buffer: Sums of one range, ``[rows, D]``; each range begins at a multiple of this number of rows. None where the
            gradient's own rows hold the sums.
        index: The row of the gradient for each sum, or None where they are the same.
        unit: The factor of the sums, or None.
    """

    def __init__(self, gradient: Tensor, buffer: Tensor | None, index: Tensor | None, unit: Tensor | None) -> None:
        self.gradient, self._buffer, self._index, self._unit = gradient, buffer, index, unit

    def rows(self, start: int, end: int) -> Tensor:
        if self._buffer is None:
            return self.gradient[start:end]
        first = start % len(self._buffer)
        return self._buffer[first : first + end - start]

    def store(self, start: int, end: int) -> None:
        """Stores the rows of a range whose sums are complete."""
        sums = self.rows(start, end)
        if self._unit is not None:
            sums /= self._unit
        if self._buffer is None:
            return
        if self._index is None:
            self.gradient[start:end] = sums
        else:
            self.gradient.index_copy_(0, self._index[start:end], sums.to(self.gradient.dtype))


class GradientSums:
    """The wanted gradients; tiles may come row by row within a range of columns, or the other way round.

    Args:
        p: The problem.
        wants: The gradients that are wanted.
        grad: Upstream gradients of the rows' divergences, ``[rows]``.
        products: Buffers of both heads' products. The gradients of logits are made in the student's where they have the
            same dtype.
        tiles: The plan of these tiles.
    """

    def __init__(self, p: Problem, wants: Wants, grad: Tensor, products: list[Tensor], tiles: Tiles) -> None:
        self._p, self._unit = p, unit_of(p.dtypes[0], grad)
        self._grad = grad if self._unit is None else grad * self._unit
        shape = products[0].shape
        self._dz = products[0] if p.gradient_in_place else p.new_tile(shape[0], shape[1], p.dtypes[0])
        self.hidden = self.weight = self._bias = None
        hidden, weight = p.hiddens[0], p.weights[0]
        if wants.hidden:
            new = torch.empty if p.index is None else torch.zeros
            gradient = new((p.all_rows, p.width), dtype=hidden.dtype, device=p.device)
            buffer = p.new(tiles.hidden_sums, p.width) if tiles.hidden_sums > 0 else None
            self.hidden = _RowSums(gradient, buffer, p.index, self._unit)
        if wants.weight:
            gradient = torch.empty((p.vocab, p.width), dtype=weight.dtype, device=p.device)
            buffer = p.new(tiles.weight_sums, p.width) if tiles.weight_sums > 0 else None
            self.weight = _RowSums(gradient, buffer, None, self._unit)
        if wants.bias:
            self._bias = p.new(p.vocab)
            self._ones = torch.ones((1, tiles.rows), dtype=p.dtypes[0], device=p.device)

    def logits_gradient(self, products: list[Tensor], numbers: RowNumbers, rows: Range, first_column: int) -> Tensor:
        """Returns the gradient of a tile's logits before the softcap, ``[rows, columns]``."""
        count, columns = products[0].shape
        dz = self._dz[:count, :columns]
        grad = self._grad[slice(*rows)]
        self._p.write_gradient(products, first_column, numbers.rows(*rows), grad, dz)
        return dz

    def add(self, dz: Tensor, hidden: Tensor, weight: Tensor, rows: Range, columns: Range) -> None:
        """Adds a tile: dz is its logits_gradient ``[rows, columns]``, hidden ``[rows, D]``, weight ``[columns, D]``."""
        factor = self._p.options.student_scale
        if self.hidden is not None:
            multiply(dz, weight, self.hidden.rows(*rows), factor=factor, add=columns[0] > 0)
        if self.weight is not None:
            multiply(dz.T, hidden, self.weight.rows(*columns), factor=factor, add=rows[0] > 0)
        if self._bias is not None:
            multiply(self._ones[:, : dz.shape[0]], dz, self._bias[None, slice(*columns)], add=rows[0] > 0)

    def gradients(self, bias_dtype: torch.dtype | None) -> Outputs:
        """Returns the complete gradients by name."""
        weight, bias = None if self.weight is None else self.weight.gradient, self._bias
        if bias is not None and self._unit is not None:
            bias /= self._unit
        every = {
            "d_hidden": None if self.hidden is None else self.hidden.gradient,
            "d_weight": weight,
            "d_bias": None if bias is None else bias.to(bias_dtype),
        }
        made = {name: gradient for name, gradient in every.items() if gradient is not None}
        if self._p.rows == 0 or self._p.vocab == 0:  # no product has written them
            for gradient in made.values():
                gradient.zero_()
        return made


# ---- passes


def _parts(count: int, size: int) -> Iterator[Range]:
    for start in range(0, count, size):
        yield start, min(start + size, count)


def values(
    p: Problem, tiles: Tiles, wants: Wants = Wants(), grad: Tensor | None = None
) -> tuple[RowNumbers, GradientSums | None]:
    """Returns divergences, and the numbers that gradients need, of the rows that count: one product of each head.

    With upstream gradients ``[rows]`` it also makes the wanted gradients, by two more products. A tile's logits stay
    until its gradients are made.
    """
    out = RowNumbers.empty(p.rows, p.new(0))
    hiddens, weights = p.hidden_operands(tiles.rows), p.weight_operands(tiles.window)
    both = p.new_products(min(tiles.rows, p.rows), p.vocab)
    sums = None if grad is None else GradientSums(p, wants, grad, both, tiles)
    for rows in _parts(p.rows, tiles.rows):
        operands = [hidden.rows(*rows) for hidden in hiddens]
        products = [buffer[: rows[1] - rows[0]] for buffer in both]
        for hidden, weight, product in zip(operands, weights, products):
            for columns in _parts(p.vocab, tiles.window):
                multiply(hidden, weight.rows(*columns).T, product[:, slice(*columns)])
        p.write_values(products, out.rows(*rows))
        if sums is None:
            continue
        dz = sums.logits_gradient(products, out, rows, 0)
        for columns in _parts(p.vocab, tiles.window):
            sums.add(dz[:, slice(*columns)], operands[0], weights[0].rows(*columns), rows, columns)
        if sums.hidden is not None:
            sums.hidden.store(*rows)
    if sums is not None and sums.weight is not None and p.rows > 0:
        for columns in _parts(p.vocab, tiles.window):
            sums.weight.store(*columns)
    return out, sums


def gradients(p: Problem, tiles: Tiles, wants: Wants, numbers: RowNumbers, grad: Tensor) -> GradientSums:
    """Makes the gradients from the values of the rows that count and upstream gradients ``[rows]``.

    The logits are made again, one window of the vocabulary at a time: one product of each head, and one of the student
    each for hidden states and weight.
    """
    hiddens, weights = p.hidden_operands(tiles.rows), p.weight_operands(tiles.window)
    both = p.new_products(tiles.rows, tiles.window)
    sums = GradientSums(p, wants, grad, both, tiles)
    for columns in _parts(p.vocab if p.rows > 0 else 0, tiles.window):
        window = [weight.rows(*columns) for weight in weights]
        for rows in _parts(p.rows, tiles.rows):
            operands = [hidden.rows(*rows) for hidden in hiddens]
            products = [buffer[: rows[1] - rows[0], : columns[1] - columns[0]] for buffer in both]
            for hidden, weight, product in zip(operands, window, products):
                multiply(hidden, weight.T, product)
            dz = sums.logits_gradient(products, numbers, rows, columns[0])
            sums.add(dz, operands[0], window[0], rows, columns)
        if sums.weight is not None:
            sums.weight.store(*columns)
    if sums.hidden is not None:
        for rows in _parts(p.rows, tiles.rows):
            sums.hidden.store(*rows)
    return sums


# ---- passes of the operator


def weighted_sum(divergence: Tensor, weight: Tensor) -> Tensor:
    """Returns the sum of weighted divergences, added in float64; a weight of 0 leaves out even a NaN."""
    return torch.where(weight == 0, 0, divergence.double() * weight.double()).sum().to(divergence.dtype)


def problem_of(given: Mapping[str, Tensor], options: Mapping[str, Any]) -> Problem:
    rounded = None if options["compute_dtype"] == F32 else DTYPES[options["compute_dtype"]]
    heads = Heads(*map(given.get, Heads._fields))  # type: ignore[arg-type]
    return Problem(heads, Numbers(*options["numbers"]), int(options["max_workspace_bytes"]), rounded)


def _run(
    pass_key: PassKey, given: Mapping[str, Tensor], main_grad: Tensor | None, options: Mapping[str, Any]
) -> Outputs:
    return run(problem_of(given, options), pass_key, given)


def run(p: Problem, pass_key: PassKey, given: Mapping[str, Tensor]) -> Outputs:
    bias = given.get("student_bias")
    wants, bias_dtype = pass_key.flags.wants(), None if bias is None else bias.dtype
    of_values, of_gradients = p.plan(pass_key.kind, wants)
    if pass_key.kind == FORWARD:
        return {name: p.to_all_rows(numbers).clone() for name, numbers in values(p, of_values)[0]._asdict().items()}
    if pass_key.kind == BACKWARD:
        grad, *saved = (p.to_counted_rows(given[name].to(p.stats)) for name in ("grad", *SAVED))
        numbers = RowNumbers(grad, grad, *saved)  # gradients do not read divergence and entropy
        return gradients(p, of_gradients, wants, numbers, grad).gradients(bias_dtype)
    grad = p.to_counted_rows(given["row_weight"])
    if of_gradients.rows > 0:  # values first, then gradients
        numbers = values(p, of_values)[0]
        sums: Any = gradients(p, of_gradients, wants, numbers, grad)
    else:
        numbers, sums = values(p, of_values, wants, grad)
    by_row = {name: p.to_all_rows(getattr(numbers, name)).clone() for name in ("divergence", "entropy")}
    return {"loss": weighted_sum(by_row["divergence"], given["row_weight"]), **by_row, **sums.gradients(bias_dtype)}


def results(pass_key: PassKey, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Result]:
    row = Result(given["student"].shape[:1], stats_of(given["student"]))
    if pass_key.kind == FORWARD:
        return dict.fromkeys(RowNumbers._fields, row)
    outputs = {} if pass_key.kind == BACKWARD else {"loss": row._replace(shape=()), "divergence": row, "entropy": row}
    trained = [given.get(name) for name in Heads._fields[:3]]
    return outputs | {
        name: Result(tuple(tensor.shape), name_of(tensor.dtype))
        for name, tensor, on in zip(GRADIENTS, trained, pass_key.flags.wants())
        if on and tensor is not None
    }


def flops(pass_key: PassKey, shapes: Mapping[str, Any]) -> int:
    """Returns the FLOP of a pass, from the shapes alone.

    Masked rows are included although they are not multiplied, as only the data shows them. Logits that a small budget
    makes twice count once.
    """
    rows, width = shapes["student"]
    wants = pass_key.flags.wants()
    of_student = 1 if pass_key.kind == FORWARD else 1 + int(wants.hidden) + int(wants.weight)
    return 2 * int(rows) * int(shapes["student_weight"][0]) * (of_student * int(width) + int(shapes["teacher"][1]))


other_passes["linear_divergence"] = OtherPasses(_run, results, flops)
