"""Rows of matrices as products read them, and products whose results are not rounded to 16 bits.

PyTorch multiplies 16-bit operands into float32 on CUDA (from 2.8 on), and not on the CPU: there, and where the dtypes
of hidden states and weight differ, a part of the rows at a time is made float32. No logit is ever rounded to 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


def _has_wide_results() -> bool:
    """Whether this PyTorch writes float32 products of 16-bit operands on CUDA."""
    return hasattr(torch.ops.aten.addmm, "dtype_out")


def operand_dtype(hidden: Tensor, weight: Tensor, rounded: torch.dtype | None) -> torch.dtype:
    """That of a head's operands. rounded: autocast's dtype, to which both are rounded, or None."""
    if hidden.dtype == torch.float64:
        return torch.float64
    dtypes = {rounded or hidden.dtype, rounded or weight.dtype}
    dtype = dtypes.pop()
    is_half = not dtypes and dtype in HALVES
    return dtype if is_half and hidden.is_cuda and _has_wide_results() else torch.float32


class Operand:
    """A matrix of which rows are read, all or those of an index.

    Args:
        matrix: ``[R, D]``.
        dtype: of what products read.
        rounded: a dtype to which numbers are rounded on the way, or None.
        index: int64, the rows that there are, or None for all.
        most_rows: of one call of :meth:`rows`.
    """

    def __init__(
        self, matrix: Tensor, dtype: torch.dtype, rounded: torch.dtype | None, index: Tensor | None, most_rows: int
    ) -> None:
        self._matrix, self._index = matrix, index
        self._rounded = rounded if rounded != dtype and matrix.dtype != rounded else None
        self._copy: Tensor | None = None
        if copied_bytes(matrix, dtype, rounded, index is not None) > 0:
            self._copy = torch.empty((most_rows, matrix.shape[1]), dtype=dtype, device=matrix.device)

    def rows(self, start: int, end: int) -> Tensor:
        """Until the next call, where rows are copied."""
        if self._copy is None:
            return self._matrix[start:end]
        copy = self._copy[: end - start]
        found = self._matrix[start:end] if self._index is None else self._matrix[self._index[start:end]]
        return copy.copy_(found if self._rounded is None else found.to(self._rounded))


def copied_bytes(matrix: Tensor, dtype: torch.dtype, rounded: torch.dtype | None, indexed: bool) -> int:
    """Bytes for each row that an Operand copies, with what is there on the way; 0 where rows are read in place."""
    if matrix.dtype == dtype and not indexed and rounded in (None, dtype):
        return 0
    size = dtype.itemsize + (matrix.dtype.itemsize if indexed else 0)
    return matrix.shape[1] * (size + (rounded.itemsize if rounded not in (None, dtype) else 0))


def multiply(a: Tensor, b: Tensor, out: Tensor, *, factor: float = 1.0, add: bool = False) -> None:
    """``out = factor * a @ b``, added to out where that is asked for. out: float32, or float64 with such operands."""
    beta = 1 if add else 0
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=factor, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=factor, out=out)
