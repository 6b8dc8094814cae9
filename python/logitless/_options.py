"""The options that the PyTorch and the numpy interface share: their types checked, None made the ABI's defaults.

Most ranges are checked by the library, whose messages name argument, expected and got.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from typing import Any

from . import _stats
from .errors import InvalidArgumentError

REDUCTIONS = ("none", "sum", "mean")
GRADIENTS = ("exact", "thinned", "always-thinned")
DEFAULT_THRESHOLD = 2.0**-9  # as LOGITLESS_DEFAULT_THRESHOLD of the C header
FASTEST = (1 << 63) - 1  # LOGITLESS_FASTEST: a budget that any plan fits
LEAST_THRESHOLD = 2.0**-126  # float32's smallest normal number
MOST_TOP_K = 64
MOST_TARGETS = 64  # of a row
ONE_TARGET_STATS = ("correct_count", "is_top1")  # of several targets none is the right one
SEED_RANGE = 1 << 62  # of the seeds drawn from a generator


def shape_text(shape: Any) -> str:
    return "[" + ", ".join(str(n) for n in shape) + "]"


def check_sizes(shape: Sequence[int], least_vocab: int = 1) -> None:
    """Of linear_weight, [V, D]."""
    vocab, columns = shape
    if vocab < least_vocab or columns < 1:
        raise InvalidArgumentError(
            f"linear_weight: expected shape [V, D] with V >= {least_vocab} and D >= 1, got {shape_text(shape)}"
        )


def _is_symbol(value: Any) -> bool:
    """Of code that PyTorch compiles, which is to stay one."""
    return type(value).__name__ in ("SymInt", "SymFloat", "FakeTensor", "FunctionalTensor")


def number(name: str, value: Any) -> float:
    if isinstance(value, (bool, str)) or not hasattr(type(value), "__float__"):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if isinstance(value, float) or _is_symbol(value):
        return value  # type: ignore[no-any-return]
    try:
        found = float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number of float64's range, got a larger one") from None
    except TypeError:  # of what holds a number only sometimes, as arrays
        raise TypeError(f"{name}: expected a number, got {value!r}") from None
    return value if isinstance(value, int) else found


def integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if _is_symbol(value):
        return value  # type: ignore[no-any-return]
    found = operator.index(value)
    if not -(1 << 63) <= found < 1 << 63:
        raise ValueError(f"{name}: expected an integer of 64 bits, got {found}")
    return found


def checked_num_items(value: Any, reduction: str) -> float:
    if reduction != "mean":
        raise ValueError(f'num_items: expected None unless reduction is "mean", got {value!r} with "{reduction}"')
    items = number("num_items", value)
    if not 0 <= items < math.inf:
        raise ValueError(f"num_items: expected a finite number >= 0, got {items}")
    return items


def checked_threshold(value: Any) -> float:
    threshold = number("threshold", value)
    if not LEAST_THRESHOLD <= threshold <= 1:
        raise InvalidArgumentError(f"threshold: expected a number in [2^-126, 1], got {threshold}")
    return threshold


_UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate("kmgt", 1)}}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}


def size(text: str) -> int | None:
    """Bytes of "256MiB", "1GB", "64k", "1.5GiB" or "4096", as the command line takes them; None for another text."""
    lowered = text.lower()
    digits = len(lowered) - len(lowered.lstrip("0123456789."))
    number, unit = lowered[:digits], lowered[digits:].lstrip(" ").removesuffix("b")
    if number.count(".") > 1 or number in ("", ".") or unit not in _UNITS:
        return None
    found = float(number) * _UNITS[unit]
    return int(found) if found < 2.0**62 else None


def budget(max_workspace_bytes: int | str | None) -> int:
    """As the library takes it: 0 for None, FASTEST for "fastest"."""
    if max_workspace_bytes is None:
        return 0
    found: int | None
    if isinstance(max_workspace_bytes, str):
        found = FASTEST if max_workspace_bytes == "fastest" else size(max_workspace_bytes)
    else:
        found = integer("max_workspace_bytes", max_workspace_bytes)
    if found is None or found <= 0:
        raise ValueError(
            'max_workspace_bytes: expected a positive number of bytes, a size such as "256MiB", "fastest" or None, got '
            f"{max_workspace_bytes!r}"
        )
    return found


def make_options(
    *,
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    scale: float,
    softcap: float | None,
    temperature: float,
    z_loss: float,
    num_items: float | None,
    shift: int,
    sequence_length: int,
    max_workspace_bytes: int | str | None,
    gradient: str,
    threshold: float,
    batch_invariant: bool,
    compute_dtype: int = 0,
) -> dict[str, Any]:
    """The options as the operators take them: 0 for None but of num_items, of which 0 is a number."""
    if reduction not in REDUCTIONS:
        raise ValueError(f'reduction: expected one of "none", "sum", "mean", got {reduction!r}')
    check_gradient(gradient)
    check_batch_invariant(batch_invariant, gradient)
    return {
        "reduction": reduction,
        "ignore_index": -100 if ignore_index is None else integer("ignore_index", ignore_index),
        "label_smoothing": number("label_smoothing", label_smoothing),
        "scale": number("scale", scale),
        "softcap": 0.0 if softcap is None else number("softcap", softcap),
        "temperature": number("temperature", temperature),
        "z_loss": number("z_loss", z_loss),
        "num_items": None if num_items is None else checked_num_items(num_items, reduction),
        "shift": integer("shift", shift),
        "sequence_length": sequence_length,
        "max_workspace_bytes": budget(max_workspace_bytes),
        "gradient": gradient,
        "threshold": checked_threshold(threshold),
        "batch_invariant": batch_invariant,
        "compute_dtype": compute_dtype,
    }


def check_gradient(gradient: Any) -> None:
    if gradient not in GRADIENTS:
        raise ValueError(f'gradient: expected one of "exact", "thinned", "always-thinned", got {gradient!r}')


def check_batch_invariant(batch_invariant: Any, gradient: str) -> None:
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant: expected a bool, got {type(batch_invariant).__name__}")
    if batch_invariant and gradient != "exact":
        raise ValueError(
            f'batch_invariant: expected False unless gradient is "exact", got True with "{gradient}", whose sums are '
            "relative to a guess that other rows have a part in"
        )


def check_seed_is_used(seed: Any, gradient: str) -> None:
    if seed is not None and gradient == "exact":
        raise ValueError('seed: expected None unless gradient is "thinned", got one with "exact"')


def checked_k(k: Any, vocab: int) -> int:
    found, most = integer("k", k), min(MOST_TOP_K, vocab)
    if not 1 <= found <= most:
        raise InvalidArgumentError(
            f"k: expected a number in [1, {most}], the smaller one of {MOST_TOP_K} and V, got {found}"
        )
    return found


def checked_seed(seed: Any) -> int:
    return integer("seed", seed)


def check_targets_shape(name: str, target: Sequence[int], rows: Sequence[int], several: bool) -> None:
    """Of the targets of rows of this shape: one for each, or several."""
    if tuple(target[: len(rows)] if several else target) != tuple(rows) or len(target) != len(rows) + several:
        more = " with one more dimension of K targets" if several else ""
        hint = "; several targets a row want target_weight" if len(target) == len(rows) + 1 and not several else ""
        raise InvalidArgumentError(
            f"{name}: expected shape {shape_text(rows)} (that of input without its last dimension){more}, got "
            f"{shape_text(target)}{hint}"
        )
    if several and not 1 <= target[-1] <= MOST_TARGETS:
        raise InvalidArgumentError(
            f"{name}: expected at most {MOST_TARGETS} targets a row (ids and weights of the K largest probabilities; "
            f"those of the whole vocabulary are not taken), got {target[-1]}"
        )


def dense_message(dtype: Any) -> str:
    return (
        f"target: expected class indices, int64 or int32, got {dtype}; probabilities of the whole vocabulary are not "
        f"taken: pass the ids of at most {MOST_TARGETS} classes a row as target [..., K], and their probabilities as "
        "target_weight"
    )


def check_several_targets(weight: object, gradient: str) -> None:
    """What several targets a row exclude."""
    if weight is not None:
        raise ValueError(
            "weight: expected None with several targets a row, got class weights; multiply target_weight by "
            "weight[target]"
        )
    if gradient != "exact":
        raise ValueError(f'gradient: expected "exact" with several targets a row, got {gradient!r}')


def stats_names(return_stats: bool | Sequence[str], gradient: str, several: bool = False) -> tuple[str, ...]:
    """Which statistics are asked for; all but the default ones by name only. several: targets a row."""
    if isinstance(return_stats, bool):
        default = tuple(name for name in _stats.DEFAULT if not (several and name in ONE_TARGET_STATS))
        return default if return_stats else ()
    if isinstance(return_stats, str):
        raise TypeError(f"return_stats: expected a bool or a sequence of names, got the string {return_stats!r}")
    try:
        names = tuple(return_stats)
    except TypeError:
        raise TypeError(f"return_stats: expected a bool or a sequence of names, got {return_stats!r}") from None
    for name in names:
        if name in _stats.DRAW_STATS and gradient == "exact":
            raise ValueError(f'return_stats: expected {name} only with gradient "thinned", got it with "{gradient}"')
        if several and name in ONE_TARGET_STATS:
            raise ValueError(f"return_stats: expected no {name} with several targets a row, got it")
        if name not in _stats.NAMES:
            raise ValueError(f"return_stats: expected names out of {', '.join(_stats.NAMES)}, got {name!r}")
    return names


def target_message(message: str, shape: Sequence[int], name: str = "target") -> str:
    """The library's message of a target out of range, with the caller's name of it and its place in that shape."""
    found = re.fullmatch(r"targets: (.*) at targets\[(\d+)(?:, (\d+))?\]", message)
    if found is None:
        return message
    place, rest = [], int(found[2]) if found[3] is None else int(found[2]) * shape[-1] + int(found[3])
    for size in reversed(shape):
        rest, index = divmod(rest, size)
        place.append(index)
    return f"{name}: {found[1]} at {name}{shape_text(reversed(place))}"
