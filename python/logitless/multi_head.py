"""``logitless.multi_head_linear_cross_entropy``: the losses of several heads, one after the other within one budget.

The operator ``torch.ops.logitless.run_heads`` runs the passes of all heads. Gradients of tensors that several heads use
are added up in float32 as the library makes them, and rounded once.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from . import call
from . import options as _options
from .autograd import (
    _constants,
    _flops,
    _operators,
    _parsed,
    _text,
    _unpacked,
    refuse_double_backward,
    scaled_saved,
)
from .call import Arguments, Prepared, can_run_eagerly, has_dtensor, inputs_of, prepare, seed_tensor
from .errors import InvalidTargetError, UnsupportedError
from .functional import linear_cross_entropy
from .native import NAMESPACE, enough
from .options import HeadOptions, accepts, shape_text
from .outputs import LinearCrossEntropyOutput, result_of
from .passes import ADDED, GRADIENTS, PassKey, results
from .quantized import QuantizedWeight
from .run import Tensors, plan_pass, resolve_options, stats_dtype

__all__ = ["MultiHeadOutput", "multi_head_linear_cross_entropy"]

Weight = Tensor | QuantizedWeight
Factors = Tensor | Sequence[float | Tensor] | nn.ParameterList | None
_FUNCTION = "multi_head_linear_cross_entropy"
# Heads have shifts and biases of their own, and their statistics have no gradient.
MultiHeadOptions = _options.without(HeadOptions, "bias", "shift", "differentiable_stats")


class MultiHeadOutput(NamedTuple):
    """The result of :func:`multi_head_linear_cross_entropy` with ``return_losses`` or ``return_stats``.

    Attributes:
        loss: The weighted sum of the heads' losses, which alone has gradients.
        losses: The loss of each head, ``[H]``.
        stats: A :class:`LinearCrossEntropyOutput` for each head. None unless requested.
    """

    loss: Tensor
    losses: Tensor
    stats: tuple[LinearCrossEntropyOutput, ...] | None = None


@accepts(MultiHeadOptions)
def multi_head_linear_cross_entropy(
    hidden: Tensor,
    weights: Weight | Sequence[Weight],
    targets: Tensor,
    *,
    head_weights: Factors = None,
    shifts: Sequence[int] | None = None,
    biases: Tensor | Sequence[Tensor | None] | None = None,
    return_losses: bool = False,
    return_stats: bool | Sequence[str] = False,
    **options: Any,
) -> Tensor | MultiHeadOutput:
    """Computes the weighted sum of the cross entropies of H heads, as :func:`linear_cross_entropy` does for one.

    Heads run one after the other. So the memory beyond inputs, outputs and gradients is that of the largest head, and
    the budget bounds each one. A gradient that heads share is added up in float32 and rounded once. For 16-bit tensors
    that sum takes 4 bytes an element until then.

    Args:
        hidden: Hidden states that all heads read, ``[..., D]``, or those of each head, ``[H, ..., D]``.
        weights: A weight ``[V, D]`` that all heads share, or a sequence of H weights. Their V may differ. The same
            tensor may occur several times.
        targets: Class indices of each head, ``[H, ...]``. With ``shifts`` they are given once for all heads, ``[...]``.
        head_weights: Factors of the heads' losses: H numbers or tensors of one element, or a tensor ``[H]``. Tensors
            may be learned. None means 1.
        shifts: Head h predicts the token ``shifts[h]`` positions later. ``range(1, H + 1)`` is multi-token prediction,
            and ``[0] * H`` gives all heads the same targets.
        biases: A bias ``[V]`` for all heads, or a sequence of H biases or None.
        return_losses: Whether the losses of the heads are returned as well, without gradients.
        return_stats: As in :func:`linear_cross_entropy`, for each head. They have no gradients.
        **options: Those of :func:`linear_cross_entropy` without ``bias``, ``shift`` and ``differentiable_stats``. A
            list or tuple has a value for each head. Tensors with a value for each row have the shape of the rows, or
            ``[H, ...]``. The reduction is ``"mean"``, in which each head divides by its own count, or ``"sum"``.

    Returns:
        The sum, or with ``return_losses`` or ``return_stats`` a :class:`MultiHeadOutput`. A head without any target has
            the loss 0 and no gradient, as a batch may lack the labels of one task. (:func:`linear_cross_entropy` has
            NaN.)

    Raises:
        TypeError, ValueError, NotImplementedError: As in :func:`linear_cross_entropy`.
        BudgetTooSmallError: A head does not fit; ``required_bytes`` is enough for all heads.
        UnsupportedError: A tensor is a DTensor.

    Gradients come with the losses, in 3 products for each head. They come later where they do so in
    :func:`linear_cross_entropy` (``main_grad``, float16), or where a number is learned or a weight is quantised. Each
    head then is a call of its own, which rounds its gradients. Those of shared hidden states are added in float32, and
    others by autograd in the tensor's dtype.
    """
    _options.check_names(_FUNCTION, options, _options.names_of(MultiHeadOptions))
    check_reduction(options.get("reduction", "mean"))
    _options.flag("return_losses", return_losses)
    heads = _Heads(hidden, weights, targets, shifts, biases, return_stats, options)
    factors = _checked_factors(head_weights, hidden, heads.count)
    loss, losses, each = heads.results(factors)
    if not return_losses and return_stats is False:
        return loss
    if return_stats is False:
        return MultiHeadOutput(loss, losses)
    stats = tuple(out._replace(loss=own) for out, own in zip(each, losses.unbind()))
    return MultiHeadOutput(loss, losses, stats)


def check_factors(given: Any, count: int | None) -> None:
    """Checks head_weights except the ranges of numbers."""
    if isinstance(given, Tensor):
        call.check_real("head_weights", given)
        if given.dim() != 1 or given.shape[0] != (given.shape[0] if count is None else count):
            expected = shape_text(("H" if count is None else count,))
            raise ValueError(
                f"head_weights: expected shape {expected}, one for each head, got {shape_text(given.shape)}"
            )
    elif isinstance(given, (Sequence, nn.ParameterList)):
        _check_count("head_weights", given, count)
    else:
        raise TypeError(f"head_weights: expected a tensor or a sequence of numbers, got {type(given).__name__}")


def _checked_factors(given: Factors, hidden: Tensor, count: int) -> Tensor | list[float]:
    given = [1.0] * count if given is None else given
    if isinstance(given, Tensor):
        call.check_tensor("head_weights", given)
    check_factors(given, count)
    if isinstance(given, Tensor):
        call.check_devices(hidden.device, {"head_weights": given})
        return given
    stats = stats_dtype(hidden)
    each = [_factor(f"head_weights[{head}]", one, stats) for head, one in enumerate(given)]
    if not any(isinstance(one, Tensor) for one in each):
        return each
    tensors = [one if isinstance(one, Tensor) else torch.tensor(one, dtype=stats) for one in each]
    return torch.stack([one.to(hidden.device, stats) for one in tensors])  # each tensor gets its gradient


def _factor(name: str, given: Any, stats: torch.dtype) -> Any:
    if isinstance(given, Tensor):
        return call.scalar(name, given, learned=True)
    number = _options.number(name, given)
    if not torch.compiler.is_compiling() and torch.finfo(stats).max < abs(number) < math.inf:
        raise ValueError(f"{name}: expected a number of {stats}'s range, got {number}")
    return number


def check_reduction(given: Any) -> None:
    if not isinstance(given, str) or given not in ("mean", "sum"):
        raise ValueError(f'reduction: expected "mean" or "sum" of several heads, got {given!r}')


def _check_count(name: str, given: Any, count: int | None) -> None:
    """count: the number of heads; None where the call says it."""
    if count is not None and len(given) != count:
        raise ValueError(f"{name}: expected {count}, one for each head, got {len(given)}")


def checked_shifts(given: Any, count: int | None) -> list[int]:
    if not isinstance(given, Sequence):
        raise TypeError(f"shifts: expected a sequence of integers, got {type(given).__name__}")
    if not given:
        raise ValueError("shifts: expected at least one head, got none")
    _check_count("shifts", given, count)
    shifts = [_options.integer(f"shifts[{head}]", shift) for head, shift in enumerate(given)]
    for head, shift in enumerate(shifts):
        if shift < 0:
            raise ValueError(f"shifts[{head}]: expected an integer >= 0, got {shift}")
    return shifts


def _sum(losses: Tensor, factors: Tensor | list[float]) -> Tensor:
    """Returns the weighted sum of losses ``[H]``."""
    if isinstance(factors, Tensor):
        return (losses * factors.to(losses.dtype)).sum()
    return torch.stack([loss * factor for loss, factor in zip(losses.unbind(), factors)]).sum()


def _of_each(name: str, value: Any, count: int) -> list[Any]:
    """Returns an argument of each head. A list or tuple has one for each."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name}: expected one value, or {count} of the heads, got {len(value)}")
    return list(value)


