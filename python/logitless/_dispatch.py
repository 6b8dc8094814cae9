"""Which passes compute a loss: gradients together with it, or after it, once the upstream gradients are known."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _arguments, _c, _numbers, _ops, _options, _stats
from ._arguments import Arguments, Learned
from ._flags import Flags, Wants
from ._stats import DRAW_STATS
from ._torch import RESULTS, Inputs


class Choice(NamedTuple):
    """Of passes."""

    trained: Wants  # whose gradients are wanted
    pass_: int  # the first: FORWARD, or FORWARD_BACKWARD
    flags: Flags  # of that pass, with the gradients that it makes or that its backward pass will be asked for
    draws: bool  # whether it reads the seed
    draw_stats: bool  # whether the statistics of the draw want a pass of their own
    passes_over_draw: bool  # whether a draw is left out that a pass with gradients would make


def grad_mode() -> bool:
    """Whether gradients can be asked for later. Compiled code runs under no inference mode, and cannot ask for it."""
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return torch.is_grad_enabled() and not inference


def choose(a: Arguments, learned: Learned, names: tuple[str, ...]) -> Choice:
    """names: the statistics asked for."""
    tensors = (a.input, a.linear_weight, a.linear_bias, *learned)
    require = [t is not None and t.requires_grad for t in tensors]
    grad = grad_mode()
    trained = Wants(*(grad and wanted for wanted in require))
    half = any(on and t is not None and t.dtype == torch.float16 for t, on in zip(tensors[:3], trained))
    stats_need_gradients = a.differentiable_stats and any(name in _stats.DIFFERENTIABLE for name in names)
    later = a.reduction == "none" or a.main_grad is not None or half or stats_need_gradients
    thinned = a.gradient != "exact"
    want_draw_stats = any(name in DRAW_STATS for name in names)
    stats = (*names, "argmax") if "correct_count" in names else names
    flags = Flags(want_counts=any(name in _stats.COUNTS for name in names), stats=_stats.of_rows(stats))
    if any(trained) and not later:
        flags = flags.with_gradients(trained)._replace(want_draw_stats=want_draw_stats)
        return Choice(trained, _c.FORWARD_BACKWARD, flags, thinned, False, False)
    keeps_draws = thinned and any(trained)
    if any(trained):
        flags = flags._replace(stats=_stats.of_rows((*stats, "lse")), keeps_draws=keeps_draws)  # lse is read later
        flags = flags.with_gradients(trained)
    passes_over = thinned and any(require) and not keeps_draws and not want_draw_stats
    return Choice(trained, _c.FORWARD, flags, keeps_draws, want_draw_stats, passes_over)


def with_seed(a: Arguments, inputs: Inputs) -> Inputs:
    return inputs._replace(seed=_arguments.seed_tensor(a.seed, inputs.hidden.device))


def pass_over_draw(a: Arguments) -> None:
    """Moves the generator on as a draw does.

    The first pass of ``checkpoint(use_reentrant=True)`` is without gradients, and its second one leaves the generator
    where the first has left it: else every step would draw from the same seed.
    """
    if a.seed is None or isinstance(a.seed, torch.Generator):
        _arguments.seed_tensor(a.seed, a.input.device)


DRAW_FLAGS = Flags(want_d_hidden=True, want_draw_stats=True)


def of_draw(inputs: Inputs, options: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
    """The problem whose gradient, which is left out, has the statistics of the draw: where no gradient is made in the
    forward pass."""
    inputs = inputs._replace(scale=None, temperature=None)
    constants = [None if tensor is None else tensor.detach() for tensor in inputs]
    if options["reduction"] == "none":
        options = options | {"reduction": "sum"}
    return Inputs(*constants), options  # type: ignore[arg-type]


def by_operators(a: Arguments) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """What a call finds, by the names of RESULTS, and the statistics asked for; of traceable code, which a compiled
    graph runs as it is."""
    _arguments.check_head(a)
    a = _arguments.autocast(a)
    _arguments.check_rest(a)
    learned = _arguments.learned(a)
    names = _options.stats_names(a.return_stats, a.gradient, a.has_several_targets())
    a = _arguments.without_number_tensors(a)
    options = _arguments.options_of(a)
    choice = choose(a, learned, names)
    inputs = _arguments.inputs_of(a, learned.wanted(choice.trained))
    options, numbers = _numbers.split(options, choice.flags.keeps_draws)
    if numbers is not None:
        inputs = inputs._replace(numbers=numbers)
    drawn = with_seed(a, inputs) if choice.draws or choice.draw_stats else inputs
    given = drawn if choice.draws else inputs
    if choice.passes_over_draw:
        pass_over_draw(a)
    if choice.pass_ == _c.FORWARD_BACKWARD:
        output = _ops.forward_backward(*given, **options, flags=choice.flags.packed())
    else:
        main_grad = a.main_grad if choice.trained.weight else None
        output = _ops.forward(*given, main_grad, **options, flags=choice.flags.packed())
    found = dict(zip(RESULTS[choice.pass_], output))
    if choice.draw_stats:
        constants, options = of_draw(drawn, options)
        output = _ops.forward_backward(*constants, **options, flags=DRAW_FLAGS.packed())
        stats = dict(zip(RESULTS[_c.FORWARD_BACKWARD], output))
        found |= {name: stats[name] for name in DRAW_STATS}
    return found, names
