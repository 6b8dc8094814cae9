"""The operators ``torch.ops.logitless.divergence*``: schemas, kernels, fake kernels and autograd formulas.

divergence                values of rows, and what their gradients need; its gradient is divergence_backward, for which
                          (wants: of which tensors) the budget must be enough, too.
divergence_backward       gradients from these and any upstream gradients.
divergence_with_gradient  the sum of the rows' divergences times given weights, with its gradients, in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import options as _options
from ..autograd import one_by_one, refuse_double_backward, scaled_by_loss
from ..run import DTYPES, stats_dtype
from . import flops
from .gradients import Gradients
from .passes import check_budget, gradients, values, values_and_gradients
from .problem import Heads, Problem, Wants
from .rows import Options, RowNumbers

_HEADS = (
    "Tensor student, Tensor student_weight, Tensor? student_bias, Tensor teacher, Tensor teacher_weight, "
    "Tensor? teacher_bias, Tensor? mask"
)
_OPTIONS = "float[] numbers, SymInt max_workspace_bytes, int compute_dtype"
_SAVED = ("student_lse", "teacher_lse", "student_kl")
_GRADIENTS = "Tensor d_student, Tensor d_student_weight, Tensor d_student_bias"
_HEAD_COUNT = len(Heads._fields)


def _problem(args: Sequence[Any], options: dict[str, Any]) -> Problem:
    rounded = None if options["compute_dtype"] == _options.F32 else DTYPES[options["compute_dtype"]]
    heads = Heads(*args[:_HEAD_COUNT])
    return Problem(heads, Options(*options["numbers"]), int(options["max_workspace_bytes"]), rounded)


def _bias_dtype(args: Sequence[Any]) -> torch.dtype | None:
    bias = Heads(*args[:_HEAD_COUNT]).student_bias
    return None if bias is None else bias.dtype


def _all(found: Gradients, like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if gradient is None else gradient for gradient in found)


def _fake_gradients(args: Sequence[Any], wants: Sequence[bool]) -> tuple[Tensor, ...]:
    trained = Heads(*args[:_HEAD_COUNT])[:3]
    return tuple(
        trained[0].new_empty(0) if tensor is None or not wanted else tensor.new_empty(tensor.shape)
        for tensor, wanted in zip(trained, wants)
    )


def _rows(args: Sequence[Any]) -> tuple[Tensor, ...]:
    student = args[0]
    fields = range(len(RowNumbers._fields))
    return tuple(student.new_empty(student.shape[:1], dtype=stats_dtype(student)) for _ in fields)


def _by_heads(found: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """A gradient or None for each of the heads' tensors."""
    return *found, *[None] * (_HEAD_COUNT - len(found))


# ---- divergence


@torch.library.custom_op(
    "logitless::divergence",
    mutates_args=(),
    schema=f"({_HEADS}, *, {_OPTIONS}, bool[] wants=[]) "
    f"-> ({', '.join('Tensor ' + name for name in RowNumbers._fields)})",
)
def divergence(*args: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    p = _problem(args, options)
    check_budget(p, Wants(*(options.get("wants") or (False,) * 3)), together=False)
    return tuple(p.of_all_rows(numbers).clone() for numbers in values(p))


@divergence.register_fake
def _(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    return _rows(args)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    numbers = RowNumbers(*output)
    ctx.options = {name: value for name, value in keyword_only_inputs.items() if name != "wants"}
    ctx.mark_non_differentiable(*numbers[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *(getattr(numbers, name) for name in _SAVED))


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    refuse_double_backward("linear_divergence")
    wants = Wants(*ctx.needs_input_grad[:3])
    if grad is None or not any(wants):
        return (None,) * _HEAD_COUNT
    found = torch.ops.logitless.divergence_backward(*ctx.saved_tensors, grad, **ctx.options, wants=list(wants))
    return _by_heads([gradient if wanted else None for gradient, wanted in zip(found, wants)])


divergence.register_autograd(_backward, setup_context=_save)


# ---- divergence_backward


@torch.library.custom_op(
    "logitless::divergence_backward",
    mutates_args=(),
    schema=f"({_HEADS}, {', '.join('Tensor ' + name for name in _SAVED)}, Tensor grad, *, {_OPTIONS}, bool[] wants) "
    f"-> ({_GRADIENTS})",
)
def divergence_backward(*args: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    p, wants = _problem(args, options), Wants(*options["wants"])
    *saved, grad = (p.of_counted_rows(numbers.to(p.stats)) for numbers in args[_HEAD_COUNT:])  # type: ignore[union-attr]
    numbers = RowNumbers(grad, grad, *saved)  # values, which no gradient reads
    return _all(gradients(p, wants, numbers, grad, _bias_dtype(args)), args[0])  # type: ignore[arg-type]


@divergence_backward.register_fake
def _(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    return _fake_gradients(args, options["wants"])


divergence_backward.register_vmap(one_by_one(divergence_backward))


# ---- divergence_with_gradient


@torch.library.custom_op(
    "logitless::divergence_with_gradient",
    mutates_args=(),
    schema=f"({_HEADS}, Tensor row_weight, *, {_OPTIONS}, bool[] wants) "
    f"-> (Tensor loss, Tensor divergence, Tensor entropy, {_GRADIENTS})",
)
def divergence_with_gradient(*args: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    p, wants, row_weight = _problem(args, options), Wants(*options["wants"]), args[_HEAD_COUNT]
    check_budget(p, wants, together=True)
    weight = p.of_counted_rows(row_weight)  # type: ignore[arg-type]
    numbers, found = values_and_gradients(p, wants, weight, _bias_dtype(args))
    rows = (p.of_all_rows(numbers.divergence).clone(), p.of_all_rows(numbers.entropy).clone())
    return weighted_sum(rows[0], row_weight), *rows, *_all(found, args[0])  # type: ignore[arg-type]


def weighted_sum(divergence: Tensor, weight: Tensor) -> Tensor:
    """In float64, where a weight of 0 leaves out what a row holds."""
    return torch.where(weight == 0, 0, divergence.double() * weight.double()).sum().to(divergence.dtype)


@divergence_with_gradient.register_fake
def _(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    rows = _rows(args)
    return rows[0].new_empty(()), *rows[:2], *_fake_gradients(args, options["wants"])


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.wants = Wants(*keyword_only_inputs["wants"])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(gradient for gradient, wanted in zip(output[3:], ctx.wants) if wanted))


def _backward_of_gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    refuse_double_backward("linear_divergence")
    if grad is None:
        return (None,) * (_HEAD_COUNT + 1)
    left = iter(scaled_by_loss(ctx.saved_tensors, grad))
    return *_by_heads([next(left) if wanted else None for wanted in ctx.wants]), None


divergence_with_gradient.register_autograd(_backward_of_gradients, setup_context=_save_gradients)


flops.register()
