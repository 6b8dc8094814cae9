"""``linear_cross_entropy``, ``linear_log_probs`` and ``linear_top_k`` for numpy arrays. Needs numpy, not PyTorch.

Arrays are float32, float16, float64 or bfloat16 (the dtype of the package ml_dtypes). Arrays in the other byte order
are copied; results are in the machine's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import native
from . import options as _options
from .errors import InvalidTargetError
from .inspection import default_threads
from .options import (
    FORWARD,
    FORWARD_BACKWARD,
    Flags,
    ReductionOptions,
    ScaleOptions,
    Wants,
    accepts,
    names_of,
    shape_text,
)
from .passes import PassKey, results, spec_of, stats_of

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

GRADIENTS = ("hidden", "weight", "bias")


class TopKOptions(ScaleOptions, total=False):
    """As in logitless.options, with arrays."""

    bias: ArrayLike | None
    temperature: ArrayLike
    threads: int
    backend: str | None


class IdOptions(TopKOptions, total=False):
    ignore_index: int | None


class LossOptions(TopKOptions, ReductionOptions, total=False):
    class_weight: ArrayLike | None
    token_weight: ArrayLike | None
    target_weight: ArrayLike | None
    num_items: float | None
    gradients: bool | Collection[str]
    grad_loss: ArrayLike | None
    seed: int | np.random.Generator | None


_MORE: dict[str, Any] = {"gradients": False, "grad_loss": None, "threads": 0, "backend": None}


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropyResult:
    """The loss, and the requested statistics and gradients; the others are None.

    Statistics are those of :class:`logitless.LinearCrossEntropyOutput`. They have the target's shape; rows without a
    target hold 0, and -1 in ``argmax``. Gradients have the shape and dtype of their arrays. They are those of the
    reduced loss, or of the sum of ``grad_loss * loss``.
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
    loss_error: Any = None
    d_hidden: Any = None
    d_weight: Any = None
    d_bias: Any = None


class LinearTopK(NamedTuple):
    """The largest logits of each row, in descending order."""

    ids: Any  # int64
    log_probs: Any  # float32, or float64 for float64 inputs


@accepts(LossOptions, **_MORE)
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    *,
    return_stats: bool | Sequence[str] = False,
    **options: Unpack[LossOptions],
) -> LinearCrossEntropyResult:
    """Computes the cross entropy of ``softmax(hidden @ weight.T)`` without holding the logits.

    The formulas and all options not listed here are those of :func:`logitless.linear_cross_entropy`.

    Args:
        hidden: Hidden states, ``[..., D]``.
        weight: The head's weight, ``[V, D]``.
        targets: Class indices, int64 or int32, ``[...]``, or ``[..., K]`` with ``target_weight`` and K <= 64.
        bias: Added to the logits, ``[V]``.
        temperature: A number, or an array of shape ``hidden.shape[:-1]``.
        target_weight: Weights of several targets a row, of the target's shape.
        gradients: True for all gradients, or names from ``hidden``, ``weight`` and ``bias``.
        grad_loss: The upstream gradient of the loss: a scalar, or with reduction "none" an array of the target's shape.
            None means 1.
        threads: The number of threads. 0 means as many as the machine has.
        backend: A backend's name. None means the first that can run the problem.
        seed: Seed of sparsified gradients, an integer or a generator; equal seeds give equal bits. None draws one from
            ``numpy.random``.
        return_stats: As in :func:`logitless.linear_cross_entropy`. ``kept_count`` and ``draw_variance`` need some of
            the ``gradients``.

    Returns:
        A :class:`LinearCrossEntropyResult`.

    Raises:
        TypeError, ValueError: An argument has the wrong type, dtype, shape or range.
        LogitlessError: One of its subclasses, such as ``BudgetTooSmallError`` with ``required_bytes``.
    """
    o = _options.filled("linear_cross_entropy", names_of(LossOptions), options, _MORE)
    x, c, y = _operand(hidden), _operand(weight), _operand(targets)
    several = _options.has_several_targets(o, x, y)
    call = _PreparedCall("linear_cross_entropy", x, c, y, o, several)
    _options.check_seed_is_used(o["seed"], o["gradient"])
    if o["seed"] is not None and not isinstance(o["seed"], np.random.Generator):
        _options.integer("seed", o["seed"])
    names = _options.stats_names(return_stats, o["gradient"], o["screen"], several)
    wanted = _options.gradient_names(o["gradients"], GRADIENTS if o["bias"] is not None else GRADIENTS[:2])
    draw_stats = [name for name in _options.DRAW_STATS if name in names]
    if draw_stats and not wanted:
        raise ValueError(f"return_stats: expected {draw_stats[0]} only with gradients, got it without any")
    shape, of_rows = x.shape[:-1], "one for each row" if several else "that of targets"
    call.add("class_weight", o["class_weight"], c.shape[:1], "V")
    call.add("token_weight", o["token_weight"], shape, of_rows)
    call.add("target_weight", o["target_weight"], y.shape, "that of targets")
    if several:
        call.read["target_weight"] = call.read["target_weight"].reshape(-1, y.shape[-1])
    call.add("grad_loss", o["grad_loss"], shape if o["reduction"] == "none" else (), "that of the loss")
    if o["gradient"] != "exact" and (wanted or o["screen"] != "none"):
        call.read["seed"] = _seed(o["seed"])
    stats = _options.stats_of_rows((*names, *(["argmax"] if "correct_count" in names else [])))
    want_counts = any(name in names for name in _options.COUNTS)
    flags = Flags(want_draw_stats=bool(draw_stats), want_counts=want_counts, stats=stats)
    flags = flags.with_gradients(Wants(*(name in wanted for name in GRADIENTS)))
    outputs = call.run(FORWARD_BACKWARD if wanted else FORWARD, flags)

    requested: dict[str, Any] = {
        name: outputs[name].reshape(shape) for name in (*_options.OF_ROWS, *draw_stats) if name in names
    }
    counts = dict(zip(_options.COUNTS, outputs["counts"].tolist())) if want_counts else {}
    return LinearCrossEntropyResult(
        loss=outputs["loss"].reshape(shape) if o["reduction"] == "none" else outputs["loss"][()],
        **requested,
        **{name: count for name, count in counts.items() if name in names},
        d_hidden=outputs["d_hidden"].reshape(x.shape) if "hidden" in wanted else None,
        d_weight=outputs.get("d_weight"),
        d_bias=outputs.get("d_bias"),
    )


