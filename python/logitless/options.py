"""The schema of a call: options, statistics, dtypes. Knows neither PyTorch nor numpy.

These tables describe each option, statistic and dtype once, and every interface uses them. The library checks most
ranges; its messages name argument, expected and got.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

from .errors import InvalidArgumentError, InvalidTargetError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .screened import ScreenedWeight

    Number = float | Tensor
    Seed = int | Tensor | torch.Generator | None

REDUCTIONS = ("none", "sum", "mean")
GRADIENTS = ("exact", "sparsified", "always-sparsified")
SCREENS = ("none", "fp8")
COMPUTE_DTYPES = (None, "fp8")  # beside those of autocast and JAX
DEFAULT_THRESHOLD = 2.0**-9  # as LOGITLESS_DEFAULT_THRESHOLD of the C header
FASTEST = (1 << 63) - 1  # LOGITLESS_FASTEST: a budget that any plan fits
LEAST_THRESHOLD = 2.0**-126  # float32's smallest normal number
COUNTS_OF_IDS = ("num_samples", "top_k")  # that a pass gives for each row
MOST_TOP_K = 64
MOST_TARGETS = 64  # targets a row
ONE_TARGET_STATS = ("correct_count", "is_top1")  # with several targets no class is the right one
SEED_RANGE = 1 << 62  # seeds drawn from a generator are below it

# ---- the options of a head, which signatures unpack; the docstring of logitless.linear_cross_entropy explains them


class Budget(TypedDict, total=False):
    max_workspace_bytes: int | str | None


class MethodOptions(Budget, total=False):
    """How a loss and its gradients are computed."""

    gradient: str
    threshold: Number
    screen: str | ScreenedWeight
    compute_dtype: Any
    batch_invariant: bool


class TrainingOptions(MethodOptions, total=False):
    """MethodOptions, and those of gradients that may come after the loss."""

    recompute_logits: bool


class ScaleOptions(Budget, total=False):
    """Options of logits with one value for all rows."""

    scale: Number
    softcap: Number | None


class LogitOptions(ScaleOptions, total=False):
    """Options of logits."""

    temperature: Number


class TargetOptions(TypedDict, total=False):
    """Options of any loss over targets."""

    reduction: str
    ignore_index: int | None


class RowOptions(ScaleOptions, MethodOptions, TargetOptions, total=False):
    """Options of a loss whose rows are no sequence, without the temperature."""

    label_smoothing: Number
    z_loss: Number


class ReductionOptions(RowOptions, total=False):
    """Options of a loss without the temperature, which may be an array of another kind."""

    shift: int


class LossOptions(ReductionOptions, LogitOptions, TrainingOptions, total=False):
    """Options of a loss, as modules keep them."""


class CallOptions(TypedDict, total=False):
    """Options of a module's call beside those that the module keeps."""

    token_weight: Tensor | None
    num_items: Number | None
    main_grad: Tensor | None
    differentiable_stats: bool
    seed: Seed


class HeadOptions(LossOptions, CallOptions, total=False):
    """All options of linear_cross_entropy."""

    bias: Tensor | None
    class_weight: Tensor | None
    target_weight: Tensor | None


class PairOptions(RowOptions, TrainingOptions, total=False):
    """Options of info_nce, as modules keep them."""


class PairCallOptions(TypedDict, total=False):
    """Options of info_nce that belong to one call."""

    bias: Tensor | None
    token_weight: Tensor | None
    seed: Seed


class InfoNCEOptions(PairOptions, PairCallOptions, total=False):
    """All options of info_nce."""


class TopKOptions(LogitOptions, total=False):
    bias: Tensor | None


class IdOptions(TopKOptions, total=False):
    ignore_index: int | None
    recompute_logits: bool
    batch_invariant: bool


