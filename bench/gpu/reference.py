"""The fp64 reference for a part of the gradients, and the unavoidable error of same-precision arithmetic.

It has the full problem's loss of every row, dE of a few hundred rows, and dC of a few thousand vocabulary entries. The
baseline has logits in fp32, dz = (p - onehot) / N rounded to bf16, and products of bf16 operands summed in fp32. If N
is a power of two, or just below one, the dz of an unlikely target is exact by luck, and so is dC of a column with one
target: choose another N for errors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from data import Inputs

CHUNK_BYTES = 1 << 30


class Reference(NamedTuple):
    """Means over the N rows; gradients are those of the mean loss."""

    loss: float
    rows: Tensor  # [r] selected rows of dE
    columns: Tensor  # [c] selected rows of dC
    d_hidden: Tensor  # [r, D] fp64
    d_weight: Tensor  # [c, D] fp64
    baseline_d_hidden: float  # relative errors of the baseline
    baseline_d_weight: float


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Returns

    got - expected

    /

    expected

    . NaN or inf in ``got`` gives NaN or inf.
    """
    return float((got.double() - expected).norm() / expected.norm())


def row_chunk(vocab: int, item_bytes: int) -> int:
    return max(1, CHUNK_BYTES // (vocab * item_bytes))


def log_sum_exp(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns the lse of every row, [N] in fp64."""
    wide = weight.double()
    parts = hidden.split(row_chunk(weight.shape[0], 8))
    return torch.cat([torch.logsumexp(part.double() @ wide.T, dim=1) for part in parts])


def _dz(
    hidden: Tensor, weight: Tensor, lse: Tensor, target: Tensor, first: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns p - onehot of some rows and columns; ``first`` has the columns' vocabulary entries, or None for all."""
    logits = hidden.to(dtype) @ weight.to(dtype).T
    dz = torch.exp_(logits.sub_(lse.to(dtype).unsqueeze(1)))
    if first is None:
        dz[torch.arange(len(target), device=target.device), target] -= 1.0
    else:
        dz -= (target.unsqueeze(1) == first.unsqueeze(0)).to(dtype)
    return dz


def _product(dz: Tensor, other: Tensor, tokens: int) -> Tensor:
    """Multiplies as the baseline does for the mean: bf16 operands, fp32 sums, bf16 result. Returns N times it in
    float64."""
    return ((dz / tokens).bfloat16().float() @ other.float()).bfloat16().double() * tokens


def make_reference(inputs: Inputs, rows: int = 256, columns: int = 2048, seed: int = 1) -> Reference:
    """Makes the reference. Half of its columns are targets of rows, where dC is large; the others are random."""
    hidden, weight, target = inputs
    tokens, vocab, device = hidden.shape[0], weight.shape[0], hidden.device
    generator = torch.Generator(device=device).manual_seed(seed)
    some_rows = torch.randperm(tokens, device=device, generator=generator)[:rows]
    random_columns = torch.randperm(vocab, device=device, generator=generator)[: columns // 2]
    targets = target[torch.randperm(tokens, device=device, generator=generator)[: columns // 2]]
    some_columns = torch.cat([targets, random_columns]).unique()
    with torch.no_grad(), _exact_fp32():
        lse = log_sum_exp(hidden, weight)
        own = torch.cat(
            [(h.double() * weight[t].double()).sum(1) for h, t in zip(hidden.split(4096), target.split(4096))]
        )
        row_args = (hidden[some_rows], weight, lse[some_rows], target[some_rows], None)
        column_args = (hidden, weight[some_columns], lse, target, some_columns)
        d_hidden = _dz(*row_args, torch.float64) @ weight.double()
        d_weight = _dz(*column_args, torch.float64).T @ hidden.double()
        baseline_d_hidden = relative_error(_product(_dz(*row_args, torch.float32), weight, tokens), d_hidden)
        baseline_d_weight = relative_error(_product(_dz(*column_args, torch.float32).T, hidden, tokens), d_weight)
    return Reference(
        loss=(lse - own).mean().item(),
        rows=some_rows,
        columns=some_columns,
        d_hidden=d_hidden / tokens,
        d_weight=d_weight / tokens,
        baseline_d_hidden=baseline_d_hidden,
        baseline_d_weight=baseline_d_weight,
    )


class _exact_fp32:
    """Computes products of fp32 matrices without TF32 within the block."""

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self.before)