@accepts(TopKOptions, **_MORE)
def linear_top_k(hidden: ArrayLike, weight: ArrayLike, k: int, **options: Unpack[TopKOptions]) -> LinearTopK:
    """Computes the k largest logits of each row of ``hidden @ weight.T`` without holding all of them.

    Arguments not listed here, results and errors are those of :func:`logitless.linear_top_k`.

    Args:
        hidden: Hidden states, ``[..., D]``.
        weight: The head's weight, ``[V, D]``.
        k: The number of logits, from 1 to the smaller of 64 and V.
        temperature: As in :func:`logitless.numpy.linear_cross_entropy`.
        threads: As in :func:`logitless.numpy.linear_cross_entropy`.
        backend: As in :func:`logitless.numpy.linear_cross_entropy`.
    """
    o = _options.filled("linear_top_k", names_of(TopKOptions), options, _MORE)
    x, c = _operand(hidden), _operand(weight)
    y = np.zeros(x.shape[:-1], np.int64)  # no row is ignored
    outputs = _PreparedCall("linear_top_k", x, c, y, o, False, _options.checked_k(k, *c.shape[:1])).run()
    return LinearTopK(*(outputs[name].reshape((*y.shape, k)) for name in ("top_ids", "top_log_probs")))


@accepts(IdOptions, **_MORE)
def linear_log_probs(
    hidden: ArrayLike, weight: ArrayLike, ids: ArrayLike, **options: Unpack[IdOptions]
) -> NDArray[Any]:
    """Computes the log-probabilities of ids, ``[..., K]``, without holding the logits.

    Arguments not listed here, results and errors are those of :func:`logitless.linear_log_probs`. The gradients for
    upstream gradients g are those of :func:`logitless.numpy.linear_cross_entropy` with the ids as targets,
    ``target_weight=-g`` and reduction "sum".

    Args:
        hidden: Hidden states, ``[..., D]``.
        weight: The head's weight, ``[V, D]``.
        ids: Ids, int64 or int32, ``[..., K]`` with K <= 64.
        temperature: As in :func:`logitless.numpy.linear_cross_entropy`.
        threads: As in :func:`logitless.numpy.linear_cross_entropy`.
        backend: As in :func:`logitless.numpy.linear_cross_entropy`.
    """
    o = _options.filled("linear_log_probs", names_of(IdOptions), options, _MORE)
    x, c, y = _operand(hidden), _operand(weight), _operand(ids)
    if y.ndim != x.ndim:
        raise ValueError(f"ids: expected shape {shape_text((*x.shape[:-1], 'K'))}, got {shape_text(y.shape)}")
    call = _PreparedCall("linear_log_probs", x, c, y, o | {"reduction": "sum"}, True)
    call.read["target_weight"] = np.ones((len(call.read["hidden"]), y.shape[-1]), call.stats)
    return call.run()["target_log_probs"].reshape(y.shape)


