"""``headroom.numpy.linear_cross_entropy`` and ``linear_top_k``: of numpy arrays. Needs numpy, not PyTorch.

Arrays are float32, float16, float64 or bfloat16 (the dtype of the package ml_dtypes).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _c, _dtypes, _options, _plan, _stats
from ._options import shape_text
from .errors import InvalidTargetError
from .inspection import default_threads

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray
else:
    try:
        import numpy as np
    except ImportError as error:
        raise ImportError("headroom.numpy needs numpy, which is not installed") from error

__all__ = ["LinearCrossEntropyResult", "LinearTopK", "linear_cross_entropy", "linear_top_k"]

_GRADIENTS = ("input", "linear_weight", "linear_bias")


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


def _rows(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself when the library can read it by a stride between rows."""
    item, (rows, columns) = array.itemsize, array.shape
    contiguous_rows = columns == 1 or array.strides[1] == item
    ordered = rows <= 1 or (array.strides[0] >= columns * item and array.strides[0] % item == 0)
    aligned = array.flags.aligned and array.dtype.isnative
    if contiguous_rows and ordered and aligned:
        return array
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def _vector(name: str, values: ArrayLike, shape: tuple[int, ...], dtype: Any, meaning: str) -> NDArray[Any]:
    array = np.asarray(values)
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape_text(shape)} ({meaning}), got {shape_text(array.shape)}")
    if np.iscomplexobj(array):
        raise TypeError(f"{name}: expected real numbers, got {array.dtype}")
    return np.require(array, dtype, ["C", "A"]).reshape(-1)


def _check_shapes(x: NDArray[Any], c: NDArray[Any], y: NDArray[Any]) -> None:
    if c.ndim != 2:
        raise ValueError(f"linear_weight: expected shape [V, D], got {shape_text(c.shape)}")
    _options.check_sizes(c.shape)
    if x.ndim < 1 or x.shape[-1] != c.shape[1]:
        raise ValueError(f"input: expected shape [..., D] with D = {c.shape[1]}, got {shape_text(x.shape)}")
    if y.shape != x.shape[:-1]:
        raise ValueError(f"target: expected shape {shape_text(x.shape[:-1])}, got {shape_text(y.shape)}")


