"""``logitless.linear_divergence``: divergences of a student's and a teacher's head, neither's logits ever held whole.

function.py   the function: checks, reductions, autocast
operators.py  torch.ops.logitless.divergence and its kin, with their gradients
flops.py      what PyTorch's counter of operations counts for them
passes.py     values, gradients, or both, tile by tile
gradients.py  sums of gradients over tiles
problem.py    both heads, and the bytes that passes over them take
sizes.py      which tiles, from a budget in bytes
operands.py   rows of matrices as products read them, and the products
rows.py       the library's kernel over the products of some rows
"""

from __future__ import annotations

from .function import LinearDivergenceOutput, linear_divergence

__all__ = ["LinearDivergenceOutput", "linear_divergence"]
