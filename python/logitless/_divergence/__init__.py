"""``logitless.linear_divergence``: divergences of a student's and a teacher's head, neither's logits ever held whole.

passes.py   values, gradients, or both, tile by tile, as passes of the operator of autograd.py
problem.py  both heads, their products and the library's kernel over these, and the bytes that passes take
sizes.py    which tiles, from a budget in bytes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from .. import call
from .. import options as _options
from ..autograd import NOTHING, for_each, refuse_double_backward, run_traced, scaled_saved
from ..options import BACKWARD, FORWARD, FORWARD_BACKWARD, Budget, Flags, Wants, accepts
from ..passes import GRADIENTS, PassKey
from ..run import stats_dtype
from .passes import weighted_sum
from .problem import SAVED, Heads, Numbers

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LinearDivergenceOutput", "linear_divergence"]


class LinearDivergenceOutput(NamedTuple):
    """The result of ``logitless.linear_divergence(..., return_stats=True)``. Only the loss has a gradient."""

    loss: Tensor
    divergence: Tensor  # of each row, 0 where mask is 0
    entropy: Tensor  # of the student's distribution, in nats; 0 where mask is 0


def _check_heads(student: dict[str, Any], teacher: dict[str, Any]) -> None:
    call.check_matrices(student)
    call.check_matrices(teacher)
    rows = student["student_hidden"].shape[:-1]
    call.check_shape("teacher_hidden", teacher["teacher_hidden"][..., 0], rows, "that of student_hidden but for D")
    vocab, of_teacher = (weight.shape[0] for weight in (student["student_weight"], teacher["teacher_weight"]))
    if vocab != of_teacher:
        raise ValueError(f"teacher_weight: expected V = {vocab} rows, as student_weight has, got {of_teacher}")
    _options.check_float64(torch.float64, student | teacher, "tensors of both heads")
    call.check_devices(student["student_hidden"].device, student | teacher, "student_hidden")
    for name, tensor in teacher.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: expected a tensor that does not require grad, got one that does (the teacher has no gradient "
                f"here: pass {name}.detach())"
            )


def _number(name: str, value: call.Number | None) -> float:
    if isinstance(value, Tensor):
        value = call.scalar(name, value).item()
    return 0.0 if value is None else float(_options.number(name, value))


class DivergenceOptions(Budget, total=False):
    student_bias: Tensor | None
    teacher_bias: Tensor | None
    beta: call.Number
    temperature: call.Number
    student_scale: call.Number
    teacher_scale: call.Number
    student_softcap: call.Number | None
    teacher_softcap: call.Number | None
    mask: Tensor | None
    token_weight: Tensor | None
    reduction: str
    num_items: call.Number | None


_NAMES = _options.names_of(DivergenceOptions)
_OWN = [name for name in DivergenceOptions.__annotations__ if name not in Budget.__annotations__]
_MORE = {**dict.fromkeys(_OWN), "beta": 0.5, "student_scale": 1.0, "teacher_scale": 1.0}
_MORE |= {name: _options.DEFAULTS[name] for name in ("temperature", "reduction")}


@overload
def linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[DivergenceOptions],
) -> Tensor: ...


@overload
def linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    return_stats: Literal[True],
    **options: Unpack[DivergenceOptions],
) -> LinearDivergenceOutput: ...


@accepts(DivergenceOptions, _OWN, **_MORE)
def linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    return_stats: bool = False,
    **options: Unpack[DivergenceOptions],
) -> Tensor | LinearDivergenceOutput:
    """Divergence of a student's and a teacher's distribution over one vocabulary, without ever holding their logits.

    For each row, with p the softmax of the student's logits and q that of the teacher's, both of z / temperature with
    ``z = t(scale * (hidden . weight) + bias)``, t the softcap of that head, and ``m = (1 - beta) p + beta q``::

        beta = 0:       KL(q || p) = sum q log(q / p)            the forward divergence
        beta = 1:       KL(p || q) = sum p log(p / q)            the reverse one
        between:        beta KL(q || m) + (1 - beta) KL(p || m)  generalised Jensen-Shannon

    The student's hidden, weight and bias have a gradient; the teacher has none. docs/rl_and_distillation.md has
    formulas, work and memory.

    Args:
        student_hidden: hidden states ``[..., D]``; float32, bfloat16, float16, or float64 (then everything is).
        student_weight: ``[V, D]``, of any of these dtypes.
        teacher_hidden: hidden states of the same tokens, ``[..., E]`` with a width of their own.
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
    o: Any = _options.filled("linear_divergence", _NAMES, options, _MORE)
    reduction, mask, shape = o["reduction"], o["mask"], getattr(student_hidden, "shape", ())[:-1]
    student = {"student_hidden": student_hidden, "student_weight": student_weight, "student_bias": o["student_bias"]}
    teacher = {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight, "teacher_bias": o["teacher_bias"]}
    _check_heads(student, teacher)
    for name in ("mask", "token_weight"):
        hint = "it has no gradient; use reduction='none' and multiply"
        call.check_numbers(name, o[name], shape, "that of student_hidden without D", hint)
        call.check_devices(student_hidden.device, {name: o[name]}, "student_hidden")
    _options.check_choice("reduction", reduction, _options.REDUCTIONS)
    if not isinstance(return_stats, bool):
        raise TypeError(f"return_stats: expected a bool, got {type(return_stats).__name__}")
    numbers = [_number(name, o[name]) for name in Numbers._fields]
    budget = _options.budget(o["max_workspace_bytes"]) % _options.FASTEST  # "fastest": as much as is useful
    matrices, compute_dtype = [student_hidden, student_weight, teacher_hidden, teacher_weight], _options.F32
    if torch.is_autocast_enabled(student_hidden.device.type):
        matrices, compute_dtype = call.cast_by_autocast(*matrices)
    weight = _row_weight(student_hidden, mask, o["token_weight"], o["num_items"], reduction)
    trained = (matrices[0].reshape(-1, matrices[0].shape[-1]), matrices[1], o["student_bias"])
    fixed = (matrices[2].reshape(-1, matrices[2].shape[-1]), matrices[3], o["teacher_bias"])
    constants = [None if tensor is None else tensor.detach() for tensor in fixed]
    heads = (*trained, *constants, None if mask is None else mask.reshape(-1) != 0)
    wants = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in trained]
    halves = any(wanted and t is not None and t.dtype == torch.float16 for wanted, t in zip(wants, trained))
    given = _Call(
        together=reduction != "none" and any(wants) and not halves,
        flags=Flags().with_gradients(Wants(*wants)),
        options={**call.UNUSED, "numbers": numbers, "max_workspace_bytes": budget, "compute_dtype": compute_dtype},
        direct=call.are_off() and call.are_plain((*heads, weight)),
    )
    tensors = (*heads, weight if given.together else None)
    found = _Function.apply(given, *tensors) if any(wants) else given.first(tensors)[1]  # type: ignore[no-untyped-call]
    *sums, divergence, entropy = found
    if sums:
        loss: Tensor = sums[0]
    elif reduction == "none":
        loss = (divergence * weight).reshape(shape)
    else:
        loss = weighted_sum(divergence, weight)
    if reduction == "mean" and o["num_items"] is None and weight.numel() == 0:
        loss = loss * math.nan
    if not return_stats:
        return loss
    return LinearDivergenceOutput(loss, divergence.detach().reshape(shape), entropy.reshape(shape))