def linear_cross_entropy(
    input: ArrayLike,
    linear_weight: ArrayLike,
    target: ArrayLike,
    *,
    linear_bias: ArrayLike | None = None,
    weight: ArrayLike | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: ArrayLike = 1.0,
    z_loss: float = 0.0,
    token_weight: ArrayLike | None = None,
    num_items: float | None = None,
    shift: int = 0,
    max_workspace_bytes: int | None = None,
    return_stats: bool | Sequence[str] = False,
    gradients: bool | Collection[str] = False,
    grad_loss: ArrayLike | None = None,
    threads: int = 0,
    backend: str | None = None,
    gradient: str = "exact",
    threshold: float = _options.DEFAULT_THRESHOLD,
    seed: int | np.random.Generator | None = None,
    batch_invariant: bool = False,
) -> LinearCrossEntropyResult:
    """Cross entropy of ``softmax(input @ linear_weight.T)`` without the logits; formulas and options as in
    :func:`headroom.linear_cross_entropy`.

    Args:
        input: ``[..., D]``.
        linear_weight: ``[V, D]``.
        target: ``[...]``, int64 or int32.
        linear_bias: ``[V]``.
        temperature: a number, or an array of the target's shape.
        gradients: True for all, or names out of ``input``, ``linear_weight``, ``linear_bias``.
        grad_loss: upstream gradient of the loss, a scalar or with reduction "none" of the target's shape; None: 1.
        threads: 0: as many as the machine gives.
        backend: by name; None: the first that can run the problem.
        seed: of thinned gradients: the same seed gives the same bits. An integer or a generator; None draws one from
            ``numpy.random``. ``kept_count`` and ``draw_variance`` of ``return_stats`` want some of the ``gradients``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or range.
        HeadroomError: its subclasses, such as ``BudgetTooSmallError`` with ``required_bytes``.
    """
    x, c, y = np.asarray(input), np.asarray(linear_weight), np.asarray(target)
    _check_shapes(x, c, y)
    _options.check_gradient(gradient)
    _options.check_seed_is_used(seed, gradient)
    if seed is not None and not isinstance(seed, np.random.Generator):
        _options.checked_seed(seed)
    names = _options.stats_names(return_stats, gradient)
    wanted = _gradient_names(gradients, linear_bias is not None)
    for name in _stats.DRAW_STATS:
        if name in names and not wanted:
            raise ValueError(f"return_stats: expected {name} only with gradients, got it without any")
    of_rows = np.ndim(temperature) > 0
    options = _options.make_options(
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        scale=scale,
        softcap=softcap,
        temperature=1.0 if of_rows else temperature,  # type: ignore[arg-type]
        z_loss=z_loss,
        num_items=num_items,
        shift=shift,
        sequence_length=y.shape[-1] if y.ndim > 0 else 1,
        max_workspace_bytes=max_workspace_bytes,
        gradient=gradient,
        threshold=threshold,
        batch_invariant=batch_invariant,
    )
    hidden, classifier = _rows(x.reshape(-1, x.shape[-1])), _rows(c)
    stats = np.float64 if hidden.dtype == np.float64 else np.float32
    tokens, vocab = hidden.shape[0], classifier.shape[0]
    arrays: dict[str, NDArray[Any]] = {"hidden": hidden, "classifier": classifier}
    arrays["targets"] = np.require(y, y.dtype.newbyteorder("="), ["C", "A"])
    items = options["num_items"]
    if items == 0:  # as an option, 0 is none
        arrays["num_items"] = np.zeros((), stats)
    spec: dict[str, Any] = options | {
        "num_items": items or 0.0,
        "reduction": _c.REDUCTIONS[reduction],
        "gradient": _c.GRADIENTS[gradient],
        "tokens": tokens,
        "vocab": vocab,
        "hidden": hidden.shape[1],
        "hidden_dtype": _dtypes.float_code("input", hidden.dtype),
        "classifier_dtype": _dtypes.float_code("linear_weight", classifier.dtype),
        "target_dtype": _dtypes.target_code(y.dtype),
        "has_bias": linear_bias is not None,
        "has_class_weight": weight is not None,
        "has_token_weight": token_weight is not None,
        "has_temperature": of_rows,
        "flags": _stats.wants(names),
    }
    bias = None if linear_bias is None else np.asarray(linear_bias)
    _dtypes.check_float64(np.float64, hidden, classifier, bias)
    if bias is not None:
        spec["bias_dtype"] = _dtypes.float_code("linear_bias", bias.dtype)
        arrays["bias"] = _vector("linear_bias", bias, (vocab,), bias.dtype.newbyteorder("="), "V")
    if weight is not None:
        arrays["class_weight"] = _vector("weight", weight, (vocab,), stats, "V")
    if token_weight is not None:
        arrays["token_weight"] = _vector("token_weight", token_weight, y.shape, stats, "that of target")
    if of_rows:
        arrays["temperature"] = _vector("temperature", temperature, y.shape, stats, "that of target, or a number")
    upstream = None
    if grad_loss is not None:
        shape = y.shape if reduction == "none" else ()
        upstream = _vector("grad_loss", grad_loss, shape, stats, "that of the loss")
    out = _outputs(tokens, stats, reduction, names)
    draw = _draw(seed, names, tokens, stats) if gradient != "exact" and wanted else {}
    run = _Run(spec, arrays, out, draw, threads or default_threads(), backend)
    found = run(wanted, upstream)

    loss = out["loss"].reshape(y.shape) if reduction == "none" else out["loss"][()]
    asked: dict[str, Any] = {name: out[name].reshape(y.shape) for name in _stats.of_rows(names)}
    asked |= {name: int(out[name]) for name in _stats.COUNTS if name in names}
    asked |= {name: found[name].reshape(y.shape) for name in _stats.DRAW_STATS if name in names}
    return LinearCrossEntropyResult(
        loss=loss,
        **asked,
        d_input=found["d_hidden"].reshape(x.shape) if "input" in wanted else None,
        d_linear_weight=found["d_classifier"] if "linear_weight" in wanted else None,
        d_linear_bias=found["d_bias"] if "linear_bias" in wanted else None,
    )


