"""Calls that nothing watches: the runs and formulas of the operators without PyTorch's dispatcher.

What a call does depends on its options and on the layouts of its tensors, not on data: it is found by one key, checked
and planned where the key is new.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _arguments, _c, _modes, _numbers, _options, _run, _stats
from ._arguments import FIRST_OPTION, TENSORS, Arguments, Learned
from ._autograd import backward_of_forward, backward_of_forward_backward, save_forward, save_gradients
from ._cache import Cache
from ._dispatch import DRAW_FLAGS, by_operators, choose, of_draw, pass_over_draw, with_seed
from ._flags import Wants
from ._overlap import check_own_memory
from ._saved import SAVED
from ._stats import DRAW_STATS
from ._torch import GRADIENTS, Inputs, read_as_they_are, readable

Found = dict[str, Tensor]  # by the names of RESULTS

_PASS_NAMES = {_c.FORWARD: "logitless::forward", _c.FORWARD_BACKWARD: "logitless::forward_backward"}
# Outputs of the autograd functions: the loss, and what is asked for of these.
_CONSTANT = (*_stats.CONSTANT, "counts", *DRAW_STATS)


class _Call:
    """What calls of one key do. Made with the first one's arguments, cast and checked."""

    def __init__(self, a: Arguments, learned: Learned) -> None:
        _arguments.check_rest(a)
        self.names = _options.stats_names(a.return_stats, a.gradient, a.has_several_targets())
        self.resolved = _arguments.options_of(a)
        self.choice = choice = choose(a, learned, self.names)
        if choice.trained.scale:
            _numbers.check_learned_scale(self.resolved["scale"])
        if choice.trained.temperature:
            _numbers.check_learned_temperature(self.resolved["softcap"])
        self.options, _ = _numbers.split(self.resolved, choice.flags.keeps_draws)  # as the operators take them
        self.trains = any(choice.trained)
        self.together = choice.pass_ == _c.FORWARD_BACKWARD
        asked = (*self.names, *(("counts",) if choice.flags.want_counts else ()))
        self.outputs = ("loss", *(name for name in (*_stats.DIFFERENTIABLE, *_CONSTANT) if name in asked))
        self._constant = [name for name in self.outputs[1:] if self.together or name in _CONSTANT]
        self._run: _run.Run | None = None
        self._names: tuple[str, ...] | None = None  # of inputs that the library reads as they are
        self._reads_arguments = False  # whether those are the first arguments themselves, and all that is read

    def __call__(self, a: Arguments, learned: Learned) -> Found:
        """The first pass."""
        if self._reads_arguments:
            return self._found(dict(zip(self._names, a)))  # type: ignore[arg-type]
        return self.with_inputs(a, learned)[1]

    def with_inputs(self, a: Arguments, learned: Learned) -> tuple[Inputs, Found]:
        """The same, and what a backward pass reads."""
        choice = self.choice
        inputs = _arguments.inputs_of(a, learned.wanted(choice.trained))
        drawn = with_seed(a, inputs) if choice.draws or choice.draw_stats else inputs
        if choice.draws:
            inputs = drawn
        elif choice.passes_over_draw:
            pass_over_draw(a)
        if self._names is None:
            tensors = readable(inputs, self.resolved["num_items"])
            self._names = read_as_they_are(inputs, tensors)
            if self._names is not None and not (choice.draws or choice.draw_stats or choice.passes_over_draw):
                self._reads_arguments = all(given is read for given, read in zip(a, inputs[: len(self._names)]))
        else:
            tensors = dict(zip(self._names, inputs))  # type: ignore[arg-type]
        if a.main_grad is not None and choice.trained.weight:
            check_own_memory(a.main_grad, inputs)
        found = self._found(tensors, a.main_grad)
        if choice.draw_stats:
            constants, options = of_draw(drawn, self.options)
            stats = _run.run(_c.FORWARD_BACKWARD, constants, options, DRAW_FLAGS)
            found |= {name: stats[name] for name in DRAW_STATS}
        return inputs, found

    def _found(self, tensors: _run.Tensors, main_grad: Tensor | None = None) -> Found:
        if self._run is None:
            choice = self.choice
            if choice.pass_ == _c.FORWARD:
                self._run = _run.find_forward(tensors, self.resolved, choice.flags, main_grad)
            else:
                self._run = _run.find(choice.pass_, tensors, self.resolved, choice.flags)
        if torch._C._autograd._profiler_enabled():
            with torch.profiler.record_function(_PASS_NAMES[self.choice.pass_]):
                return self._run(tensors)
        return self._run(tensors)

    def returned(self, ctx: Any, found: Found) -> tuple[Tensor, ...]:
        """The outputs of an autograd function."""
        if self._constant:
            ctx.mark_non_differentiable(*[found[name] for name in self._constant])
        return tuple([found[name] for name in self.outputs])


def _like(d_input: Tensor | None, shape: torch.Size) -> Tensor | None:
    """The gradient of input from that of its rows."""
    return d_input if d_input is None or len(shape) == 2 else d_input.reshape(shape)


