"""``logitless.linear_divergence``: divergences of a student's and a teacher's head, without holding their logits whole.

lists.py    computes values over lists of ids, from logitless.linear_candidates
passes.py   computes values, gradients, or both, tile by tile, as passes of the operator of autograd.py
problem.py  has both heads, their products, the library's kernels over these, and its plan of a pass's tiles
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    divergence: Tensor  # each row's divergence, 0 where mask is 0
    entropy: Tensor  # entropy of the student's distribution, in nats; 0 where mask is 0


def _check_heads(student: dict[str, Any], teacher: dict[str, Any], least_vocab: int) -> None:
    call.check_matrices(student, least_vocab)
    call.check_matrices(teacher, least_vocab)
    rows = student["student_hidden"].shape[:-1]
    call.check_shape("teacher_hidden", teacher["teacher_hidden"][..., 0], rows, "that of student_hidden except D")
    vocab, of_teacher = (weight.shape[0] for weight in (student["student_weight"], teacher["teacher_weight"]))
    if vocab != of_teacher:
        raise ValueError(f"teacher_weight: expected V = {vocab} rows (as in student_weight), got {of_teacher}")
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
    ids: Tensor | None
    offsets: Tensor | None
    normalize: str
    ignore_id: int
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
_MORE |= {"normalize": "candidates", "ignore_id": -1}
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
    """Divergence of a student's and a teacher's distribution over one vocabulary, without holding their logits whole.

    p is the softmax of the student's z / temperature, q that of the teacher's. Each head has
    ``z = t(scale * (hidden . weight) + bias)``, where t is its softcap. With ``m = (1 - beta) p + beta q`` a row has::

        beta = 0:       KL(q || p) = sum q log(q / p)            the forward divergence
        beta = 1:       KL(p || q) = sum p log(p / q)            the reverse divergence
        between:        beta KL(q || m) + (1 - beta) KL(p || m)  the generalised Jensen-Shannon divergence

    With ``ids`` the sums have these ids of a row alone, such as the student's or the teacher's most probable ones from
    :func:`logitless.linear_top_k`. Logits of other ids are not computed, unless ``normalize`` asks for them.

    The student's hidden states, weight and bias have a gradient; the teacher's have none. Options that are numbers may
    also be tensors of one element without a gradient, whose values the host waits for.

    Values alone take one matmul of each head. Gradients take three of the student and one of the teacher in all, if the
    loss is a mean or a sum and the budget holds some rows of logits, and for a 16-bit weight its gradient in float32.
    Otherwise they take four and two. docs/rl_and_distillation.md has formulas, work and memory.

    Args:
        student_hidden: Hidden states ``[..., D]``; float32, bfloat16, float16, or float64 (then all tensors are).
        student_weight: ``[V, D]``, of any of these dtypes.
        teacher_hidden: Hidden states of the same tokens, ``[..., E]`` with their own width.
        teacher_weight: ``[V, E]``.
        return_stats: Whether each row's divergence and the entropy of p are returned as well, without gradient.
        ids: A list of ids for each row, as in :func:`logitless.linear_candidates`: ``[..., K]``, ``[E]`` with
            ``offsets``, or ``[K]`` for all rows. None means the vocabulary.
        offsets: ``[N + 1]``: where the lists of rows begin.
        normalize: With ids, ``"candidates"``: p and q add up to 1 over the list. Or ``"vocabulary"``: they do over the
            vocabulary, and all other ids are one more class; lists then have no id twice.
        ignore_id: An id that stands for none.
        student_bias: ``[V]``, or None.
        teacher_bias: ``[V]``, or None.
        beta: 0, or a number in [2^-100, 1].
        temperature: Divisor of both heads' logits, after the softcap.
        student_scale: Factor of the student's logits, before bias and softcap.
        teacher_scale: Factor of the teacher's logits, before bias and softcap.
        student_softcap: Bound of the student's logits; None or 0 for none.
        teacher_softcap: Bound of the teacher's logits; None or 0 for none.
        mask: A tensor of the rows' shape, or None. Rows where it is 0 are left out of the products; they have the value
            0 and no gradient. On CUDA the host waits for the number of the others.
        token_weight: Constant factors of rows, in the rows' shape, or None.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. The mean divides by ``num_items``, or without it by the sum of
            ``token_weight`` over rows that the mask leaves (NaN where it leaves none).
        num_items: Divisor of the mean: a number, or a tensor of one element, which stays on its device.
        max_workspace_bytes: Hard bound of memory beyond inputs, outputs and gradients, for each pass: bytes, or a size
            such as ``"256MiB"``. It must also be enough for a later backward pass. None or ``"fastest"`` allows as much
            as is useful. With ids it is that of :func:`logitless.linear_candidates`.

    Returns:
        The loss: a scalar, or with reduction "none" a tensor of the rows' shape; float32 (float64 for float64 inputs),
        also under autocast. With ``return_stats`` a :class:`LinearDivergenceOutput`.

    Raises:
        TypeError: An argument has a wrong type, dtype or layout.
        ValueError: An argument has a wrong shape, device or range, or a teacher's tensor requires grad outside of
            ``torch.no_grad()``.
        BudgetTooSmallError: No tile fits ``max_workspace_bytes``; ``required_bytes`` says what would. A ValueError.
        NotImplementedError: Double backward, forward-mode differentiation, and transforms of torch.func.
    """
    return prepared(student_hidden, student_weight, teacher_hidden, teacher_weight, return_stats, options).result()


def prepared(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    return_stats: bool,
    options: Mapping[str, Any],
    ranks: call.Ranks | None = None,
) -> Prepared:
    """Checks the arguments of linear_divergence. ranks: those that share the vocabulary; None for none."""
    o: Any = _options.filled("linear_divergence", _NAMES, options, _MORE)
    reduction, mask, shape = o["reduction"], o["mask"], getattr(student_hidden, "shape", ())[:-1]
    student = {"student_hidden": student_hidden, "student_weight": student_weight, "student_bias": o["student_bias"]}
    teacher = {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight, "teacher_bias": o["teacher_bias"]}
    _check_heads(student, teacher, least_vocab=1 if ranks is None else 0)
    for name in ("mask", "token_weight"):
        hint = "it has no gradient; use reduction='none' and multiply"
        call.check_numbers(name, o[name], shape, "that of student_hidden without D", hint)
        call.check_devices(student_hidden.device, {name: o[name]}, "student_hidden")
    _options.check_choice("reduction", reduction, _options.REDUCTIONS)
    if not isinstance(return_stats, bool):
        raise TypeError(f"return_stats: expected a bool, got {type(return_stats).__name__}")
    numbers = [_number(name, o[name]) for name in Numbers._fields]
    budget = _options.budget(o["max_workspace_bytes"])
    matrices, compute_dtype = [student_hidden, student_weight, teacher_hidden, teacher_weight], _options.F32
    if torch.is_autocast_enabled(student_hidden.device.type):
        matrices, compute_dtype = call.cast_by_autocast(*matrices)
    lists = _lists_of(o, student_hidden, student_weight, least_vocab=1 if ranks is None else 0)
    weight = _row_weight(student_hidden, mask, o["token_weight"], o["num_items"], reduction)
    trained = (matrices[0].reshape(-1, matrices[0].shape[-1]), matrices[1], o["student_bias"])
    fixed = (matrices[2].reshape(-1, matrices[2].shape[-1]), matrices[3], o["teacher_bias"])
    constants = [None if tensor is None else tensor.detach() for tensor in fixed]
    heads = (*trained, *constants, None if mask is None else mask.reshape(-1) != 0)
    wants = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in trained]
    halves = any(wanted and t is not None and t.dtype == torch.float16 for wanted, t in zip(wants, trained))
    given = _Call(
        ranks=ranks,
        together=reduction != "none" and any(wants) and not halves,
        flags=Flags().with_gradients(Wants(*wants)),
        options={**call.UNUSED, "numbers": numbers, "max_workspace_bytes": budget, "compute_dtype": compute_dtype},
        direct=call.are_off() and call.are_plain((*heads, weight)),
    )
    divides_by_nothing = reduction == "mean" and o["num_items"] is None and weight.numel() == 0
    return Prepared(given, Heads(*heads), lists, weight, shape, reduction == "none", divides_by_nothing, return_stats)


def _lists_of(o: Mapping[str, Any], hidden: Tensor, weight: Tensor, least_vocab: int) -> Any:
    """Returns the IdLists of a call, or None."""
    if o["ids"] is None:
        for name in ("offsets", "normalize", "ignore_id"):
            if o[name] is not _MORE[name] and o[name] != _MORE[name]:
                raise ValueError(f"{name}: expected {_MORE[name]!r} without ids, got {o[name]!r}")
        return None
    from .lists import IdLists  # candidates.py needs this package

    names = ("normalize", "ignore_id", "max_workspace_bytes")
    lists = IdLists(o["ids"], o["offsets"], {name: o[name] for name in names})
    lists.check(hidden, weight, least_vocab)
    return lists


class Prepared(NamedTuple):
    """A checked call."""

    call: _Call
    heads: Heads
    lists: Any  # IdLists, or None
    weight: Tensor  # of rows in the loss, ``[N]``
    shape: Sequence[int]  # of rows
    by_row: bool  # whether the loss has one number a row
    divides_by_nothing: bool
    return_stats: bool

    def result(self, linear_candidates: Any = None) -> Tensor | LinearDivergenceOutput:
        """Computes the result. linear_candidates: that of a group, for lists of ids."""
        given, weight, shape = self.call, self.weight, self.shape
        tensors = (*self.heads, weight if given.together else None)
        if self.lists is not None:
            from ..candidates import linear_candidates as of_one_rank
            from .lists import divergences

            numbers = Numbers(*given.options["numbers"])
            outputs: Any = divergences(
                self.heads, self.lists, numbers, weight, self.return_stats, linear_candidates or of_one_rank
            )
        elif any(given.flags.wants()):
            outputs = _Function.apply(given, *tensors)  # type: ignore[no-untyped-call]
        else:
            outputs = given.first(tensors)[1]
        *sums, divergence, entropy = outputs
        if sums:
            loss: Tensor = sums[0]
        elif self.by_row:
            loss = torch.where(weight == 0, 0, divergence * weight).reshape(shape)  # also of an infinite divergence
        else:
            loss = weighted_sum(divergence, weight)
        if self.divides_by_nothing:
            loss = loss * math.nan
        if not self.return_stats:
            return loss
        return LinearDivergenceOutput(loss, divergence.detach().reshape(shape), entropy.reshape(shape))


class _Call(NamedTuple):
    """The passes of a call."""

    ranks: call.Ranks | None
    together: bool  # whether gradients are made with the loss
    flags: Flags
    options: dict[str, Any]
    direct: bool  # whether nothing of PyTorch observes the call, such as a dispatch mode

    def first(self, tensors: Sequence[Tensor | None]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """Runs the first pass over the tensors named in _TENSORS; returns its results, and the outputs among them."""
        pass_key = PassKey(FORWARD_BACKWARD if self.together else FORWARD, self.flags, "linear_divergence", self.ranks)
        results = run_traced(pass_key, dict(zip(_TENSORS, tensors)), self.options)
        names = ("loss", "divergence", "entropy") if self.together else ("divergence", "entropy")
        return results, tuple([results[name] for name in names])


_TENSORS = (*Heads._fields, "row_weight")


class _Function(torch.autograd.Function):
    """The autograd function of two heads; Head of autograd.py is that of one."""

    @staticmethod
    def forward(ctx: Any, given: _Call, *tensors: Tensor | None) -> Any:
        results, outputs = given.first(tensors)
        ctx.given = given
        saved = map(results.get, GRADIENTS) if given.together else (*tensors, *map(results.get, SAVED))
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        refuse_double_backward("linear_divergence")
        given: _Call = ctx.given
        if grad is None:
            gradients = NOTHING
        elif given.together:
            gradients = scaled_saved(ctx.saved_tensors, grad, given.direct)
        else:
            pass_key = PassKey(BACKWARD, given.flags, "linear_divergence", given.ranks)
            read = dict(zip((*_TENSORS, *SAVED), ctx.saved_tensors))
            made = for_each(lambda upstream: run_traced(pass_key, read | upstream, given.options), {"grad": grad})
            gradients = [made.get(name) for name in GRADIENTS]
        return None, *gradients[:3], *[None] * (len(_TENSORS) - 3)


def _row_weight(
    hidden: Tensor, mask: Tensor | None, token_weight: Tensor | None, num_items: call.Number | None, reduction: str
) -> Tensor:
    """Returns the weights of rows in the loss, ``[N]``; they are 0 where the mask is 0."""
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