class LinearTopK(NamedTuple):
    """The largest logits of each row, in descending order."""

    ids: Any  # int64
    log_probs: Any  # float32, or float64 for float64 inputs


def linear_top_k(
    input: ArrayLike,
    linear_weight: ArrayLike,
    k: int,
    *,
    linear_bias: ArrayLike | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: ArrayLike = 1.0,
    max_workspace_bytes: int | None = None,
    threads: int = 0,
    backend: str | None = None,
) -> LinearTopK:
    """The k largest logits of each row of ``input @ linear_weight.T``, without ever holding all of them; arguments and
    results as of :func:`headroom.linear_top_k`.

    Args:
        temperature: a number, or an array of ``input.shape[:-1]``.
        threads: 0: as many as the machine gives.
        backend: by name; None: the first that can run the problem.
    """
    x, c = np.asarray(input), np.asarray(linear_weight)
    y = np.zeros(x.shape[:-1], np.int64)  # that no row is ignored
    _check_shapes(x, c, y)
    k = _options.checked_k(k, c.shape[0])
    of_rows = np.ndim(temperature) > 0
    hidden, classifier = _rows(x.reshape(-1, x.shape[-1])), _rows(c)
    stats = np.float64 if hidden.dtype == np.float64 else np.float32
    arrays: dict[str, NDArray[Any]] = {"hidden": hidden, "classifier": classifier, "targets": y}
    spec: dict[str, Any] = {
        "tokens": hidden.shape[0],
        "vocab": classifier.shape[0],
        "hidden": hidden.shape[1],
        "hidden_dtype": _dtypes.float_code("input", hidden.dtype),
        "classifier_dtype": _dtypes.float_code("linear_weight", classifier.dtype),
        "has_bias": linear_bias is not None,
        "has_temperature": of_rows,
        "scale": _options.number("scale", scale),
        "softcap": 0.0 if softcap is None else _options.number("softcap", softcap),
        "temperature": 1.0 if of_rows else _options.number("temperature", temperature),
        "max_workspace_bytes": _options.budget(max_workspace_bytes),
        "top_k": k,
    }
    bias = None if linear_bias is None else np.asarray(linear_bias)
    _dtypes.check_float64(np.float64, hidden, classifier, bias)
    if bias is not None:
        spec["bias_dtype"] = _dtypes.float_code("linear_bias", bias.dtype)
        arrays["bias"] = _vector("linear_bias", bias, c.shape[:1], bias.dtype.newbyteorder("="), "V")
    if of_rows:
        meaning = "that of input without its last dimension, or a number"
        arrays["temperature"] = _vector("temperature", temperature, y.shape, stats, meaning)
    found = LinearTopK(np.empty((*y.shape, k), np.int64), np.empty((*y.shape, k), stats))
    out = {"top_ids": found.ids, "top_log_probs": found.log_probs}
    _Run(spec, arrays, out, {}, threads or default_threads(), backend)(wanted=(), upstream=None)
    return found


def _draw(
    seed: int | np.random.Generator | None, names: tuple[str, ...], tokens: int, stats: Any
) -> dict[str, NDArray[Any]]:
    """The seed as a scalar to read, and arrays for the statistics of the draw."""
    if seed is None:
        seed = int(np.random.randint(_options.SEED_RANGE))
    elif isinstance(seed, np.random.Generator):
        seed = int(seed.integers(_options.SEED_RANGE))
    found: dict[str, NDArray[Any]] = {"seed": np.asarray(seed, np.int64)}
    for name, dtype in zip(_stats.DRAW_STATS, (np.int32, stats)):
        if name in names:
            found[name] = np.zeros(tokens, dtype)
    return found