DEFAULTS: dict[str, Any] = {  # in the order of signatures
    "bias": None,
    "class_weight": None,
    "reduction": "mean",
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "scale": 1.0,
    "softcap": None,
    "temperature": 1.0,
    "z_loss": 0.0,
    "token_weight": None,
    "target_weight": None,
    "num_items": None,
    "shift": 0,
    "max_workspace_bytes": None,
    "main_grad": None,
    "differentiable_stats": True,
    "gradient": "exact",
    "threshold": DEFAULT_THRESHOLD,
    "seed": None,
    "screen": "none",
    "compute_dtype": None,
    "batch_invariant": False,
    "recompute_logits": False,
}

F = TypeVar("F", bound=Callable[..., Any])


_ORDER = [name for known in DEFAULTS for name in ((known, "return_stats") if known == "main_grad" else (known,))]


def accepts(options: type, first: Sequence[str] = (), **others: Any) -> Callable[[F], F]:
    """Shows the options that a function unpacks in its signature: behind its own parameters, in the order of DEFAULTS.

    first: keywords that come before all others. others: defaults that differ from DEFAULTS.
    """
    order, defaults = [*first, *(name for name in _ORDER if name not in first)], DEFAULTS | others

    def described(function: F) -> F:
        own = inspect.signature(function)
        kinds = inspect.Parameter
        given = [p for p in own.parameters.values() if p.kind is not kinds.VAR_KEYWORD]
        given += [
            kinds(name, kinds.KEYWORD_ONLY, default=defaults[name], annotation=annotation.__forward_arg__)
            for name, annotation in options.__annotations__.items()
        ]
        positional = [p for p in given if p.kind is not kinds.KEYWORD_ONLY]
        keywords = [p for p in given if p.kind is kinds.KEYWORD_ONLY]
        keywords.sort(key=lambda p: order.index(p.name) if p.name in order else -1)
        function.__signature__ = own.replace(parameters=positional + keywords)  # type: ignore[attr-defined]
        return function

    return described


def names_of(options: type) -> frozenset[str]:
    return frozenset(options.__annotations__)


def without(options: type, *names: str) -> type:
    """Returns the options except for some."""
    kept = {name: kind for name, kind in options.__annotations__.items() if name not in names}
    return type(options.__name__, (), {"__annotations__": kept})


LOSS_OPTIONS, HEAD_OPTIONS = names_of(LossOptions), names_of(HeadOptions)
TOP_K_OPTIONS, ID_OPTIONS = names_of(TopKOptions), names_of(IdOptions)
# Options that are numbers or tensors of one element, in the order of DEFAULTS; and those of logits.
NUMBERS = tuple(
    name
    for name in DEFAULTS
    if name in HEAD_OPTIONS and HeadOptions.__annotations__[name].__forward_arg__.startswith("Number")
)
LOGIT_NUMBERS = tuple(name for name in NUMBERS if name in LogitOptions.__annotations__)