class LinearCrossEntropy(torch.autograd.Function):
    """Gradients are made together with the loss."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *_, scale, temperature, call, a = args
        found = call(a, Learned(scale, temperature))
        save_gradients(ctx, scale, temperature, map(found.get, GRADIENTS))
        ctx.shape = a.input.shape
        return call.returned(ctx, found)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        d_input, *others = backward_of_forward_backward(ctx, upstream[0])
        return _like(d_input, ctx.shape), *others, None, None


class LinearCrossEntropyForward(torch.autograd.Function):
    """Gradients are made in the backward pass."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *_, scale, temperature, call, a = args
        inputs, found = call.with_inputs(a, Learned(scale, temperature))
        saved = [found.get(name) for name in SAVED]
        save_forward(ctx, inputs, a.main_grad, call.options, saved)
        ctx.shape, ctx.call = a.input.shape, call
        return call.returned(ctx, found)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        call = ctx.call
        given = {name: gradient for name, gradient in zip(call.outputs, upstream) if name not in _CONSTANT}
        wants = Wants(*ctx.needs_input_grad[: len(GRADIENTS)])
        d_input, *others = backward_of_forward(ctx, wants, given, call.resolved)
        return _like(d_input, ctx.shape), *others, None, None


# Beyond this, PyTorch's apply only looks for transforms of torch.func and for tensors of some that ended: suits() has.
_apply_together: Any = super(torch.autograd.Function, LinearCrossEntropy).apply
_apply_forward: Any = super(torch.autograd.Function, LinearCrossEntropyForward).apply


def _tensors(a: Arguments) -> tuple[Tensor | None, ...]:
    return a[:TENSORS]  # type: ignore[return-value]


def _key(a: Arguments, learned: Learned, types: tuple[type, ...]) -> tuple[Any, ...]:
    """All that what a call does depends on. types: of the options, as equal ones of other types may be refused."""
    num_items = a.num_items
    return (
        *[None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in _tensors(a)],
        None if num_items is None else (type(num_items), isinstance(num_items, Tensor) or num_items),
        a.seed is None,
        a[FIRST_OPTION:],
        types,
        learned.scale is not None and learned.scale.requires_grad,
        learned.temperature is not None and learned.temperature.requires_grad,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        _run.place(a.input, a.linear_weight),
    )


_calls: Cache[Any, _Call] = Cache(256)
_SIMPLE = frozenset((type(None), bool, int, float, str, tuple))


_INTEGERS = ("ignore_index", "shift", "max_workspace_bytes")
_NUMBERS = ("label_smoothing", "scale", "softcap", "temperature", "z_loss", "threshold")


def _plain(value: Any) -> Any:
    """What is like a number, and may change, as a number; else as it is."""
    if type(value) in _SIMPLE:
        return value
    if hasattr(type(value), "__index__"):
        return operator.index(value)
    return float(value) if hasattr(type(value), "__float__") else value


def _simplified(a: Arguments) -> Arguments:
    """Options that are tensors as numbers, and such that can be a key."""
    a = _arguments.without_number_tensors(a)
    a = a._replace(**{name: _plain(getattr(a, name)) for name in (*_INTEGERS, *_NUMBERS)})
    if isinstance(a.return_stats, Sequence) and not isinstance(a.return_stats, str):
        a = a._replace(return_stats=tuple(a.return_stats))
    return a


def _with_known_num_items(a: Arguments) -> Arguments:
    """A num_items that the CPU knows is a number."""
    if not isinstance(a.num_items, Tensor) or a.input.is_cuda or a.reduction != "mean":
        return a
    number = _numbers.scalar("num_items", a.num_items).item()
    return a._replace(num_items=_options.checked_num_items(number, a.reduction))


def suits(a: Arguments) -> bool:
    """Whether nothing watches, and the tensors are plain ones."""
    if not _modes.are_off():
        return False
    tensors: tuple[object, ...] = a[:TENSORS]
    if a.num_items is not None or a.seed is not None:
        tensors += tuple(value for value in (a.num_items, a.seed) if isinstance(value, Tensor))
    return _modes.are_plain(tensors)


def without_operators(a: Arguments) -> tuple[Found, tuple[str, ...]]:
    """As by_operators."""
    learned = _arguments.learned(a)
    types = tuple(map(type, a[FIRST_OPTION:]))
    if not _SIMPLE.issuperset(types):
        a = _simplified(a)
        types = tuple(map(type, a[FIRST_OPTION:]))
    if a.num_items is not None:
        if type(a.num_items) not in _SIMPLE and not isinstance(a.num_items, Tensor):
            a = a._replace(num_items=_plain(a.num_items))
        a = _with_known_num_items(a)
    if torch.is_autocast_enabled("cuda" if a.input.is_cuda else "cpu"):
        a = _arguments.autocast(a)
    key = _key(a, learned, types)
    try:
        call = _calls.get(key)
    except TypeError:  # an option that can be no key, and is none: refused by name
        return by_operators(a)
    if call is None:
        _arguments.check_head(a)
        call = _Call(a, learned)
        _calls.put(key, call)
    elif a.seed is not None:
        _arguments.check_seed(a.seed, a.input.device)
    if not call.trains:
        return call(a, learned), call.names
    apply = _apply_together if call.together else _apply_forward
    return dict(zip(call.outputs, apply(a.input, a.linear_weight, a.linear_bias, *learned, call, a))), call.names
