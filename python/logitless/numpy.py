"""``logitless.numpy.linear_cross_entropy``, ``linear_log_probs`` and ``linear_top_k``: of numpy arrays. Needs numpy,
not PyTorch.

Arrays are float32, float16, float64 or bfloat16 (the dtype of the package ml_dtypes). Those of the other byte order are
copied; results are in the machine's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import native
from . import options as _options
from .errors import InvalidTargetError
from .inspection import default_threads
from .options import DEFAULTS, LSE, SAVED, Budget, read_by_backward, shape_text, takes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Unpack
else:
    try:
        import numpy as np
    except ImportError as error:
        raise ImportError("logitless.numpy needs numpy, which is not installed") from error

__all__ = ["LinearCrossEntropyResult", "LinearTopK", "linear_cross_entropy", "linear_log_probs", "linear_top_k"]

GRADIENTS = ("input", "linear_weight", "linear_bias")


class LogitOptions(Budget, total=False):
    """As logitless.options, of arrays."""

    linear_bias: ArrayLike | None
    scale: float
    softcap: float | None
    temperature: ArrayLike
    threads: int
    backend: str | None


class IdOptions(LogitOptions, total=False):
    ignore_index: int | None


class LossOptions(IdOptions, total=False):
    weight: ArrayLike | None
    reduction: str
    label_smoothing: float
    z_loss: float
    token_weight: ArrayLike | None
    target_weight: ArrayLike | None
    num_items: float | None
    shift: int
    gradients: bool | Collection[str]
    grad_loss: ArrayLike | None
    gradient: str
    threshold: float
    seed: int | np.random.Generator | None
    batch_invariant: bool


_MORE: dict[str, Any] = {"gradients": False, "grad_loss": None, "threads": 0, "backend": None}


def _resolved(function: str, kind: type, given: Any) -> dict[str, Any]:
    _options.check_names(function, given, _options.names_of(kind))
    return {**DEFAULTS, **_MORE, **given}


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropyResult:
    """Loss, and of statistics and gradients those asked for; the others are None.

    Statistics have the target's shape (rows without a target hold 0, and -1 in ``argmax``), gradients the shape and
    dtype of their arrays. Gradients are those of the reduced loss, or of ``grad_loss * loss`` summed.
    """

    loss: Any
    nll: Any = None
    lse: Any = None
    entropy: Any = None
    argmax: Any = None
    correct_count: int | None = None
    valid_count: int | None = None
    kept_count: Any = None
    draw_variance: Any = None
    target_logit: Any = None
    mean_logit: Any = None
    log_sum_sq_probs: Any = None
    is_top1: Any = None
    max_logit: Any = None
    d_input: Any = None
    d_linear_weight: Any = None
    d_linear_bias: Any = None


class LinearTopK(NamedTuple):
    """The largest logits of each row, in descending order."""

    ids: Any  # int64
    log_probs: Any  # float32, or float64 for float64 inputs


@takes(LossOptions, **_MORE)
def linear_cross_entropy(
    input: ArrayLike,
    linear_weight: ArrayLike,
    target: ArrayLike,
    *,
    return_stats: bool | Sequence[str] = False,
    **options: Unpack[LossOptions],
) -> LinearCrossEntropyResult:
    """Cross entropy of ``softmax(input @ linear_weight.T)`` without the logits; formulas and options as in
    :func:`logitless.linear_cross_entropy`.

    Args:
        input: ``[..., D]``.
        linear_weight: ``[V, D]``.
        target: ``[...]``, int64 or int32; or ``[..., K]``, K <= 64, with ``target_weight``.
        linear_bias: ``[V]``.
        temperature: a number, or an array of ``input.shape[:-1]``.
        target_weight: weights of several targets a row, of the target's shape.
        gradients: True for all, or names out of ``input``, ``linear_weight``, ``linear_bias``.
        grad_loss: upstream gradient of the loss, a scalar or with reduction "none" of the target's shape; None: 1.
        threads: 0: as many as the machine gives.
        backend: by name; None: the first that can run the problem.
        seed: of thinned gradients: the same seed gives the same bits. An integer or a generator; None draws one from
            ``numpy.random``. ``kept_count`` and ``draw_variance`` of ``return_stats`` want some of the ``gradients``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or range.
        LogitlessError: its subclasses, such as ``BudgetTooSmallError`` with ``required_bytes``.
    """
    o = _resolved("linear_cross_entropy", LossOptions, options)
    x, c, y = _operand(input), _operand(linear_weight), _operand(target)
    if y.ndim == x.ndim and y.dtype.kind == "f":
        raise TypeError(_options.dense_message(y.dtype))
    several = o["target_weight"] is not None and y.ndim == x.ndim
    _check_shapes(x, c, y, several)
    if several:
        _options.check_several_targets(o["weight"], o["gradient"])
    elif o["target_weight"] is not None:
        raise ValueError("target_weight: expected None with one target a row, got an array")
    _options.check_gradient(o["gradient"])
    seed = o["seed"]
    _options.check_seed_is_used(seed, o["gradient"])
    if seed is not None and not isinstance(seed, np.random.Generator):
        _options.checked_seed(seed)
    names = _options.stats_names(return_stats, o["gradient"], several)
    wanted = _gradient_names(o["gradients"], o["linear_bias"] is not None)
    for name in _options.DRAW_STATS:
        if name in names and not wanted:
            raise ValueError(f"return_stats: expected {name} only with gradients, got it without any")
    spec, arrays, stats = _problem(x, c, y, o, several)
    spec["flags"] = _options.stat_flags(names)
    shape, tokens, reduction = x.shape[:-1], spec["tokens"], o["reduction"]
    of_rows = "one for each row" if several else "that of target"
    for field, name, expected, meaning in (
        ("class_weight", "weight", c.shape[:1], "V"),
        ("token_weight", "token_weight", shape, of_rows),
        ("target_weight", "target_weight", y.shape, "that of target"),
    ):
        if o[name] is not None:
            arrays[field] = _vector(name, o[name], expected, stats, meaning)
            if field != "target_weight":  # told by targets_per_row
                spec[f"has_{field}"] = True
    upstream = None
    if o["grad_loss"] is not None:
        loss_shape = shape if reduction == "none" else ()
        upstream = _vector("grad_loss", o["grad_loss"], loss_shape, stats, "that of the loss")
    out = _outputs(tokens, stats, reduction, names)
    draw = _draw(seed, names, tokens, stats) if o["gradient"] != "exact" and wanted else {}
    found = _Run(spec, arrays, out, draw, o["threads"] or default_threads(), o["backend"])(wanted, upstream)

    loss = out["loss"].reshape(shape) if reduction == "none" else out["loss"][()]
    asked: dict[str, Any] = {name: out[name].reshape(shape) for name in _options.stats_of_rows(names)}
    asked |= {name: int(out[name]) for name in _options.COUNTS if name in names}
    asked |= {name: found[name].reshape(shape) for name in _options.DRAW_STATS if name in names}
    return LinearCrossEntropyResult(
        loss=loss,
        **asked,
        d_input=found["d_hidden"].reshape(x.shape) if "input" in wanted else None,
        d_linear_weight=found["d_classifier"] if "linear_weight" in wanted else None,
        d_linear_bias=found["d_bias"] if "linear_bias" in wanted else None,
    )


@takes(LogitOptions, **_MORE)
def linear_top_k(input: ArrayLike, linear_weight: ArrayLike, k: int, **options: Unpack[LogitOptions]) -> LinearTopK:
    """The k largest logits of each row of ``input @ linear_weight.T``, without ever holding all of them; arguments and
    results as of :func:`logitless.linear_top_k`.

    Args:
        temperature: a number, or an array of ``input.shape[:-1]``.
        threads: 0: as many as the machine gives.
        backend: by name; None: the first that can run the problem.
    """
    o = _resolved("linear_top_k", LogitOptions, options)
    x, c = _operand(input), _operand(linear_weight)
    y = np.zeros(x.shape[:-1], np.int64)  # that no row is ignored
    _check_shapes(x, c, y, False)
    spec, arrays, stats = _problem(x, c, y, o, False)
    spec["top_k"] = k = _options.checked_k(k, c.shape[0])
    found = LinearTopK(np.empty((*y.shape, k), np.int64), np.empty((*y.shape, k), stats))
    out = {"top_ids": found.ids, "top_log_probs": found.log_probs}
    _Run(spec, arrays, out, {}, o["threads"] or default_threads(), o["backend"])((), None)
    return found


@takes(IdOptions, **_MORE)
def linear_log_probs(
    input: ArrayLike, linear_weight: ArrayLike, ids: ArrayLike, **options: Unpack[IdOptions]
) -> NDArray[Any]:
    """Log-probabilities ``[..., K]`` of given ids; arguments and results as of :func:`logitless.linear_log_probs`.

    Their gradients with upstream gradients g are those of :func:`linear_cross_entropy` with the target ids,
    ``target_weight=-g`` and reduction "sum".

    Args:
        ids: ``[..., K]``, K <= 64, int64 or int32.
        temperature: a number, or an array of ``input.shape[:-1]``.
        threads: 0: as many as the machine gives.
        backend: by name; None: the first that can run the problem.
    """
    o = _resolved("linear_log_probs", IdOptions, options)
    x, c, y = _operand(input), _operand(linear_weight), _operand(ids)
    if y.ndim != x.ndim:
        raise ValueError(f"ids: expected shape {shape_text((*x.shape[:-1], 'K'))}, got {shape_text(y.shape)}")
    _options.check_targets_shape("ids", y.shape, x.shape[:-1], True)
    _options.target_code(y.dtype, "ids")
    _check_shapes(x, c, y, True)
    spec, arrays, stats = _problem(x, c, y, o, True)
    found = np.empty(y.shape, stats)
    _Run(spec, arrays, {"target_log_probs": found}, {}, o["threads"] or default_threads(), o["backend"], "ids")(
        (), None
    )
    return found


# ---- preparation


def _operand(values: ArrayLike) -> NDArray[Any]:
    """An array in the machine's own byte order."""
    array = np.asarray(values)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _row_major(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself when the library can read it by a stride between rows."""
    item, (rows, columns) = array.itemsize, array.shape
    contiguous_rows = columns == 1 or array.strides[1] == item
    ordered = rows <= 1 or (array.strides[0] >= columns * item and array.strides[0] % item == 0)
    if contiguous_rows and ordered and array.flags.aligned:
        return array
    return np.array(array, order="C")


def _vector(name: str, values: ArrayLike, shape: tuple[int, ...], dtype: Any, meaning: str) -> NDArray[Any]:
    array = np.asarray(values)
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape_text(shape)} ({meaning}), got {shape_text(array.shape)}")
    if np.iscomplexobj(array):
        raise TypeError(f"{name}: expected real numbers, got {array.dtype}")
    return np.require(array, dtype, ["C", "A"]).reshape(-1)


def _check_shapes(x: NDArray[Any], c: NDArray[Any], y: NDArray[Any], several: bool) -> None:
    """several: targets a row."""
    if c.ndim != 2:
        raise ValueError(f"linear_weight: expected shape [V, D], got {shape_text(c.shape)}")
    _options.check_sizes(c.shape)
    if x.ndim < 1 or x.shape[-1] != c.shape[1]:
        raise ValueError(f"input: expected shape [..., D] with D = {c.shape[1]}, got {shape_text(x.shape)}")
    _options.check_targets_shape("target", y.shape, x.shape[:-1], several)


def _problem(
    x: NDArray[Any], c: NDArray[Any], y: NDArray[Any], o: dict[str, Any], several: bool
) -> tuple[dict[str, Any], dict[str, NDArray[Any]], Any]:
    """Fields of the problem, arrays of its head, and the dtype of statistics. several: targets a row."""
    shape, linear_bias, temperature = x.shape[:-1], o["linear_bias"], o["temperature"]
    of_rows = np.ndim(temperature) > 0
    options = _options.make_options(o | {"temperature": 1.0} if of_rows else o, shape[-1] if shape else 1)
    hidden, classifier = _row_major(x.reshape(-1, x.shape[-1])), _row_major(c)
    stats = np.float64 if hidden.dtype == np.float64 else np.float32
    arrays: dict[str, NDArray[Any]] = {"hidden": hidden, "classifier": classifier}
    arrays["targets"] = np.require(y, None, ["C", "A"])
    items = options["num_items"]
    if items == 0:  # as an option, 0 is none
        arrays["num_items"] = np.zeros((), stats)
    spec: dict[str, Any] = options | {
        "num_items": items or 0.0,
        "reduction": native.REDUCTIONS[options["reduction"]],
        "gradient": native.GRADIENTS[options["gradient"]],
        "tokens": hidden.shape[0],
        "vocab": classifier.shape[0],
        "hidden": hidden.shape[1],
        "hidden_dtype": _options.float_code("input", hidden.dtype),
        "classifier_dtype": _options.float_code("linear_weight", classifier.dtype),
        "target_dtype": _options.target_code(y.dtype),
        "has_bias": linear_bias is not None,
        "has_temperature": of_rows,
        "targets_per_row": y.shape[-1] if several else 0,
    }
    bias = None if linear_bias is None else _operand(linear_bias)
    _options.check_float64(np.float64, hidden, classifier, bias)
    if bias is not None:
        spec["bias_dtype"] = _options.float_code("linear_bias", bias.dtype)
        arrays["bias"] = _vector("linear_bias", bias, c.shape[:1], bias.dtype, "V")
    if of_rows:
        meaning = "one for each row, or a number" if several else "that of target, or a number"
        arrays["temperature"] = _vector("temperature", temperature, shape, stats, meaning)
    return spec, arrays, stats


class _Run:
    """One problem: a forward pass, both in one, or forward and then backward with reduction "none"."""

    def __init__(
        self,
        spec: dict[str, Any],
        arrays: dict[str, NDArray[Any]],
        out: dict[str, NDArray[Any]],
        draw: dict[str, NDArray[Any]],
        threads: int,
        backend: str | None,
        target_name: str = "target",
    ) -> None:
        self.spec, self.arrays, self.out, self.draw = spec, arrays, out, draw
        self.threads, self.backend = threads, backend
        self.target_name = target_name  # in messages

    def __call__(self, wanted: tuple[str, ...], upstream: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
        if not wanted:
            self._run(_options.FORWARD, self.arrays | self.out)
            return {}
        gradients, fields = self._gradients(wanted)
        given = {} if upstream is None else {"grad_loss": upstream}
        if self.spec["reduction"] != native.REDUCTIONS["none"]:
            self._run(_options.FORWARD_BACKWARD, self.arrays | self.out | gradients | given | self.draw, fields)
            return gradients | self.draw
        if upstream is None:
            given["grad_loss"] = np.ones_like(self.out["lse"])
        draws = {"keeps_draws": bool(self.draw)}
        fields |= draws
        native.enough(lambda: self._planned(_options.FORWARD, draws), lambda: self._planned(_options.BACKWARD, fields))
        kept = {"seed": self.draw["seed"], "draws": self._new_draws()} if self.draw else {}
        self._run(_options.FORWARD, self.arrays | self.out | kept, draws)
        saved = read_by_backward({name: (self.out | kept).get(name) for name in SAVED} | given)
        self._run(_options.BACKWARD, self.arrays | saved | gradients | self.draw, fields)
        return gradients | self.draw

    def _new_draws(self) -> NDArray[np.uint8]:
        """64-byte aligned memory for what a forward pass keeps of its draws."""
        size = self._planned(_options.FORWARD, {"keeps_draws": True}).info.draws_bytes
        raw = np.empty(size + 63, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + size]

    def _gradients(self, wanted: tuple[str, ...]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        fields: dict[str, Any] = {}
        for argument, name in zip(GRADIENTS, ("hidden", "classifier", "bias")):
            if argument in wanted:
                arrays[f"d_{name}"] = np.empty(self.arrays[name].shape, self.arrays[name].dtype)
                fields |= {f"want_d_{name}": True, f"d_{name}_dtype": self.spec[f"{name}_dtype"]}
        return arrays, fields

    def _planned(self, pass_: int, fields: dict[str, Any]) -> native.Plan:
        return native.plan_of(native.Spec(**self.spec | {"pass_": pass_} | fields), self.threads, self.backend)

    def _run(self, pass_: int, arrays: dict[str, NDArray[Any]], fields: dict[str, Any] | None = None) -> None:
        plan = self._planned(pass_, fields or {})
        buffers: Any = native.schema().buffers()
        for name, array in arrays.items():
            setattr(buffers, name, array.ctypes.data)
        for name in ("hidden", "classifier"):
            array = arrays[name]
            stride = array.strides[0] // array.itemsize if array.shape[0] > 1 else 0
            setattr(buffers, f"{name}_stride", stride)
        try:
            native.run_on_host(plan, buffers)
        except InvalidTargetError as error:
            shape = arrays["targets"].shape
            raise _options.named_target(error, shape, self.target_name) from None


def _draw(
    seed: int | np.random.Generator | None, names: tuple[str, ...], tokens: int, stats: Any
) -> dict[str, NDArray[Any]]:
    """The seed as a scalar to read, and arrays for the statistics of the draw."""
    if seed is None:
        seed = int(np.random.randint(_options.SEED_RANGE))
    elif isinstance(seed, np.random.Generator):
        seed = int(seed.integers(_options.SEED_RANGE))
    found: dict[str, NDArray[Any]] = {"seed": np.asarray(seed, np.int64)}
    for name, dtype in zip(_options.DRAW_STATS, (np.int32, stats)):
        if name in names:
            found[name] = np.zeros(tokens, dtype)
    return found


def _gradient_names(gradients: bool | Collection[str], has_bias: bool) -> tuple[str, ...]:
    possible = GRADIENTS if has_bias else GRADIENTS[:2]
    if isinstance(gradients, bool):
        return possible if gradients else ()
    for name in gradients:
        if name not in possible:
            raise ValueError(f"gradients: expected names out of {', '.join(possible)}, got {name!r}")
    return tuple(gradients)


def _outputs(tokens: int, stats: Any, reduction: str, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Arrays of a forward pass; those that a later backward pass reads are always among them."""
    out = {"loss": np.zeros((tokens,) if reduction == "none" else (), stats)}
    out |= {name: np.zeros(tokens, stats) for name in LSE}
    out |= {s.name: np.zeros(tokens, s.dtype or stats) for s in _options.STATISTICS if s.name in names}
    return out | {name: np.zeros((), np.int64) for name in _options.COUNTS if name in names}