def check_names(function: str, given: Iterable[str], known: frozenset[str]) -> None:
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def filled(function: str, known: frozenset[str], given: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the names of the given options and adds the defaults of those left out. others: as in accepts()."""
    check_names(function, given, known)
    return {**DEFAULTS, **others, **given}


# ---- dtypes

F32, BF16, F16, F64, I32, I64, FP8 = range(7)  # logitless_dtype
FORWARD, BACKWARD, FORWARD_BACKWARD = range(3)  # logitless_pass


# Keys are the names of PyTorch and numpy, whose bfloat16 comes from the package ml_dtypes.
FLOATS = {"float32": F32, "bfloat16": BF16, "float16": F16, "float64": F64}
INTEGER_DTYPES = {"int32": I32, "int64": I64}
CODES = FLOATS | INTEGER_DTYPES
FLOATS_TEXT = "float32, bfloat16, float16 or float64"
INTEGERS_TEXT = "int64 or int32 class indices"


_SHORT = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64"}  # as the command line takes them


def name_of(dtype: Any) -> str:
    """Returns "float32" for "float32", "f32", torch.float32, numpy.float32 or numpy.dtype("float32")."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    text = str(name or dtype).rpartition(".")[2]
    return _SHORT.get(text, text)


def float_code(argument: str, dtype: Any) -> int:
    code = FLOATS.get(name_of(dtype))
    if code is None:
        raise TypeError(f"{argument}: expected {FLOATS_TEXT}, got {dtype}")
    return code


def target_code(dtype: Any, argument: str = "targets") -> int:
    code = INTEGER_DTYPES.get(name_of(dtype))
    if code is None:
        raise TypeError(f"{argument}: expected {INTEGERS_TEXT}, got {dtype}")
    return code


def check_float64(float64: Any, operands: Mapping[str, Any], of: str = "of hidden, weight and bias") -> None:
    """Checks that all tensors (torch.float64) or arrays (numpy.float64) are float64 or none is; skips None."""
    (first, like), *others = operands.items()
    for name, operand in others:
        if operand is not None and (operand.dtype == float64) != (like.dtype == float64):
            raise TypeError(
                f"{name}: expected float64 for all {of} or for none, got {operand.dtype} with {first} {like.dtype}"
            )


# ---- statistics of rows


class Statistic(NamedTuple):
    """A statistic with one value a row."""

    name: str  # in return_stats and in tensors.def
    dtype: str = ""  # "": the dtype of the loss
    differentiable: bool = False  # if so, there is a tensor grad_<name>
    is_default: bool = False  # whether return_stats=True includes it
    screens: bool | None = None  # whether it needs a screen (True) or excludes one (False)


STATISTICS = (
    Statistic("nll", differentiable=True, is_default=True),
    Statistic("lse", differentiable=True, is_default=True),
    Statistic("entropy", differentiable=True, is_default=True, screens=False),
    Statistic("argmax", dtype="int64", is_default=True, screens=False),
    Statistic("target_logit", differentiable=True),
    Statistic("mean_logit", screens=False),
    Statistic("log_sum_sq_probs", screens=False),
    Statistic("is_top1", dtype="bool", screens=False),
    Statistic("max_logit", screens=False),
    Statistic("loss_error", screens=True),
)
COUNTS = ("correct_count", "valid_count")  # scalars; the former also needs argmax
DRAW_STATS = ("kept_count", "draw_variance")  # with sparsified gradients only

OF_ROWS = tuple(statistic.name for statistic in STATISTICS)
DIFFERENTIABLE = tuple(statistic.name for statistic in STATISTICS if statistic.differentiable)
CONSTANT = tuple(statistic.name for statistic in STATISTICS if not statistic.differentiable)
STAT_GRADIENTS = tuple(f"grad_{name}" for name in DIFFERENTIABLE)  # names of tensors
DEFAULT_STATS = (*(statistic.name for statistic in STATISTICS if statistic.is_default), *COUNTS)
STAT_NAMES = (*DEFAULT_STATS, *(name for name in OF_ROWS if name not in DEFAULT_STATS), *DRAW_STATS)
# Statistics of calls without a screen only, and of calls with one only.
UNSCREENED_STATS = ("correct_count", *(statistic.name for statistic in STATISTICS if statistic.screens is False))
SCREEN_STATS = tuple(statistic.name for statistic in STATISTICS if statistic.screens)


def stats_of_rows(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names that are statistics of rows, in the order of STATISTICS."""
    requested = set(names)
    return tuple(name for name in OF_ROWS if name in requested)


# ---- functions, and the gradients and statistics of a pass


class Function(NamedTuple):
    """A public function over logits."""

    targets: str  # the name of its targets in messages
    outputs: tuple[str, ...] = ()  # tensors that it returns instead of a loss


FUNCTIONS = {
    "linear_cross_entropy": Function("targets"),
    "linear_log_probs": Function("ids", ("target_log_probs",)),
    "linear_top_k": Function("targets", ("top_ids", "top_log_probs")),
}
INTEGERS = ("ignore_index", "shift", "sequence_length", "max_workspace_bytes", "top_k")  # options that are integers


class Wants(NamedTuple):
    """Gradients that are wanted."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    scale: bool = False
    temperature: bool = False


class Flags(NamedTuple):
    """Gradients and statistics of a pass, and its use of the tensor saved."""

    want_d_hidden: bool = False
    want_d_weight: bool = False
    want_d_bias: bool = False
    want_d_scale: bool = False
    want_d_temperature: bool = False
    saves: bool = False
    want_draw_stats: bool = False
    want_counts: bool = False
    stats: tuple[str, ...] = ()  # statistics of rows, in the order of STATISTICS

    def wants(self) -> Wants:
        return Wants(*map(bool, self[: len(Wants._fields)]))

    def with_gradients(self, wants: Wants) -> Flags:
        fields: dict[str, Any] = dict(zip(Flags._fields, wants))
        return self._replace(**fields)

    def learns_numbers(self) -> bool:
        return self.want_d_scale or self.want_d_temperature


# ---- tensors that a forward pass saves for its backward pass

LSE = ("lse", "lse_residual")  # a forward pass writes both or none
SAVED = (*LSE, "entropy", "saved", "shard")  # a rank's shard, packed
SIZE_SAVED = ("threshold", "label_smoothing", "softcap")  # numbers on which the size of the tensor saved depends

# ---- checks


def shape_text(shape: Any) -> str:
    return "[" + ", ".join(str(n) for n in shape) + "]"


def gradient_names(gradients: bool | Iterable[str], possible: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the wanted gradients; True stands for all possible ones."""
    if isinstance(gradients, bool):
        return tuple(possible) if gradients else ()
    names = tuple(gradients)
    for name in names:
        if name not in possible:
            raise ValueError(f"gradients: expected names out of {', '.join(possible)}, got {name!r}")
    return names


def check_shape(name: str, shape: Any, expected: Sequence[Any], meaning: str) -> None:
    if tuple(shape) != tuple(expected):
        raise ValueError(f"{name}: expected shape {shape_text(expected)} ({meaning}), got {shape_text(shape)}")


def check_matrices(arrays: Mapping[str, Any], least_vocab: int = 1) -> None:
    """Checks dtypes and shapes of hidden states, weight and bias of a head, by the caller's names; None for no bias."""
    for name, array in arrays.items():
        if array is not None:
            float_code(name, array.dtype)
    (hidden_name, weight_name, bias_name), (hidden, weight, bias) = arrays, arrays.values()
    if len(weight.shape) != 2:
        raise ValueError(f"{weight_name}: expected shape [V, D], got {shape_text(weight.shape)}")
    vocab, columns = weight.shape
    if vocab < least_vocab or columns < 1:
        raise InvalidArgumentError(
            f"{weight_name}: expected shape [V, D] with V >= {least_vocab} and D >= 1, got {shape_text(weight.shape)}"
        )
    if len(hidden.shape) < 1 or hidden.shape[-1] != columns:
        raise ValueError(
            f"{hidden_name}: expected shape [..., D] with D = {columns} of {weight_name}, "
            f"got {shape_text(hidden.shape)}"
        )
    if bias is not None:
        check_shape(bias_name, bias.shape, (vocab,), "V")


def _is_symbol(value: Any) -> bool:
    """Whether PyTorch traces the value, so that it must stay a symbol."""
    return type(value).__name__ in ("SymInt", "SymFloat", "FakeTensor", "FunctionalTensor")


def number(name: str, value: Any) -> float:
    if isinstance(value, (bool, str)) or not hasattr(type(value), "__float__"):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if isinstance(value, float) or _is_symbol(value):
        return value  # type: ignore[no-any-return]
    try:
        result = float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number of float64's range, got a larger one") from None
    except TypeError:  # arrays hold a number only sometimes
        raise TypeError(f"{name}: expected a number, got {value!r}") from None
    return value if isinstance(value, int) else result


def integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if _is_symbol(value):
        return value  # type: ignore[no-any-return]
    result = operator.index(value)
    if not -(1 << 63) <= result < 1 << 63:
        raise ValueError(f"{name}: expected an integer of 64 bits, got {result}")
    return result


def checked_num_items(value: Any, reduction: str) -> float:
    if reduction != "mean":
        raise ValueError(f'num_items: expected None unless reduction is "mean", got {value!r} with "{reduction}"')
    items = number("num_items", value)
    if not 0 <= items < math.inf:
        raise ValueError(f"num_items: expected a finite number >= 0, got {items}")
    return items


_UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate("kmgt", 1)}}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}