def _names(name: str, given: Any, count: int) -> list[str]:
    return [f"{name}[{head}]" if isinstance(given, (list, tuple)) else name for head in range(count)]


def _check_matrices(hidden: Tensor, weight: Weight, bias: Any, weight_name: str, bias_name: str) -> None:
    """Checks a head by the caller's names. Its hidden states are those that other heads fit, so they are right."""
    if isinstance(weight, Tensor):
        call.check_tensor(weight_name, weight)
    if len(weight.shape) != 2 or weight.shape[1] != hidden.shape[-1]:
        expected = f"[V, {hidden.shape[-1]}], of hidden's last dimension"
        raise ValueError(f"{weight_name}: expected shape {expected}, got {shape_text(weight.shape)}")
    if bias is not None:
        call.check_tensor(bias_name, bias)
        call.check_shape(bias_name, bias, weight.shape[:1], "V")


class _Heads:
    """The checked shapes of a call, and the arguments of each head."""

    def __init__(
        self,
        hidden: Tensor,
        weights: Weight | Sequence[Weight],
        targets: Tensor,
        shifts: Sequence[int] | None,
        biases: Tensor | Sequence[Tensor | None] | None,
        return_stats: bool | Sequence[str],
        options: dict[str, Any],
    ) -> None:
        several = options.get("target_weight") is not None
        call.check_tensor("targets", targets)
        count = self._count(weights, targets, shifts)
        self.shifts = [0] * count if shifts is None else checked_shifts(shifts, count)
        self.own_targets = shifts is None
        every = (hidden, targets, *(t for t in (weights, biases, *options.values()) if isinstance(t, Tensor)))
        every += tuple(t for given in (weights, biases) if isinstance(given, (list, tuple)) for t in given)
        if has_dtensor(every):
            raise UnsupportedError(
                "weights: expected plain tensors, got a DTensor among the arguments; "
                "call logitless.linear_cross_entropy for each head"
            )
        call.check_tensor("hidden", hidden)
        rows = targets.shape[(shifts is None) : targets.dim() - several]
        if not rows:
            raise ValueError(
                f"targets: expected shape [H, ..., N] (or [..., N] with shifts), got {shape_text(targets.shape)}"
            )
        if shifts is None and targets.shape[0] != count:
            raise ValueError(
                f"targets: expected shape {shape_text((count, '...'))} (one part for each of weights; targets that are "
                f"given once need shifts), got {shape_text(targets.shape)}"
            )
        if hidden.shape[:-1] not in (rows, (count, *rows)):
            raise ValueError(
                f"hidden: expected shape {shape_text((*rows, 'D'))} or {shape_text((count, *rows, 'D'))}, as targets "
                f"are, got {shape_text(hidden.shape)}"
            )
        self.hidden, self.count, self.rows = hidden, count, rows
        self.has_own_states = hidden.shape[:-1] != rows
        self.weights, self.biases = _of_each("weights", weights, count), _of_each("biases", biases, count)
        of_weights, of_biases = _names("weights", weights, count), _names("biases", biases, count)
        for weight, bias, *names in zip(self.weights, self.biases, of_weights, of_biases, strict=True):
            _check_matrices(hidden, weight, bias, *names)
        if torch.is_autocast_enabled(hidden.device.type):
            self._cast()
        self.targets = [targets] * count if shifts is not None else targets.unbind()
        given = {name: self._of_rows(name, value) for name, value in options.items()}
        each = {name: _of_each(name, value, count) for name, value in given.items()}
        each |= {"bias": self.biases, "shift": self.shifts}
        self.options = [dict(zip(each, values)) for values in zip(*each.values())]
        self.return_stats = return_stats

    @staticmethod
    def _count(weights: Any, targets: Any, shifts: Any) -> int:
        listed = isinstance(weights, (list, tuple))
        for weight in weights if listed else [weights]:
            if not isinstance(weight, (Tensor, QuantizedWeight)):
                raise TypeError(f"weights: expected a tensor or a sequence of tensors, got {type(weight).__name__}")
        if not listed and shifts is not None:
            return len(checked_shifts(shifts, None))
        name, count = ("weights", len(weights)) if listed else ("targets", (*targets.shape, 0)[0])
        if count == 0:
            raise ValueError(f"{name}: expected at least one head, got none")
        return count

    def _cast(self) -> None:
        """Casts for autocast once, so that a tensor that heads share stays one."""
        made: dict[int, Any] = {}
        hidden = self.hidden
        for weight in self.weights:
            if isinstance(weight, Tensor) and id(weight) not in made:
                (self.hidden, made[id(weight)]), _ = call.cast_by_autocast(hidden, weight)
        self.weights = [made.get(id(weight), weight) for weight in self.weights]

    def _of_rows(self, name: str, value: Any) -> Any:
        """Returns tensors with a value for each row of each head as one for each head."""
        if not isinstance(value, Tensor) or name == "main_grad":
            return value
        several = name == "target_weight"
        whole = self.own_targets and value.dim() > 0 if several else value.shape == (self.count, *self.rows)
        return list(value.unbind()) if whole else value

    def _of_head(self, head: int, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Calls a function of one head. Its errors then name the head."""
        if torch.compiler.is_compiling():
            return function(*given, **options)
        try:
            return function(*given, **options)
        except InvalidTargetError as error:
            raise _named_target(error, head, self.targets[head].shape, self.own_targets) from None
        except (TypeError, ValueError, NotImplementedError) as error:
            error.args = (f"{error} (head {head})", *error.args[1:])
            raise

    def results(self, factors: Tensor | list[float]) -> tuple[Tensor, Tensor, list[Any]]:
        """Returns the sum, the losses ``[H]``, and the results of linear_cross_entropy of each head."""
        states = self.hidden.unbind() if self.has_own_states else [self.hidden] * self.count
        heads = list(zip(states, self.weights, self.targets, self.options, strict=True))
        if not any(isinstance(weight, QuantizedWeight) for weight in self.weights):
            arguments = [self._arguments(*given) for given in heads]
            plain = all([can_run_eagerly(a) for a in arguments])
            prepared = [self._of_head(head, prepare, a, plain=plain) for head, a in enumerate(arguments)]
            calls = [one.call for one in prepared]
            apart = any(one.draw_stats or any(one.trained[3:]) for one in calls)
            if (
                any(one.together for one in calls)
                and all(one.together or not one.trains for one in calls)
                and not apart
            ):
                return self._together(prepared, factors)
        if not self.has_own_states and self.hidden.dtype.itemsize == 2:
            heads = [(term, *rest) for term, (_, *rest) in zip(_summed_in_float32(self.hidden, self.count), heads)]
        calls = [
            functools.partial(self._of_head, head, linear_cross_entropy, *given, **options, **self._stats())
            for head, (*given, options) in enumerate(heads)
        ]
        each = [run() for run in calls] if torch.compiler.is_compiling() else enough(*calls)
        losses = torch.stack([out if isinstance(out, Tensor) else out.loss for out in each])
        losses = self.counted(losses)
        return _sum(losses, factors), losses.detach().clone(), each

    def _stats(self) -> dict[str, Any]:
        return {"return_stats": self.return_stats, "differentiable_stats": False}

    def _arguments(self, hidden: Tensor, weight: Tensor, targets: Tensor, options: dict[str, Any]) -> Arguments:
        a = Arguments(hidden, weight, targets, **options, **self._stats())
        return call.with_row_temperature(a, hidden.shape[:-1])

    def counted(self, losses: Tensor) -> Tensor:
        """Returns losses ``[H]`` with 0 for heads that have no target at all, whose mean is NaN."""
        if self.options[0].get("reduction") == "sum":
            return losses
        seen = []
        for targets, shift, options in zip(self.targets, self.shifts, self.options):
            has = targets != _options.target_of_none(options.get("ignore_index"))
            if has.dim() > len(self.rows):
                has = has.any(-1)
            seen.append(has[..., max(shift, 0) :].any())
        return torch.where(torch.stack(seen), losses, 0.0)

    def _together(self, prepared: list[Prepared], factors: Tensor | list[float]) -> tuple[Tensor, Tensor, list[Any]]:
        hidden = self.hidden.flatten(1, -2) if self.has_own_states else self.hidden.flatten(0, -2)
        leaves: list[Tensor] = [hidden]
        places: list[int] = []
        for one in prepared:
            places.append(0 if one.call.trained.hidden else -1)
            for leaf, wanted in zip((one.a.weight, one.a.bias), one.call.trained[1:3]):
                place = next((i for i, known in enumerate(leaves) if i > 0 and leaf is known), len(leaves))
                if wanted and leaf is not None and place == len(leaves):
                    leaves.append(leaf)
                places.append(place if wanted else -1)
        given = _Given(self, prepared, factors, places)
        learned = factors if isinstance(factors, Tensor) else None
        loss, losses, *rest = _Function.apply(given, learned, *leaves)  # type: ignore[no-untyped-call]
        each, stats = [], iter(rest)
        for one, own in zip(prepared, losses.unbind()):
            outputs = {"loss": own} | {name: next(stats) for name in one.call.outputs[1:]}
            each.append(result_of(one, outputs))
        return loss, losses, each


# ---- the operator


class _Pass(NamedTuple):
    """A head's pass without its hidden states."""

    key: PassKey
    read: Tensors
    options: Mapping[str, Any]

    def with_states(self, hidden: Tensor, head: int) -> Tensors:
        return {"hidden": hidden[head] if hidden.dim() == 3 else hidden, **self.read}

    def outputs(self, hidden: Tensor) -> list[str]:
        """Returns the names of results that are no gradients."""
        made = results(self.key, self.with_states(hidden, 0), self.options)
        return [name for name in made if name not in GRADIENTS]


def _named_target(error: InvalidTargetError, head: int, shape: Sequence[int], own: bool) -> InvalidTargetError:
    """Returns the error of a head with the target's place among those of all heads. own: whether heads have theirs."""
    if not own:
        return error
    error.row = (error.row or 0) + head * math.prod(shape)
    return _options.named_target(error, (head + 1, *shape))


def _run_heads(
    hidden: Tensor, heads: Sequence[_Pass], places: Sequence[int], own_targets: bool
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Returns the outputs of all heads, and gradients by place. places: of hidden, weight and bias of each head."""
    uses, stats, has_own_states = collections.Counter(places), stats_dtype(hidden), hidden.dim() == 3
    likes: dict[int, Tensor] = {}
    plans, reads, placed = [], [], []
    for head, one in enumerate(heads):
        read = one.with_states(hidden, head)
        of_head = {name: place for name, place in zip(ADDED, places[3 * head : 3 * head + 3]) if place >= 0}
        for name, place in of_head.items():
            if uses[place] > 1 and not (name == "d_hidden" and has_own_states):
                like = read[name.removeprefix("d_")]
                if place in likes or like.dtype != stats:  # the library adds to a sum, whose layout this has
                    read[name] = torch.empty(like.shape, dtype=stats, device="meta")
                likes[place] = like
        plans.append(functools.partial(plan_pass, one.key, read, dict(one.options)))
        reads.append(read)
        placed.append(of_head)
    runs = enough(*plans)
    outputs: list[Tensor] = []
    gradients: dict[int, Tensor] = {}
    if has_own_states and 0 in uses:
        gradients[0] = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    for head, (one, read, of_head, run) in enumerate(zip(heads, reads, placed, runs)):
        for name, place in of_head.items():
            if name in read:
                if place not in gradients:
                    gradients[place] = torch.zeros(read[name].shape, dtype=stats, device=hidden.device)
                read[name] = gradients[place]
        try:
            made = run(read)
        except InvalidTargetError as error:
            raise _named_target(error, head, read["targets"].shape, own_targets) from None
        outputs += [made[name] for name in one.outputs(hidden)]
        for name, place in of_head.items():
            if name == "d_hidden" and has_own_states:
                gradients[place][head].copy_(made.pop(name))
            elif name in made:
                gradients[place] = made.pop(name)
    for place, like in likes.items():
        gradients[place] = gradients[place].to(like.dtype)
    return outputs, gradients


_SCHEMA = (
    "(Tensor hidden, Tensor[] tensors, float[] numbers, SymInt[] integers, str[] texts, int[] places, bool own_targets)"
    " -> Tensor[]"
)


def _read(
    tensors: Sequence[Tensor], numbers: Sequence[float], integers: Sequence[Any], texts: Sequence[str], resolve: Any
) -> list[_Pass]:
    """Returns the passes of an operator's arguments."""
    heads, start, reals, whole = [], 0, len(numbers) // len(texts), len(integers) // len(texts)
    for head, text in enumerate(texts):
        end = start + len(_parsed(text)[2])
        own = numbers[head * reals :][:reals], integers[head * whole :][:whole]
        key, given, options = _unpacked(tensors[start:end], *own, text)
        heads.append(_Pass(key, given, resolve(given, options)))
        start = end
    return heads


@torch.library.custom_op(f"{NAMESPACE}::run_heads", mutates_args=(), schema=_SCHEMA)
def run_heads(
    hidden: Tensor,
    tensors: list[Tensor],
    numbers: Any,
    integers: Any,
    texts: list[str],
    places: list[int],
    own_targets: bool,
) -> list[Tensor]:
    def resolve(given: Tensors, options: dict[str, Any]) -> dict[str, Any]:
        return resolve_options({"hidden": hidden, **given}, options)

    heads = _read(tensors, numbers, integers, texts, resolve)
    outputs, gradients = _run_heads(hidden, heads, places, own_targets)
    return outputs + [gradients[place] for place in sorted(gradients)]


@run_heads.register_fake
def _(
    hidden: Tensor, tensors: list[Tensor], numbers: Any, integers: Any, texts: list[str], places: list[int], _: bool
) -> list[Tensor]:
    outputs, gradients = [], {0: hidden} if 0 in places else {}
    for head, one in enumerate(_read(tensors, numbers, integers, texts, lambda _, options: options)):
        read = one.with_states(hidden, head)
        made = results(one.key, read, one.options)
        outputs += [
            hidden.new_empty(made[name].shape, dtype=getattr(torch, made[name].dtype)) for name in one.outputs(hidden)
        ]
        of_head = zip(("weight", "bias"), places[3 * head + 1 : 3 * head + 3])
        gradients |= {place: read[name] for name, place in of_head if place >= 0}
    likes = [gradients[place] for place in sorted(gradients)]
    return outputs + [torch.empty_like(like, memory_format=torch.contiguous_format) for like in likes]


@register_flop_formula(_operators.run_heads)
def _(hidden: Any, tensors: Any, numbers: Any, integers: Any, texts: Any, *_: Any, **__: Any) -> int:
    total, start = 0, 0
    for text in texts:
        end = start + len(_parsed(text)[2])
        total += _flops([hidden[-2:], *tensors[start:end]], text)
        start = end
    return total


# ---- autograd


class _Total(torch.autograd.Function):
    """Makes a float32 tensor without memory. Its gradient, the sum of those of _Term, is rounded to a tensor's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.dtype = tensor.dtype
        return tensor.new_zeros((), dtype=torch.float32).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.to(ctx.dtype)


class _Term(torch.autograd.Function):
    """Returns a constant tensor, whose gradient goes to a _Total."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, total: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient.float()


def _summed_in_float32(tensor: Tensor, count: int) -> list[Tensor]:
    """Returns a 16-bit tensor several times. Its gradient is their sum, which autograd adds up one after the other."""
    total = _Total.apply(tensor)  # type: ignore[no-untyped-call]
    return [_Term.apply(tensor.detach(), total) for _ in range(count)]  # type: ignore[no-untyped-call]


class _Given(NamedTuple):
    """A prepared call. places: of the gradients of hidden, weight and bias of each head, as in _run_heads()."""

    heads: _Heads
    prepared: list[Prepared]
    factors: Tensor | list[float]
    places: list[int]

    def run(self, hidden: Tensor, direct: bool) -> tuple[list[Tensors], dict[int, Tensor]]:
        """Returns the outputs of each head by name, and gradients by place."""
        passes = [self._pass(head, direct) for head in range(len(self.prepared))]
        run = _run_heads if direct else self._traced
        outputs, gradients = run(hidden, passes, self.places, self.heads.own_targets)
        values = iter(outputs)
        return [{name: next(values) for name in one.outputs(hidden)} for one in passes], gradients

    @staticmethod
    def _traced(
        hidden: Tensor, passes: Sequence[_Pass], places: list[int], own_targets: bool
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """As _run_heads(), through the operator."""
        texts = [_text(one.key, one.options, one.read) for one in passes]
        numbers = [number for one in passes for number in one.options["numbers"]]
        integers = [i for one in passes for i in (*(one.options[name] for name in _options.INTEGERS), -1, -1)]
        tensors = [tensor for one in passes for tensor in one.read.values()]
        made = _operators.run_heads.default(hidden, tensors, numbers, integers, texts, places, own_targets)
        wanted = sorted({place for place in places if place >= 0})
        outputs = made[: len(made) - len(wanted)]
        return outputs, dict(zip(wanted, made[len(outputs) :]))

    def _pass(self, head: int, direct: bool) -> _Pass:
        one = self.prepared[head]
        factor: Any = self.factors[head]
        a, prepared = one.a, one.call
        read, options = inputs_of(a, one.learned, prepared.trained), prepared.options
        del read["hidden"]
        if not direct:
            options, numbers = prepared.packed
            read |= {} if numbers is None else {"numbers": numbers}
        if prepared.draws:
            read["seed"] = seed_tensor(a.seed, a.hidden.device)
        if prepared.together and isinstance(factor, Tensor):
            read["grad_loss"] = factor.to(stats_dtype(a.hidden))
        elif prepared.together and factor != 1:
            read["grad_loss"] = torch.full((), factor, dtype=stats_dtype(a.hidden), device=a.hidden.device)
        return _Pass(prepared.pass_key, _constants(read), options)


class _Function(torch.autograd.Function):
    """All heads, with their gradients."""

    @staticmethod
    def forward(ctx: Any, given: _Given, head_weights: Tensor | None, *leaves: Tensor) -> Any:
        ctx.direct = all(one.direct for one in given.prepared)
        of_heads, gradients = given.run(leaves[0].detach(), ctx.direct)
        losses = given.heads.counted(torch.stack([made["loss"] for made in of_heads]))
        stats = [made[name] for one, made in zip(given.prepared, of_heads) for name in one.call.outputs[1:]]
        ctx.dtype = None if head_weights is None else head_weights.dtype
        saved = None if head_weights is None else losses.clone()  # the caller may change losses in place
        ctx.save_for_backward(saved, *map(gradients.get, range(len(leaves))))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(losses, *stats)
        return (_sum(losses, given.factors), losses, *stats)

    @staticmethod
    def backward(ctx: Any, loss: Tensor | None, *_: Any) -> Any:
        refuse_double_backward(_FUNCTION)
        losses, *gradients = ctx.saved_tensors
        if loss is None:
            return None, None, *[None] * len(gradients)
        scaled = scaled_saved((*gradients, None, None), loss, ctx.direct)[:-2]
        return None, None if losses is None else (losses * loss).to(ctx.dtype), *scaled