# ---- preparation


def _operand(values: ArrayLike) -> NDArray[Any]:
    """Returns an array in the machine's own byte order."""
    array = np.asarray(values)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _row_major(array: NDArray[Any]) -> NDArray[Any]:
    """Returns the array itself if the library can read it with a stride between rows, else a copy."""
    item, (rows, columns) = array.itemsize, array.shape
    contiguous_rows = columns == 1 or array.strides[1] == item
    ordered = rows <= 1 or (array.strides[0] >= columns * item and array.strides[0] % item == 0)
    if contiguous_rows and ordered and array.flags.aligned:
        return array
    return np.array(array, order="C")


class _PreparedCall:
    """A call: its arrays by the library's names, and its options. several: whether rows have several targets."""

    def __init__(
        self,
        function: str,
        x: NDArray[Any],
        c: NDArray[Any],
        y: NDArray[Any],
        o: dict[str, Any],
        several: bool,
        k: int = 0,
    ) -> None:
        shape, temperature, targets = x.shape[:-1], o["temperature"], _options.FUNCTIONS[function].targets
        bias = None if o["bias"] is None else _operand(o["bias"])
        operands = {"hidden": x, "weight": c, "bias": bias}
        _options.check_arrays(np.float64, operands, targets, y, several)
        of_rows = np.ndim(temperature) > 0
        given = o | {"temperature": 1.0} if of_rows else o
        self.options = _options.make_options(given, shape[-1] if shape else 1) | {"top_k": k}
        self.function, self.targets, self.place = function, targets, (o["threads"] or default_threads(), o["backend"])
        self.read = {"hidden": _row_major(x.reshape(-1, x.shape[-1])), "weight": _row_major(c)}
        self.read["targets"] = np.require(y, None, ["C", "A"])
        self.stats = stats_of(x)
        if self.options["num_items"] == 0:  # the option 0 would mean none
            self.read["num_items"] = np.zeros((), self.stats)
        if bias is not None:
            self.read["bias"] = np.require(bias, None, ["C", "A"])
        if of_rows:
            self.add(
                "temperature",
                temperature,
                shape,
                f"{'one for each row' if several else 'that of targets'}, or a number",
            )

    def add(self, name: str, values: Any, shape: tuple[int, ...], meaning: str) -> None:
        """Adds real numbers of rows or classes, unless None."""
        if values is None:
            return
        array = np.asarray(values)
        _options.check_shape(name, array.shape, shape, meaning)
        if np.iscomplexobj(array):
            raise TypeError(f"{name}: expected real numbers, got {array.dtype}")
        self.read[name] = np.require(array, self.stats, ["C", "A"]).reshape(-1)

    def run(self, kind: int = FORWARD, flags: Flags = Flags()) -> dict[str, NDArray[Any]]:
        pass_key, read = PassKey(kind, flags, self.function), self.read
        plan = native.plan_of(spec_of(pass_key, read, self.options), *self.place)
        returned = results(pass_key, read, self.options)
        outputs = {name: np.empty(shape, dtype) for name, (shape, dtype, _) in returned.items()}
        buffers: Any = native.schema().buffers()
        for name, array in (read | outputs).items():
            if name != "counts":
                setattr(buffers, name, array.ctypes.data)
        if "counts" in outputs:
            outputs["counts"][:] = 0
            buffers.valid_count = outputs["counts"][1:].ctypes.data
            if "argmax" in flags.stats:
                buffers.correct_count = outputs["counts"].ctypes.data
        for name in ("hidden", "weight"):
            rows = read[name]
            setattr(buffers, f"{name}_stride", rows.strides[0] // rows.itemsize if len(rows) > 1 else 0)
        try:
            native.run_on_host(plan, buffers)
        except InvalidTargetError as error:
            raise _options.named_target(error, read["targets"].shape, self.targets) from None
        return outputs


def _seed(seed: int | np.random.Generator | None) -> NDArray[np.int64]:
    """Returns the seed as an array, which the library reads; None draws one from numpy.random."""
    if seed is None:
        seed = int(np.random.randint(_options.SEED_RANGE))
    elif isinstance(seed, np.random.Generator):
        seed = int(seed.integers(_options.SEED_RANGE))
    return np.asarray(seed, np.int64)