def _gradient_names(gradients: bool | Collection[str], has_bias: bool) -> tuple[str, ...]:
    possible = _GRADIENTS if has_bias else _GRADIENTS[:2]
    if isinstance(gradients, bool):
        return possible if gradients else ()
    for name in gradients:
        if name not in possible:
            raise ValueError(f"gradients: expected names out of {', '.join(possible)}, got {name!r}")
    return tuple(gradients)


def _outputs(tokens: int, stats: Any, reduction: str, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Arrays of a forward pass; lse is always among them, for a later backward pass."""
    out = {"loss": np.zeros((tokens,) if reduction == "none" else (), stats), "lse": np.zeros(tokens, stats)}
    out |= {s.name: np.zeros(tokens, s.dtype or stats) for s in _stats.ALL if s.name in names}
    return out | {name: np.zeros((), np.int64) for name in _stats.COUNTS if name in names}


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
    ) -> None:
        self.spec, self.arrays, self.out, self.draw = spec, arrays, out, draw
        self.threads, self.backend = threads, backend

    def __call__(self, wanted: tuple[str, ...], upstream: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
        if not wanted:
            self._run(_c.FORWARD, self.arrays | self.out)
            return {}
        gradients, fields = self._gradients(wanted)
        given = {} if upstream is None else {"grad_loss": upstream}
        if self.spec["reduction"] != _c.REDUCTIONS["none"]:
            self._run(_c.FORWARD_BACKWARD, self.arrays | self.out | gradients | given | self.draw, fields)
            return gradients | self.draw
        if upstream is None:
            given["grad_loss"] = np.ones_like(self.out["lse"])
        kept: dict[str, NDArray[Any]] = {}
        if self.draw:
            fields["keeps_draws"] = True
            kept = {"seed": self.draw["seed"], "draws": self._new_draws()}
        self._run(_c.FORWARD, self.arrays | self.out | kept, {"keeps_draws": bool(kept)})
        saved = {"lse": self.out["lse"]} | kept
        self._run(_c.BACKWARD, self.arrays | saved | gradients | given | self.draw, fields)
        return gradients | self.draw

    def _new_draws(self) -> NDArray[np.uint8]:
        """64-byte aligned memory for what a forward pass keeps of its draws."""
        spec = self.spec | {"pass_": _c.FORWARD, "keeps_draws": True}
        size = _plan.plan_of(_plan.Spec(**spec), self.threads, self.backend).info.draws_bytes
        raw = np.empty(size + 63, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + size]

    def _gradients(self, wanted: tuple[str, ...]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        fields: dict[str, Any] = {}
        for argument, name in zip(_GRADIENTS, ("hidden", "classifier", "bias")):
            if argument in wanted:
                arrays[f"d_{name}"] = np.empty(self.arrays[name].shape, self.arrays[name].dtype)
                fields |= {f"want_d_{name}": True, f"d_{name}_dtype": self.spec[f"{name}_dtype"]}
        return arrays, fields

    def _run(self, pass_: int, arrays: dict[str, NDArray[Any]], fields: dict[str, Any] | None = None) -> None:
        spec = self.spec | {"pass_": pass_} | (fields or {})
        plan = _plan.plan_of(_plan.Spec(**spec), self.threads, self.backend)
        buffers: Any = _c.make("headroom_buffers")
        for name, array in arrays.items():
            setattr(buffers, name, array.ctypes.data)
        for name in ("hidden", "classifier"):
            array = arrays[name]
            stride = array.strides[0] // array.itemsize if array.shape[0] > 1 else 0
            setattr(buffers, f"{name}_stride", stride)
        try:
            _plan.run_on_host(plan, buffers)
        except InvalidTargetError as error:
            raise InvalidTargetError(_options.target_message(str(error), arrays["targets"].shape)) from None
