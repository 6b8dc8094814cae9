"""Two heads as passes see them, and the bytes that passes take."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..run import rows as rows_of
from ..run import stats_dtype
from . import sizes
from .operands import Operand, copied_bytes, operand_dtype
from .rows import Biases, Options, Products, RowNumbers


class Heads(NamedTuple):
    """Hidden states ``[N, D]``, weights ``[V, D]`` and biases ``[V]``; mask: bool ``[N]``, the rows that count."""

    student: Tensor
    student_weight: Tensor
    student_bias: Tensor | None
    teacher: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    mask: Tensor | None


class Wants(NamedTuple):
    """Which gradients."""

    hidden: bool
    weight: bool
    bias: bool


class Problem:
    """What the passes over two heads share.

    Args:
        heads, options: the formula's.
        budget: bytes beside inputs and outputs, 0 for as much as is useful.
        rounded: autocast's dtype, to which operands are rounded, or None.
    """

    def __init__(self, heads: Heads, options: Options, budget: int, rounded: torch.dtype | None) -> None:
        hiddens, weights = (heads.student, heads.teacher), (heads.student_weight, heads.teacher_weight)
        self.hiddens, self.weights = [rows_of(m) for m in hiddens], [rows_of(m) for m in weights]
        self.options, self.budget, self.rounded = options, budget, rounded
        self.device, self.stats = heads.student.device, stats_dtype(heads.student)
        self.dtypes = [operand_dtype(h, w, rounded) for h, w in zip(hiddens, weights)]
        self.index = None if heads.mask is None else heads.mask.nonzero().reshape(-1)
        self.all_rows = heads.student.shape[0]
        self.rows = self.all_rows if self.index is None else self.index.shape[0]
        self.vocab, self.width = heads.student_weight.shape
        biases = (heads.student_bias, heads.teacher_bias)
        self.biases = Biases(*(None if bias is None else bias.to(self.stats).contiguous() for bias in biases))
        self._copied_biases = sum(given is not bias for given, bias in zip(biases, self.biases))

    @property
    def gradient_in_place(self) -> bool:
        """Whether the gradient of the logits takes the place of the student's products."""
        return self.dtypes[0] == self.stats

    @property
    def writes_hidden(self) -> bool:
        """Whether the gradient of the hidden states is a sum of products itself, and not made of one."""
        return self.index is None and self.hiddens[0].dtype == self.stats

    @property
    def writes_weight(self) -> bool:
        return self.weights[0].dtype == self.stats

    @property
    def rounds_weight_once(self) -> bool:
        """Whether one product over all rows makes the gradient of weights as it is stored."""
        return self.weights[0].dtype == self.dtypes[0] == torch.bfloat16

    def costs(self, wants: Wants | None, whole: bool, all_rows: bool = False) -> sizes.Costs:
        """wants: None for values alone. whole: in tiles of whole rows; all_rows: of all rows."""
        size, indexed = self.stats.itemsize, self.index is not None
        fixed = size * self.vocab * self._copied_biases
        if indexed:  # the index, and numbers of the rows that count before they are told of all
            fixed += (8 + size * (len(RowNumbers._fields) + 1)) * self.rows
        row = sum(copied_bytes(m, dtype, self.rounded, indexed) for m, dtype in zip(self.hiddens, self.dtypes))
        column = sum(copied_bytes(m, dtype, self.rounded, False) for m, dtype in zip(self.weights, self.dtypes))
        element = 2 * size
        if wants is None:
            return sizes.Costs(fixed, row, column, element)
        if not self.gradient_in_place:
            element += self.dtypes[0].itemsize
        if self.dtypes[0] == torch.float16:  # upstream gradients in their unit, and what finds it
            fixed += 2 * size * self.rows
        if wants.bias:
            fixed += size * self.vocab
            row += self.dtypes[0].itemsize
        if wants.hidden and not self.writes_hidden:
            row += self.hiddens[0].dtype.itemsize * self.width if indexed else 0
            row, fixed = (row + size * self.width, fixed) if whole else (row, fixed + size * self.width * self.rows)
        if wants.weight and not (self.writes_weight or (all_rows and self.rounds_weight_once)):
            column, fixed = (
                (column, fixed + size * self.width * self.vocab) if whole else (column + size * self.width, fixed)
            )
        return sizes.Costs(fixed, row, column, element)

    def hidden_operands(self, most_rows: int) -> list[Operand]:
        """The student's and the teacher's, of rows that count."""
        return [Operand(m, dtype, self.rounded, self.index, most_rows) for m, dtype in zip(self.hiddens, self.dtypes)]

    def weight_operands(self, most_rows: int) -> list[Operand]:
        return [Operand(m, dtype, self.rounded, None, most_rows) for m, dtype in zip(self.weights, self.dtypes)]

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.stats, device=self.device)

    def new_tile(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, sizes.padded(columns)), dtype=dtype, device=self.device)[:, :columns]

    def new_products(self, rows: int, columns: int) -> Products:
        return Products(*(self.new_tile(rows, columns, self.stats) for _ in Products._fields))

    def of_counted_rows(self, numbers: Tensor) -> Tensor:
        """``[N]`` to ``[rows]``"""
        return numbers.contiguous() if self.index is None else numbers[self.index]

    def of_all_rows(self, numbers: Tensor) -> Tensor:
        """``[rows]`` to ``[N]``, 0 in rows that do not count."""
        if self.index is None:
            return numbers
        return numbers.new_zeros(self.all_rows).index_copy_(0, self.index, numbers)