def size(text: str) -> int | None:
    """Parses "256MiB", "1GB", "64k", "1.5GiB" or "4096" as the command line does; None for any other text."""
    lowered = text.lower()
    digits = len(lowered) - len(lowered.lstrip("0123456789."))
    number, unit = lowered[:digits], lowered[digits:].lstrip(" ").removesuffix("b")
    if number.count(".") > 1 or number in ("", ".") or unit not in _UNITS:
        return None
    count = float(number) * _UNITS[unit]
    return int(count) if count < 2.0**62 else None


def budget(value: int | str | None) -> int:
    """Returns max_workspace_bytes as the library takes it: 0 for None, FASTEST for "fastest"."""
    if value is None:
        return 0
    result: int | None
    if isinstance(value, str):
        result = FASTEST if value == "fastest" else size(value)
    else:
        result = integer("max_workspace_bytes", value)
    if result is None or result <= 0:
        raise ValueError(
            'max_workspace_bytes: expected a positive number of bytes, a size such as "256MiB", "fastest" or None, got '
            f"{value!r}"
        )
    return result


def target_of_none(ignore_index: Any) -> int:
    """Returns ignore_index as the library takes it."""
    return integer("ignore_index", DEFAULTS["ignore_index"] if ignore_index is None else ignore_index)