class _Call(NamedTuple):
    """The way a call goes. together: gradients are made with the loss; direct: nothing of PyTorch watches."""

    together: bool
    flags: Flags
    options: dict[str, Any]
    direct: bool

    def first(self, tensors: Sequence[Tensor | None]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """The first pass over tensors of _TENSORS: what it finds, and what of it is told."""
        asked = PassKey(FORWARD_BACKWARD if self.together else FORWARD, self.flags, "linear_divergence")
        found = run_traced(asked, dict(zip(_TENSORS, tensors)), self.options)
        names = ("loss", "divergence", "entropy") if self.together else ("divergence", "entropy")
        return found, tuple([found[name] for name in names])


_TENSORS = (*Heads._fields, "row_weight")


class _Function(torch.autograd.Function):
    """As Head of autograd.py, of two heads."""

    @staticmethod
    def forward(ctx: Any, given: _Call, *tensors: Tensor | None) -> Any:
        found, told = given.first(tensors)
        ctx.given = given
        ctx.save_for_backward(*(map(found.get, GRADIENTS) if given.together else (*tensors, *map(found.get, SAVED))))
        ctx.mark_non_differentiable(*told[1:])
        ctx.set_materialize_grads(False)
        return told

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        refuse_double_backward("linear_divergence")
        given: _Call = ctx.given
        if grad is None:
            found = NOTHING
        elif given.together:
            found = scaled_saved(ctx.saved_tensors, grad, given.direct)
        else:
            asked = PassKey(BACKWARD, given.flags, "linear_divergence")
            read = dict(zip((*_TENSORS, *SAVED), ctx.saved_tensors))
            made = for_each(lambda upstream: run_traced(asked, read | upstream, given.options), {"grad": grad})
            found = [made.get(name) for name in GRADIENTS]
        return None, *found[:3], *[None] * (len(_TENSORS) - 3)


def _row_weight(
    hidden: Tensor, mask: Tensor | None, token_weight: Tensor | None, num_items: call.Number | None, reduction: str
) -> Tensor:
    """Weights of rows in the loss, ``[N]``: 0 where the mask is 0."""
    dtype = stats_dtype(hidden)
    shape: Sequence[int] = hidden.shape[:-1]
    if num_items is not None and reduction != "mean":
        raise ValueError(f'num_items: expected None unless reduction is "mean", got one with "{reduction}"')
    weight = hidden.new_ones(shape, dtype=dtype) if token_weight is None else token_weight.to(dtype)
    in_loss = None if mask is None else mask != 0
    if in_loss is not None:
        weight = torch.where(in_loss, weight, 0)
    if reduction == "mean":
        if num_items is None:
            divisor: call.Number = weight.sum(dtype=torch.float64)
        elif isinstance(num_items, Tensor):
            divisor = call.scalar("num_items", num_items).to(hidden.device, torch.float64)
        else:
            divisor = _options.checked_num_items(num_items, reduction)
        weight = (weight.double() / divisor).to(dtype)
        if in_loss is not None and num_items is not None:  # num_items may be 0
            weight = torch.where(in_loss, weight, 0)
    return weight.reshape(-1)
