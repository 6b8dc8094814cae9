"""The fp64 reference for a part of the gradients, and the unavoidable error of same-precision arithmetic.

It has the full problem's loss and entropy of every row, dE of a few hundred rows, and dC of a few thousand vocabulary
entries. The baseline has logits in fp32, dz rounded to bf16, and products of bf16 operands summed in fp32. If N is a
power of two, or just below one, the dz of an unlikely target of the mean is exact by luck, and so is dC of a column
with one target: choose another N for errors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from data import Inputs

CHUNK_BYTES = 1 << 30


class Reference(NamedTuple):
    """Outputs of a pass in fp64, and gradients of the mean loss or for given upstream gradients."""

    outputs: tuple[Tensor, ...]  # as those of Method.outputs
    rows: Tensor  # [r] selected rows of dE
    columns: Tensor  # [c] selected rows of dC
    d_hidden: Tensor  # [r, D] fp64
    d_weight: Tensor  # [c, D] fp64
    baseline_d_hidden: float  # relative errors of the baseline
    baseline_d_weight: float


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference over the norm of what is expected. NaN or inf in ``got`` gives NaN or inf."""
    return float((got.double() - expected).norm() / expected.norm())


def row_chunk(vocab: int, item_bytes: int) -> int:
    return max(1, CHUNK_BYTES // (vocab * item_bytes))


class _Rows(NamedTuple):
    """Rows, their statistics and their upstream gradients of the loss and of the entropy."""

    hidden: Tensor
    target: Tensor
    lse: Tensor
    entropy: Tensor
    d_loss: Tensor
    d_entropy: Tensor | None

    def some(self, which: Tensor) -> _Rows:
        return _Rows(*(None if part is None else part[which] for part in self))


def lse_and_entropy(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the lse and the entropy of every row, [N] in fp64."""
    wide, both = weight.double(), []
    for part in hidden.split(row_chunk(weight.shape[0], 8)):
        logits = part.double() @ wide.T
        lse = torch.logsumexp(logits, dim=1)
        both.append((lse, lse - (torch.exp(logits - lse.unsqueeze(1)).mul_(logits)).sum(1)))
    lse, entropy = (torch.cat(parts) for parts in zip(*both))
    return lse, entropy


def _dz(rows: _Rows, weight: Tensor, first: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns dz of some rows and columns; ``first`` has the columns' vocabulary entries, or None for all."""
    d_loss = rows.d_loss.to(dtype).unsqueeze(1)
    log_p = rows.hidden.to(dtype) @ weight.to(dtype).T - rows.lse.to(dtype).unsqueeze(1)
    dz = torch.exp(log_p)
    if rows.d_entropy is None:
        dz *= d_loss
    else:
        d_entropy, entropy = (part.to(dtype).unsqueeze(1) for part in (rows.d_entropy, rows.entropy))
        dz *= d_loss - d_entropy * (log_p + entropy)
    if first is None:
        dz[torch.arange(len(dz), device=dz.device), rows.target] -= d_loss.squeeze(1)
    else:
        dz -= (rows.target.unsqueeze(1) == first.unsqueeze(0)) * d_loss
    return dz


def _product(dz: Tensor, other: Tensor) -> Tensor:
    """Multiplies as the baseline does: bf16 operands, fp32 sums, bf16 result."""
    return (dz.bfloat16().float() @ other.float()).bfloat16()


def make_reference(
    inputs: Inputs, upstream: tuple[Tensor, ...] = (), rows: int = 256, columns: int = 2048, seed: int = 1
) -> Reference:
    """Makes the reference. Half of its columns are targets of rows, where dC is large; the others are random.

    ``upstream`` is Inputs.upstream of the pass.
    """
    hidden, weight, target = inputs
    tokens, vocab, device = hidden.shape[0], weight.shape[0], hidden.device
    generator = torch.Generator(device=device).manual_seed(seed)
    some_rows = torch.randperm(tokens, device=device, generator=generator)[:rows]
    random_columns = torch.randperm(vocab, device=device, generator=generator)[: columns // 2]
    targets = target[torch.randperm(tokens, device=device, generator=generator)[: columns // 2]]
    some_columns = torch.cat([targets, random_columns]).unique()
    with torch.no_grad(), _exact_fp32():
        lse, entropy = lse_and_entropy(hidden, weight)
        own = torch.cat(
            [(h.double() * weight[t].double()).sum(1) for h, t in zip(hidden.split(4096), target.split(4096))]
        )
        d_loss = upstream[0].double() if upstream else torch.full_like(lse, 1 / tokens)
        every = _Rows(hidden, target, lse, entropy, d_loss, upstream[1].double() if len(upstream) > 1 else None)
        row_args = (every.some(some_rows), weight, None)
        column_args = (every, weight[some_columns], some_columns)
        d_hidden = _dz(*row_args, torch.float64) @ weight.double()
        d_weight = _dz(*column_args, torch.float64).T @ hidden.double()
        baseline_d_hidden = relative_error(_product(_dz(*row_args, torch.float32), weight), d_hidden)
        baseline_d_weight = relative_error(_product(_dz(*column_args, torch.float32).T, hidden), d_weight)
    losses = lse - own
    return Reference(
        outputs=(losses, entropy)[: len(upstream)] or (losses.mean(),),
        rows=some_rows,
        columns=some_columns,
        d_hidden=d_hidden,
        d_weight=d_weight,
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
