"""``logitless.linear_divergence`` for PyTorch tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from .. import call
from .. import options as _options
from ..errors import InvalidArgumentError
from ..options import Budget, shape_text, takes
from ..run import CODES, stats_dtype
from . import operators
from .rows import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack

Number = float | Tensor


class LinearDivergenceOutput(NamedTuple):
    """What ``logitless.linear_divergence(..., return_stats=True)`` returns; all but the loss have no gradient."""

    loss: Tensor
    divergence: Tensor  # of each row, 0 where mask is 0
    entropy: Tensor  # of the student's distribution, in nats; 0 where mask is 0


class _Head(NamedTuple):
    input: Tensor
    weight: Tensor
    bias: Tensor | None


def _check_head(name: str, head: _Head) -> None:
    names = [f"{name}_{part}" for part in ("input", "weight", "bias")]
    for argument, tensor in zip(names, head):
        if tensor is not None:
            call.check_tensor(argument, tensor)
            call.check_float(argument, tensor)
    input, weight, bias = head
    if weight.dim() != 2 or weight.shape[0] < 1 or weight.shape[1] < 1:
        raise InvalidArgumentError(
            f"{names[1]}: expected shape [V, D] with V >= 1 and D >= 1, got {shape_text(weight.shape)}"
        )
    if input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{names[0]}: expected shape [..., D] with D = {weight.shape[1]} of {names[1]}, "
            f"got {shape_text(input.shape)}"
        )
    if bias is not None:
        call.check_shape(names[2], bias, weight.shape[:1], "V")


def _check_heads(student: _Head, teacher: _Head) -> None:
    _check_head("student", student)
    _check_head("teacher", teacher)
    call.check_shape(
        "teacher_input", teacher.input[..., 0], student.input.shape[:-1], "that of student_input but for D"
    )
    if teacher.weight.shape[0] != student.weight.shape[0]:
        raise ValueError(
            f"teacher_weight: expected V = {student.weight.shape[0]} rows, as student_weight has, "
            f"got {teacher.weight.shape[0]}"
        )
    wide = student.input.dtype == torch.float64
    for name, head in (("student", student), ("teacher", teacher)):
        for part, tensor in head._asdict().items():
            if tensor is not None and (tensor.dtype == torch.float64) != wide:
                raise TypeError(
                    f"{name}_{part}: expected float64 for all tensors of both heads or for none, "
                    f"got {tensor.dtype} with student_input {student.input.dtype}"
                )
            if tensor is not None and tensor.device != student.input.device:
                raise ValueError(
                    f"{name}_{part}: expected a tensor on {student.input.device}, as student_input is, "
                    f"got device {tensor.device}"
                )
            if name == "teacher" and tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"teacher_{part}: expected a tensor that does not require grad, got one that does (the teacher has "
                    f"no gradient here: pass teacher_{part}.detach())"
                )


def _check_rows(name: str, tensor: Tensor | None, like: Tensor) -> None:
    if tensor is None:
        return
    call.check_tensor(name, tensor)
    call.check_real(name, tensor)
    call.check_shape(name, tensor, like.shape[:-1], "that of student_input without D")
    call.check_constant(name, tensor, "it has no gradient; use reduction='none' and multiply")
    if tensor.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, as student_input is, got device {tensor.device}")


def _number(name: str, value: Number | None) -> float:
    if isinstance(value, Tensor):
        value = call.scalar(name, value).item()
    return 0.0 if value is None else float(_options.number(name, value))


def _autocast(head: _Head) -> _Head:
    """16-bit tensors as autocast wants those of F.linear; the products round float32 ones, a part at a time."""
    device = head.input.device.type
    if not torch.is_autocast_enabled(device):
        return head
    dtype = torch.get_autocast_dtype(device)
    halves = (torch.bfloat16, torch.float16)
    return head._replace(
        **{
            name: tensor.to(dtype)
            for name, tensor in (("input", head.input), ("weight", head.weight))
            if tensor.dtype in halves
        }
    )


def _compute_dtype(device: str, dtype: torch.dtype) -> int:
    """What products round float32 tensors to, of logitless_dtype."""
    if dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return _options.F32
    found = torch.get_autocast_dtype(device)
    return CODES[found] if found in (torch.bfloat16, torch.float16) else _options.F32


class DivergenceOptions(Budget, total=False):
    student_bias: Tensor | None
    teacher_bias: Tensor | None
    beta: Number
    temperature: Number
    student_scale: Number
    teacher_scale: Number
    student_softcap: Number | None
    teacher_softcap: Number | None
    mask: Tensor | None
    token_weight: Tensor | None
    reduction: str
    num_items: Number | None


_NAMES = _options.names_of(DivergenceOptions)
_DEFAULTS: dict[str, Any] = {
    "student_bias": None,
    "teacher_bias": None,
    "beta": 0.5,
    "temperature": 1.0,
    "student_scale": 1.0,
    "teacher_scale": 1.0,
    "student_softcap": None,
    "teacher_softcap": None,
    "mask": None,
    "token_weight": None,
    "reduction": "mean",
    "num_items": None,
    "max_workspace_bytes": None,
}


@overload
def linear_divergence(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[DivergenceOptions],
) -> Tensor: ...


@overload
def linear_divergence(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    return_stats: Literal[True],
    **options: Unpack[DivergenceOptions],
) -> LinearDivergenceOutput: ...


@takes(DivergenceOptions, tuple(_DEFAULTS), **_DEFAULTS)
def linear_divergence(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    return_stats: bool = False,
    **options: Unpack[DivergenceOptions],
) -> Tensor | LinearDivergenceOutput:
    """Divergence of a student's and a teacher's distribution over one vocabulary, without ever holding their logits.

    For each row, with p the softmax of the student's logits and q that of the teacher's, both of z / temperature with
    ``z = t(scale * (input . weight) + bias)``, t the softcap of that head, and ``m = (1 - beta) p + beta q``::

        beta = 0:       KL(q || p) = sum q log(q / p)            the forward divergence
        beta = 1:       KL(p || q) = sum p log(p / q)            the reverse one
        between:        beta KL(q || m) + (1 - beta) KL(p || m)  generalised Jensen-Shannon

    The student's input, weight and bias have a gradient; the teacher has none. docs/divergence.md has formulas, work
    and memory.

    Args:
        student_input: hidden states ``[..., D]``; float32, bfloat16, float16, or float64 (then everything is).
        student_weight: ``[V, D]``, of any of these dtypes.
        teacher_input: hidden states of the same tokens, ``[..., E]`` with a width of their own.
        teacher_weight: ``[V, E]``.
        return_stats: True also returns the divergence of each row and the entropy of p, without gradient.
        student_bias, teacher_bias: ``[V]``.
        beta: 0, or a number in [2^-100, 1].
        temperature: what both heads' logits are divided by, after the softcap.
        student_scale, teacher_scale: factors of the logits before bias and softcap.
        student_softcap, teacher_softcap: bounds of the logits; None or 0 for none.
        mask: of the rows' shape; those where it is 0 are not multiplied, and have the value 0 and no gradient. On CUDA
            its number of rows is waited for.
        token_weight: factors of rows, of the rows' shape; a constant.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. The mean divides by ``num_items``, or without it by the sum of
            ``token_weight`` over rows that the mask leaves: NaN without any.
        num_items: divisor of the mean, a number or a tensor of one element, which is read where it is.
        max_workspace_bytes: hard bound of memory beyond inputs, outputs and gradients, for each pass: bytes, or a size
            such as ``"256MiB"``. It must be enough for a backward pass that comes later, too. None or ``"fastest"``: as
            much as is useful.

    Options that are numbers may be tensors of one element without a gradient, too, which are read (and waited for).

    Returns:
        The loss: a scalar, or of the rows' shape with reduction "none"; float32 (float64 for float64 inputs), also
        under autocast. With ``return_stats`` a :class:`LinearDivergenceOutput`.

    Raises:
        TypeError: wrong type, dtype or layout of an argument.
        ValueError: wrong shape, device or range; a teacher's tensor that requires grad, outside of ``torch.no_grad()``;
            ``BudgetTooSmallError`` (with ``required_bytes``) when no tile fits ``max_workspace_bytes``.
        NotImplementedError: double backward, forward-mode differentiation, transforms of torch.func.

    Work, in products of student and teacher: values alone 1 and 1; with gradients 3 and 1 where the loss is a mean or a
    sum and the budget holds some rows of logits (and, of a 16-bit weight, its gradient in float32), else 4 and 2.
    """
    _options.check_names("linear_divergence", options, _NAMES)
    o: Any = {**_DEFAULTS, **options}
    reduction = o["reduction"]
    student, teacher = (
        _Head(student_input, student_weight, o["student_bias"]),
        _Head(teacher_input, teacher_weight, o["teacher_bias"]),
    )
    _check_heads(student, teacher)
    _check_rows("mask", o["mask"], student_input)
    _check_rows("token_weight", o["token_weight"], student_input)
    if reduction not in _options.REDUCTIONS:
        raise ValueError(f'reduction: expected one of "none", "sum", "mean", got {reduction!r}')
    if not isinstance(return_stats, bool):
        raise TypeError(f"return_stats: expected a bool, got {type(return_stats).__name__}")
    numbers = Options(
        _number("beta", o["beta"]),
        _number("temperature", o["temperature"]),
        _number("student_scale", o["student_scale"]),
        _number("student_softcap", o["student_softcap"]),
        _number("teacher_scale", o["teacher_scale"]),
        _number("teacher_softcap", o["teacher_softcap"]),
    )
    compute_dtype = _compute_dtype(student_input.device.type, student_input.dtype)
    if student_input.dtype != torch.float64:
        student, teacher = _autocast(student), _autocast(teacher)
    shape = student_input.shape[:-1]
    weight = _row_weight(student_input, o["mask"], o["token_weight"], o["num_items"], reduction)
    heads = (
        student.input.reshape(-1, student.weight.shape[1]),
        *student[1:],
        *(t if t is None else t.detach() for t in (teacher.input.reshape(-1, teacher.weight.shape[1]), *teacher[1:])),
        None if o["mask"] is None else o["mask"].reshape(-1) != 0,
    )
    given: dict[str, Any] = {
        "numbers": list(numbers),
        "max_workspace_bytes": _options.budget(o["max_workspace_bytes"])
        % _options.FASTEST,  # "fastest": as much as is useful
        "compute_dtype": compute_dtype,
    }
    wants = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in student]
    halves = any(wanted and t is not None and t.dtype == torch.float16 for wanted, t in zip(wants, student))
    loss: Tensor
    if reduction != "none" and any(wants) and not halves:
        found = torch.ops.logitless.divergence_with_gradient(*heads, weight, **given, wants=wants)
        loss, divergence, entropy = found[:3]
    else:
        divergence, entropy = torch.ops.logitless.divergence(*heads, **given, wants=wants)[:2]
        loss = divergence * weight if reduction == "none" else operators.weighted_sum(divergence, weight)
        loss = loss.reshape(shape) if reduction == "none" else loss
    if reduction == "mean" and o["num_items"] is None and weight.numel() == 0:
        loss = loss * math.nan
    if not return_stats:
        return loss
    return LinearDivergenceOutput(loss, divergence.detach().reshape(shape), entropy.reshape(shape))


def _row_weight(
    input: Tensor, mask: Tensor | None, token_weight: Tensor | None, num_items: Number | None, reduction: str
) -> Tensor:
    """Of rows in the loss, ``[N]``: 0 where the mask is."""
    dtype = stats_dtype(input)
    shape: Sequence[int] = input.shape[:-1]
    if num_items is not None and reduction != "mean":
        raise ValueError(f'num_items: expected None unless reduction is "mean", got one with "{reduction}"')
    weight = input.new_ones(shape, dtype=dtype) if token_weight is None else token_weight.to(dtype)
    in_loss = None if mask is None else mask != 0
    if in_loss is not None:
        weight = torch.where(in_loss, weight, 0)
    if reduction == "mean":
        if num_items is None:
            divisor: Number = weight.sum(dtype=torch.float64)
        elif isinstance(num_items, Tensor):
            divisor = call.scalar("num_items", num_items).to(input.device, torch.float64)
        else:
            divisor = _options.checked_num_items(num_items, reduction)
        weight = (weight.double() / divisor).to(dtype)
        if in_loss is not None and num_items is not None:  # num_items may be 0
            weight = torch.where(in_loss, weight, 0)
    return weight.reshape(-1)
