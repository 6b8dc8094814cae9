"""Two heads for the passes: operands of products, the library's kernels over rows of these, and its plan of a pass.

PyTorch 2.8 and later multiplies 16-bit operands into float32 on CUDA, but not on the CPU. There, and where the dtypes
of hidden states and weight differ, some rows at a time are converted to float32. No logit is ever rounded to 16 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import native
from ..options import F32, Wants
from ..run import CODES, stats_dtype, stream_of
from ..run import rows as rows_of

HALVES = (torch.bfloat16, torch.float16)
ALIGNED = 64  # a tile's rows begin at multiples of this number of columns
SAVED = ("student_lse", "teacher_lse", "student_kl")  # the values that gradients need


def _has_wide_results() -> bool:
    """Whether this PyTorch writes float32 products of 16-bit operands on CUDA."""
    return hasattr(torch.ops.aten.addmm, "dtype_out")


def operand_dtype(hidden: Tensor, weight: Tensor, rounded: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a head's operands. rounded: autocast's dtype, to which both are rounded, or None."""
    if hidden.dtype == torch.float64:
        return torch.float64
    dtypes = {rounded or hidden.dtype, rounded or weight.dtype}
    dtype = dtypes.pop()
    is_half = not dtypes and dtype in HALVES
    return dtype if is_half and hidden.is_cuda and _has_wide_results() else torch.float32


class Operand:
    """A matrix whose rows are operands of products: all of them, or those of an index.

    Args:
        matrix: ``[R, D]``.
        dtype: The dtype that products read.
        rounded: A dtype to which numbers are rounded first, or None.
        index: The rows that count, int64, or None for all.
        most_rows: The most rows of one call of :meth:`rows`.
    """

    def __init__(
        self, matrix: Tensor, dtype: torch.dtype, rounded: torch.dtype | None, index: Tensor | None, most_rows: int
    ) -> None:
        self._matrix, self._index = matrix, index
        self._rounded = rounded if rounded != dtype and matrix.dtype != rounded else None
        self._copy: Tensor | None = None
        if matrix.dtype != dtype or index is not None or rounded not in (None, dtype):
            self._copy = torch.empty((most_rows, matrix.shape[1]), dtype=dtype, device=matrix.device)

    def rows(self, start: int, end: int) -> Tensor:
        """Returns some rows. Where rows are copied, they are valid until the next call."""
        if self._copy is None:
            return self._matrix[start:end]
        copy = self._copy[: end - start]
        rows = self._matrix[start:end] if self._index is None else self._matrix[self._index[start:end]]
        return copy.copy_(rows if self._rounded is None else rows.to(self._rounded))


def multiply(a: Tensor, b: Tensor, out: Tensor, *, factor: float = 1.0, add: bool = False) -> None:
    """Computes ``out = factor * a @ b``, or with ``add`` adds to out. out is float32, or float64 like its operands."""
    beta = 1 if add else 0
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=factor, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=factor, out=out)


class Numbers(NamedTuple):
    """Numbers of the formula; a softcap of 0 is none."""

    beta: float
    temperature: float
    student_scale: float
    student_softcap: float
    teacher_scale: float
    teacher_softcap: float


class RowNumbers(NamedTuple):
    """Values of rows, and numbers that their gradients need; each is ``[rows]`` in the products' dtype."""

    divergence: Tensor
    entropy: Tensor
    student_lse: Tensor
    teacher_lse: Tensor
    student_kl: Tensor

    def rows(self, start: int, end: int) -> RowNumbers:
        return RowNumbers(*(numbers[start:end] for numbers in self))

    @staticmethod
    def empty(rows: int, like: Tensor) -> RowNumbers:
        return RowNumbers(*like.new_empty((len(RowNumbers._fields), rows)).unbind())


class Exchange(Protocol):
    """Exchanges of ranks that share the vocabulary; logitless.distributed has them."""

    ranks: int
    columns: int  # the most of any rank

    def merge_sums(self, numbers: RowNumbers) -> None:
        """Replaces both lse and the entropy of a rank's columns by those of all columns."""

    def merge_terms(self, numbers: RowNumbers) -> None:
        """Replaces divergence and student_kl, parts of a rank's columns, by their sums."""


class Heads(NamedTuple):
    """Hidden states ``[N, D]``, weights ``[V, D]`` and biases ``[V]``; mask is bool ``[N]``: the rows that count."""

    student: Tensor
    student_weight: Tensor
    student_bias: Tensor | None
    teacher: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    mask: Tensor | None


