"""The tensors that a pass reads and writes, by the names of tensors.def, and the problem of its plan.

Knows neither PyTorch nor numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import native
from . import options as _options
from .errors import BudgetTooSmallError
from .options import BACKWARD, FORWARD, LSE, Flags, Wants, name_of

GRADIENTS = ("d_hidden", "d_weight", "d_bias", "d_scale", "d_temperature")
ADDED = GRADIENTS[:3]  # a run adds to those that it is given, in float32 or float64


class PassKey(NamedTuple):
    """A pass without its tensors and options."""

    kind: int  # FORWARD, BACKWARD or FORWARD_BACKWARD
    flags: Flags = Flags()
    function: str = "linear_cross_entropy"
    ranks: Any = None  # call.Ranks


class Result(NamedTuple):
    """An array that a pass returns."""

    shape: tuple[int, ...]
    dtype: str
    device: str = ""  # "": the device of hidden


def stats_of(hidden: Any) -> str:
    """Returns the dtype of losses, statistics, and weights of rows and classes."""
    return "float64" if name_of(hidden.dtype) == "float64" else "float32"


def results(pass_key: PassKey, read: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Result]:
    """Returns the tensors that a pass returns.

    counts holds correct and valid rows, the former 0 without argmax. The size of draws stays 0, as only a plan knows
    it. d_weight is included even if it is added to main_grad, which is not known here.
    """
    kind, flags, function, _ = pass_key
    hidden, weight, bias = read["hidden"], read["weight"], read.get("bias")
    rows, stats = (hidden.shape[0],), stats_of(hidden)
    outputs: dict[str, Result] = {}
    if kind != BACKWARD:
        if function != "linear_top_k":
            outputs["loss"] = Result(rows if options["reduction"] == "none" else (), stats)
        for statistic in _options.STATISTICS:
            if statistic.name in flags.stats:
                outputs[statistic.name] = Result(rows, statistic.dtype or stats)
        if flags.want_counts:
            outputs["counts"] = Result((2,), "int64")
        for name in _options.FUNCTIONS[function].outputs:
            columns = options["top_k"] or read["targets"].shape[-1]
            outputs[name] = Result((*rows, columns), "int64" if name == "top_ids" else stats)
    if kind == FORWARD:
        if "lse" in flags.stats:
            outputs["lse_residual"] = Result(rows, stats)
        if flags.saves:
            outputs["saved"] = Result((0,), "uint8")
        return outputs
    if flags.want_draw_stats:
        outputs |= {"kept_count": Result(rows, "int32"), "draw_variance": Result(rows, stats)}
    gradients = (
        Result(tuple(hidden.shape), name_of(hidden.dtype)),
        Result(tuple(weight.shape), name_of(weight.dtype)),
        Result(tuple(weight.shape[:1]), name_of((hidden if bias is None else bias).dtype)),
        Result((), stats),
        Result((), stats),
    )
    return outputs | {name: result for name, result, on in zip(GRADIENTS, gradients, flags.wants()) if on}


def writes(pass_key: PassKey, read: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Result]:
    """Returns the tensors to allocate for the library, which writes them.

    The gradients of learned numbers need d_hidden and d_bias before these are rounded. Gradients among the inputs are
    added to, so they are left out.
    """
    outputs, hidden, flags = results(pass_key, read, options), read["hidden"], pass_key.flags
    if flags.learns_numbers():
        outputs["d_hidden"] = Result(tuple(hidden.shape), stats_of(hidden))
    if flags.want_d_temperature and "bias" in read:
        outputs["d_bias"] = Result(tuple(read["bias"].shape), stats_of(hidden))
    for name in ("counts", "d_scale", "d_temperature", *(name for name in ADDED if name in read)):
        outputs.pop(name, None)
    return outputs


def spec_of(pass_key: PassKey, read: Mapping[str, Any], options: Mapping[str, Any], **more: Any) -> native.Spec:
    """Returns the problem of these tensors, which may be fake ones; their sizes become constants.

    options: resolved by resolve_options(). more: further options of a plan.
    """
    (tokens, hidden), (vocab, _) = read["hidden"].shape, read["weight"].shape
    given = {name: int(value) if name in _options.INTEGERS else value for name, value in options.items()}
    given |= {"num_items": options["num_items"] or 0.0}
    if "target_weight" in read:
        given["targets_per_row"] = int(read["target_weight"].shape[1])
    # Another pass writes lse and entropy, so they are no part of this problem.
    tensors = {name: name_of(array.dtype) for name, array in read.items() if name not in (*LSE, "entropy")}
    tensors |= {name: result.dtype for name, result in writes(pass_key, read, options).items()}
    if pass_key.flags.saves:
        tensors["saved"] = "uint8"
    codes = {name: _options.CODES.get(dtype, 0) for name, dtype in tensors.items()}
    added = [name for name in ADDED if name in read]
    return native.spec((int(tokens), int(vocab), int(hidden)), codes, added, pass_=pass_key.kind, **given, **more)


# ---- gradients that come later


def alone(pass_key: PassKey) -> PassKey:
    """Returns a forward pass without the gradients of its later backward pass."""
    return pass_key._replace(flags=pass_key.flags.with_gradients(Wants()))


def later_spec(pass_key: PassKey, read: Mapping[str, Any], options: Mapping[str, Any], **more: Any) -> native.Spec:
    """Returns the problem of a forward pass's later backward pass, with all upstream gradients that it may get.

    A backward pass with fewer upstream gradients needs no more memory.
    """
    flags = pass_key.flags
    stats = flags.stats if pass_key.function == "linear_cross_entropy" else ()
    given = dict.fromkeys((f"grad_{name}" for name in _options.DIFFERENTIABLE if name in stats), read["hidden"])
    later = PassKey(BACKWARD, Flags(*flags.wants(), saves=flags.saves))
    return spec_of(later, {**read, **given}, options, **more)


_ATTEMPTS = 8


def size_to_save(budget: int, later: Callable[[int], native.Plan], now: Callable[[int], native.Plan]) -> int:
    """Returns the size of saved exp logits with which both passes fit the budget, as large as is of use.

    later: plans the backward pass, which chooses the size, within a budget. now: plans the forward pass with a size.
    """
    for_later = budget
    for _ in range(_ATTEMPTS):
        try:
            size = later(for_later).info.saved_bytes
        except BudgetTooSmallError:  # the caller's own plan of the pass reports it
            return 0
        try:
            now(size)
            return size
        except BudgetTooSmallError as error:  # the forward pass has less room for it
            for_later -= (error.required_bytes or budget) - budget
            if for_later <= 0:
                return 0
    return 0
