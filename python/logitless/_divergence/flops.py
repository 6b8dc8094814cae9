"""What the operators count for torch.utils.flop_counter.FlopCounterMode: 2 N V D for each matrix product.

Rows that do not count, which only the data tells apart, are counted though they are not multiplied; and where a budget
makes logits twice they are counted once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula


def _products(heads: tuple[Any, ...], wants: list[bool] | None) -> int:
    """heads: shapes of the operators' first arguments."""
    student, weight, _, teacher = heads[:4]
    logits = 2 * int(student[0]) * int(weight[0])
    of_student = 1 + (0 if wants is None else int(wants[0]) + int(wants[1]))
    return logits * (of_student * int(student[1]) + int(teacher[1]))


def _values(*heads: Any, **_: Any) -> int:
    return _products(heads, None)


def _gradients(*heads: Any, wants: list[bool], **_: Any) -> int:
    return _products(heads, wants)


def register() -> None:
    operators: Any = torch.ops.logitless
    register_flop_formula(operators.divergence)(_values)
    register_flop_formula((operators.divergence_backward, operators.divergence_with_gradient))(_gradients)