class Problem:
    """Two heads and the library's kernels over their products (include/logitless/divergence.h), for all passes.

    With an ``exchange`` the columns are a rank's. Values are then of all ranks' columns.

    Args:
        heads: Tensors of the formula.
        options: Numbers of the formula.
        budget: Bytes beyond inputs and outputs; 0 allows as much as is useful.
        rounded: Autocast's dtype, to which operands are rounded, or None.
    """

    def __init__(self, heads: Heads, options: Numbers, budget: int, rounded: torch.dtype | None) -> None:
        hiddens, weights = (heads.student, heads.teacher), (heads.student_weight, heads.teacher_weight)
        self.hiddens, self.weights = [rows_of(m) for m in hiddens], [rows_of(m) for m in weights]
        self.options, self.budget, self.rounded = options, budget, rounded
        self.exchange: Exchange | None = None
        self.device, self.stats = heads.student.device, stats_dtype(heads.student)
        self.dtypes = [operand_dtype(h, w, rounded) for h, w in zip(hiddens, weights)]
        self.index = None if heads.mask is None else heads.mask.nonzero().reshape(-1)
        self.all_rows = heads.student.shape[0]
        self.rows = self.all_rows if self.index is None else self.index.shape[0]
        self.vocab, self.width = heads.student_weight.shape
        biases = (heads.student_bias, heads.teacher_bias)
        self.biases = [None if bias is None else bias.to(self.stats).contiguous() for bias in biases]
        self._copied_biases = sum(given is not bias for given, bias in zip(biases, self.biases))

    @property
    def gradient_in_place(self) -> bool:
        """Whether the gradient of the logits overwrites the student's products."""
        return self.dtypes[0] == self.stats

    def plan(self, kind: int, wants: Wants) -> tuple[native.DivergenceTiles, native.DivergenceTiles]:
        """Returns tiles of values and of gradients in a pass.

        Args:
            kind: The pass.
            wants: The gradients that are wanted, in a forward pass later.
        """
        vocab, ranks, copied_biases = self.vocab, 0, self._copied_biases
        if self.exchange is not None:  # numbers that are the same on all ranks, so that all plan alike
            vocab, ranks = self.exchange.columns, self.exchange.ranks
            copied_biases = sum(bias is not None for bias in self.biases)
        given = native.DivergenceProblem(
            kind,
            *wants[:3],
            rows=self.rows,
            vocab=max(1, vocab),
            ranks=ranks,
            rounded_dtype=F32 if self.rounded is None else CODES[self.rounded],
            gathers_rows=self.index is not None,
            copied_biases=copied_biases,
            max_workspace_bytes=self.budget,
        )
        for name, hidden, weight, dtype in zip(("student", "teacher"), self.hiddens, self.weights, self.dtypes):
            setattr(given, f"{name}_width", hidden.shape[1])
            for part, of in (("hidden", hidden.dtype), ("weight", weight.dtype), ("product", dtype)):
                setattr(given, f"{name}_{part}_dtype", CODES[of])
        return native.plan_divergence(given, native.HOST if self.device.type == "cpu" else self.device.index)

    def hidden_operands(self, most_rows: int) -> list[Operand]:
        """Returns the student's and the teacher's hidden states, of the rows that count."""
        return [Operand(m, dtype, self.rounded, self.index, most_rows) for m, dtype in zip(self.hiddens, self.dtypes)]

    def weight_operands(self, most_rows: int) -> list[Operand]:
        return [Operand(m, dtype, self.rounded, None, most_rows) for m, dtype in zip(self.weights, self.dtypes)]

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.stats, device=self.device)

    def new_tile(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, -(-columns // ALIGNED) * ALIGNED), dtype=dtype, device=self.device)[:, :columns]

    def new_products(self, rows: int, columns: int) -> list[Tensor]:
        """Returns buffers for products of hidden states and weights, ``[rows, columns]`` for each head."""
        return [self.new_tile(rows, columns, self.stats) for _ in range(2)]

    def write_values(self, products: list[Tensor], out: RowNumbers) -> None:
        """Writes the numbers of rows from both heads' products ``[rows, V]``."""
        numbers = {name: tensor.data_ptr() for name, tensor in out._asdict().items()}
        if self.exchange is None:
            self._run_kernel(native.DIVERGENCE_VALUES, products, 0, **numbers)
            return
        self._run_kernel(native.DIVERGENCE_SUMS, products, 0, **numbers)
        self.exchange.merge_sums(out)
        self._run_kernel(native.DIVERGENCE_TERMS, products, 0, **numbers)
        self.exchange.merge_terms(out)

    def write_gradient(
        self, products: list[Tensor], first_column: int, numbers: RowNumbers, grad: Tensor, out: Tensor
    ) -> None:
        """Writes the gradient of the student's logits, before the softcap, from products ``[rows, columns]``.

        Args:
            products: Both heads' products, for any columns.
            first_column: The first of these columns.
            numbers: The numbers of these rows.
            grad: Upstream gradients of the divergence, ``[rows]``.
            out: ``[rows, columns]``; it may be the student's products.
        """
        if out.shape[1] == 0:  # of a rank without columns
            return
        self._run_kernel(
            native.DIVERGENCE_GRADIENT,
            products,
            first_column,
            **{name: getattr(numbers, name).data_ptr() for name in SAVED},
            grad=grad.data_ptr(),
            d_logits=out.data_ptr(),
            d_logits_stride=out.stride(0),
            gradient_dtype=CODES[out.dtype],
        )

    def _run_kernel(self, stage: int, products: list[Tensor], first_column: int, **more: Any) -> None:
        rows, columns = products[0].shape
        for name, tensor, bias in zip(("student", "teacher"), products, self.biases):
            more |= {name: tensor.data_ptr(), f"{name}_stride": tensor.stride(0)}
            if bias is not None:
                more[f"{name}_bias"] = bias[first_column:].data_ptr()
        given = native.Divergence(
            stage=stage, dtype=CODES[self.stats], rows=rows, columns=columns, **self.options._asdict(), **more
        )
        if self.device.type == "cpu":
            native.run_divergence(given, torch.get_num_threads(), native.HOST)
        else:
            native.run_divergence(given, 1, self.device.index, stream_of(self.device.index))

    def to_counted_rows(self, numbers: Tensor) -> Tensor:
        """Returns the numbers ``[rows]`` of the rows that count, out of ``[N]``."""
        return numbers.contiguous() if self.index is None else numbers[self.index]

    def to_all_rows(self, numbers: Tensor) -> Tensor:
        """Returns numbers ``[N]`` from the ``[rows]`` of rows that count; the other rows have 0."""
        if self.index is None:
            return numbers
        return numbers.new_zeros(self.all_rows).index_copy_(0, self.index, numbers)
