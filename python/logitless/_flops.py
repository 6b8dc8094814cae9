"""What the operators count for torch.utils.flop_counter.FlopCounterMode: 2 N V D for each matrix product.

Rows with ignore_index, which only the data tells apart, are counted, whether they are multiplied or not.
Elements of thinned gradients, a small part of the logits, are not counted though they are.
"""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import register_flop_formula

from ._flags import unpacked


def _product(hidden: Any, weight: Any) -> int:
    tokens, size = hidden
    return 2 * int(tokens) * int(weight[0]) * int(size)


def _gradient_products(options: dict[str, Any]) -> int:
    """Those from logits' gradients that are there: none of them are multiplied as matrices when they are thinned."""
    if options["gradient"] != "exact":
        return 0
    wants = unpacked(options["flags"]).wants()
    return int(wants.hidden or wants.scale or wants.temperature) + int(wants.weight)


def _forward(hidden: Any, weight: Any, *_: Any, **options: Any) -> int:
    return _product(hidden, weight)


def _backward(hidden: Any, weight: Any, *_: Any, **options: Any) -> int:
    logits = int(options["gradient"] == "exact")  # once more, but for draws that were kept
    return (logits + _gradient_products(options)) * _product(hidden, weight)


def _forward_backward(hidden: Any, weight: Any, *_: Any, **options: Any) -> int:
    return (1 + _gradient_products(options)) * _product(hidden, weight)


def register(operators: Any) -> None:
    """For torch.ops.logitless."""
    register_flop_formula(operators.forward)(_forward)
    register_flop_formula((operators.backward, operators.backward_into))(_backward)
    register_flop_formula(operators.forward_backward)(_forward_backward)


def register_forward(operator: Any) -> None:
    """For another one of a single product."""
    register_flop_formula(operator)(_forward)