def compute_code(given: str | None, rounds_to: int = F32) -> int:
    """Returns compute_dtype as the library takes it. rounds_to: where None is given."""
    return rounds_to if given is None else FP8


def product_code(compute_dtype: int) -> int:
    """Returns the dtype to which products round operands; F32: none."""
    return BF16 if compute_dtype == FP8 else compute_dtype


def rounded_to(options: Mapping[str, Any]) -> int:
    """As product_code(), from options of make_options()."""
    return product_code(options["compute_dtype"])


def check_learned(options: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuses rounded logits where these numbers have gradients. options: of make_options()."""
    if names and options["compute_dtype"] == FP8:
        raise ValueError(
            f'compute_dtype: expected None where {names[0]} has a gradient (which the rounding stops), got "fp8"'
        )


def check_of_trl(options: Mapping[str, Any]) -> None:
    """Checks the options of a patched model whose loss TRL computes."""
    if options.get("compute_dtype") is not None:
        raise UnsupportedError('compute_dtype: expected None where TRL computes the loss, got "fp8"')


def make_options(given: Mapping[str, Any], sequence_length: int, rounds_to: int = F32) -> dict[str, Any]:
    """Checks the options of a pass. None becomes 0, except for num_items, where 0 is a number of its own.

    rounds_to: The logitless_dtype to which products round float32 operands unless compute_dtype is given.
    """
    reduction, num_items = given["reduction"], given["num_items"]
    check_choice("reduction", reduction, REDUCTIONS)
    method = checked_method(given)
    numbers = {
        name: 0.0 if given[name] is None and DEFAULTS[name] is None else number(name, given[name]) for name in NUMBERS
    }
    return {
        **numbers,
        **method,
        "reduction": reduction,
        "ignore_index": target_of_none(given["ignore_index"]),
        "num_items": None if num_items is None else checked_num_items(num_items, reduction),
        "shift": integer("shift", given["shift"]),
        "sequence_length": sequence_length,
        "max_workspace_bytes": budget(method["max_workspace_bytes"]),
        "compute_dtype": compute_code(method["compute_dtype"], rounds_to),
    }


def checked_method(given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the options of MethodOptions; budget and compute_dtype stay as they were given."""
    method = {name: given.get(name, DEFAULTS[name]) for name in DEFAULTS if name in MethodOptions.__annotations__}
    budget(method["max_workspace_bytes"])
    check_choice("gradient", method["gradient"], GRADIENTS)
    flag("batch_invariant", method["batch_invariant"])
    if method["batch_invariant"] and method["gradient"] != "exact":
        raise ValueError(
            f'batch_invariant: expected False unless gradient is "exact" (the lse estimate of sparsified gradients '
            f'depends on other rows), got True with "{method["gradient"]}"'
        )
    threshold = method["threshold"] = number("threshold", method["threshold"])
    if not LEAST_THRESHOLD <= threshold <= 1:
        raise InvalidArgumentError(f"threshold: expected a number in [2^-126, 1], got {threshold}")
    check_choice("compute_dtype", method["compute_dtype"], COMPUTE_DTYPES)
    check_choice("screen", method["screen"], SCREENS)
    if method["screen"] != "none" and method["gradient"] == "exact":
        raise ValueError(
            f'screen: expected "none" unless gradient is "sparsified", got "{method["screen"]}" with "exact"'
        )
    return method


def checked_training(given: Mapping[str, Any]) -> dict[str, Any]:
    """As checked_method() for TrainingOptions."""
    recompute = given.get("recompute_logits", DEFAULTS["recompute_logits"])
    return checked_method(given) | {"recompute_logits": flag("recompute_logits", recompute)}


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")
    return value


def is_choice(value: Any, choices: Sequence[str | None]) -> bool:
    """Returns whether a value is one of these. Others, such as numpy's dtypes, may be equal to None."""
    return value in choices if isinstance(value, str) else value is None and None in choices


def check_choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    if not is_choice(value, choices):
        known = ", ".join(f'"{choice}"' if choice is not None else "None" for choice in choices)
        raise ValueError(f"{name}: expected one of {known}, got {value!r}")


def check_seed_is_used(seed: Any, gradient: str) -> None:
    check_choice("gradient", gradient, GRADIENTS)
    if seed is not None and gradient == "exact":
        raise ValueError('seed: expected None unless gradient is "sparsified", got one with "exact"')


def check_together(reduction: str, main_grad: object, half: bool, differentiable_stats: bool) -> None:
    """Refuses what makes gradients come after the loss. A screen makes both in one pass."""
    for name, expected, got, is_refused in (
        ("reduction", '"mean" or "sum" with a screen', '"none"', reduction == "none"),
        ("main_grad", "None with a screen", "a tensor", main_grad is not None),
        ("differentiable_stats", "False with a screen", "True", differentiable_stats),
        ("screen", '"none" with float16 gradients', "another", half),
    ):
        if is_refused:
            raise ValueError(f"{name}: expected {expected} (it makes gradients with the loss), got {got}")


def checked_k(k: Any, vocab: int = 0) -> int:
    """Checks k. vocab: 0 where the head is checked later."""
    result, most = integer("k", k), min(MOST_TOP_K, vocab or MOST_TOP_K)
    if not 1 <= result <= most:
        raise InvalidArgumentError(
            f"k: expected a number in [1, {most}] (the smaller of {MOST_TOP_K} and V), got {result}"
        )
    return result


def check_targets_shape(name: str, target: Sequence[int], rows: Sequence[int], several: bool) -> None:
    """Checks the shape of targets: one for each row, or several."""
    if tuple(target[: len(rows)] if several else target) != tuple(rows) or len(target) != len(rows) + several:
        more = " with one more dimension of K targets" if several else ""
        hint = "; several targets a row need target_weight" if len(target) == len(rows) + 1 and not several else ""
        raise InvalidArgumentError(
            f"{name}: expected shape {shape_text(rows)} (hidden without its last dimension){more}, got "
            f"{shape_text(target)}{hint}"
        )
    if several and not 1 <= target[-1] <= MOST_TARGETS:
        raise InvalidArgumentError(
            f"{name}: expected at most {MOST_TARGETS} targets a row (ids and weights of the K largest "
            f"probabilities, not the whole vocabulary), got {target[-1]}"
        )


def dense_message(dtype: Any) -> str:
    return (
        f"targets: expected class indices, int64 or int32, got {dtype}; probabilities of the whole vocabulary are not "
        f"supported: pass the ids of at most {MOST_TARGETS} classes a row as targets [..., K], and their probabilities "
        "as target_weight"
    )


def check_several_targets(class_weight: object, gradient: str) -> None:
    """Refuses options that several targets a row exclude."""
    if class_weight is not None:
        raise ValueError(
            "class_weight: expected None with several targets a row, got class weights; multiply target_weight by "
            "class_weight[targets]"
        )
    if gradient != "exact":
        raise ValueError(f'gradient: expected "exact" with several targets a row, got {gradient!r}')


def has_several_targets(options: Mapping[str, Any], hidden: Any, targets: Any) -> bool:
    """Checks the options of several targets a row, and returns whether these arrays have them."""
    wide, weighted = len(targets.shape) == len(hidden.shape), options["target_weight"] is not None
    if wide and name_of(targets.dtype) in FLOATS:
        raise TypeError(dense_message(targets.dtype))
    if wide and weighted:
        check_several_targets(options["class_weight"], options["gradient"])
    elif weighted:
        raise ValueError("target_weight: expected None with one target a row, got an array")
    return wide and weighted


def check_arrays(float64: Any, operands: Mapping[str, Any], name: str, targets: Any, several: bool) -> None:
    """Checks dtypes and shapes of a head's arrays. name: of the targets; float64: numpy's dtype."""
    check_matrices(operands)
    check_float64(float64, operands)
    check_targets_shape(name, targets.shape, operands["hidden"].shape[:-1], several)
    target_code(targets.dtype, name)


def stats_names(
    return_stats: bool | Sequence[str], gradient: str, screen: str, several: bool = False
) -> tuple[str, ...]:
    """Returns the names of the requested statistics; True stands for the default ones. several: targets a row."""
    screens = screen != "none"
    if isinstance(return_stats, bool):
        absent = (*(ONE_TARGET_STATS if several else ()), *(UNSCREENED_STATS if screens else ()))
        return tuple(name for name in DEFAULT_STATS if name not in absent) if return_stats else ()
    if isinstance(return_stats, str):
        raise TypeError(f"return_stats: expected a bool or a sequence of names, got the string {return_stats!r}")
    try:
        names = tuple(return_stats)
    except TypeError:
        raise TypeError(f"return_stats: expected a bool or a sequence of names, got {return_stats!r}") from None
    for name in names:
        if name in DRAW_STATS and gradient == "exact":
            raise ValueError(f'return_stats: expected {name} only with gradient "sparsified", got it with "{gradient}"')
        if name in SCREEN_STATS and not screens:
            raise ValueError(f'return_stats: expected {name} only with a screen, got it with "{screen}"')
        if name in UNSCREENED_STATS and screens:
            raise ValueError(f"return_stats: expected no {name} with a screen (it is one of the whole row), got it")
        if several and name in ONE_TARGET_STATS:
            raise ValueError(f"return_stats: expected no {name} with several targets a row, got it")
        if name not in STAT_NAMES:
            raise ValueError(f"return_stats: expected names out of {', '.join(STAT_NAMES)}, got {name!r}")
    return names


def named_target(error: InvalidTargetError, shape: Sequence[int], name: str = "targets") -> InvalidTargetError:
    """Returns the library's error of a target out of range with the caller's name of the targets and its place in
    them."""
    place: list[int] = []
    rest = error.row or 0
    for size in reversed(shape):
        rest, index = divmod(rest, size)
        place.insert(0, index)
    named = type(error)(f"{name}: expected {error.expected}, got {error.got} at {name}{shape_text(place)}")
    named.argument, named.expected, named.got, named.row = name, error.expected, error.got, error.row
    return named
