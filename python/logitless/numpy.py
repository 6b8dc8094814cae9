"""``logitless.numpy.linear_cross_entropy``, ``linear_log_probs`` and ``linear_top_k``: of numpy arrays. Needs numpy,
not PyTorch.

Arrays are float32, float16, float64 or bfloat16 (the dtype of the package ml_dtypes). Those of the other byte order are
copied; results are in the machine's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from . import _c, _dtypes, _options, _stats
from ._numpy_rows import LinearTopK, linear_log_probs, linear_top_k
from ._numpy_run import GRADIENTS, Run, check_shapes, operand, rows, vector
from ._saved import LSE
from .inspection import default_threads

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray
else:
    import numpy as np

__all__ = ["LinearCrossEntropyResult", "LinearTopK", "linear_cross_entropy", "linear_log_probs", "linear_top_k"]


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
    target_weight: ArrayLike | None = None,
    num_items: float | None = None,
    shift: int = 0,
    max_workspace_bytes: int | str | None = None,
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
    x, c, y = operand(input), operand(linear_weight), operand(target)
    if y.ndim == x.ndim and y.dtype.kind == "f":
        raise TypeError(_options.dense_message(y.dtype))
    several = target_weight is not None and y.ndim == x.ndim
    check_shapes(x, c, y, several)
    shape = x.shape[:-1]
    if several:
        _options.check_several_targets(weight, gradient)
    elif target_weight is not None:
        raise ValueError("target_weight: expected None with one target a row, got an array")
    _options.check_gradient(gradient)
    _options.check_seed_is_used(seed, gradient)
    if seed is not None and not isinstance(seed, np.random.Generator):
        _options.checked_seed(seed)
    names = _options.stats_names(return_stats, gradient, several)
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
        sequence_length=shape[-1] if shape else 1,
        max_workspace_bytes=max_workspace_bytes,
        gradient=gradient,
        threshold=threshold,
        batch_invariant=batch_invariant,
    )
    hidden, classifier = rows(x.reshape(-1, x.shape[-1])), rows(c)
    stats = np.float64 if hidden.dtype == np.float64 else np.float32
    tokens, vocab = hidden.shape[0], classifier.shape[0]
    arrays: dict[str, NDArray[Any]] = {"hidden": hidden, "classifier": classifier}
    arrays["targets"] = np.require(y, None, ["C", "A"])
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
        "targets_per_row": y.shape[-1] if several else 0,
        "flags": _stats.wants(names),
    }
    bias = None if linear_bias is None else operand(linear_bias)
    _dtypes.check_float64(np.float64, hidden, classifier, bias)
    if bias is not None:
        spec["bias_dtype"] = _dtypes.float_code("linear_bias", bias.dtype)
        arrays["bias"] = vector("linear_bias", bias, (vocab,), bias.dtype, "V")
    if weight is not None:
        arrays["class_weight"] = vector("weight", weight, (vocab,), stats, "V")
    if token_weight is not None:
        arrays["token_weight"] = vector(
            "token_weight", token_weight, shape, stats, "that of target" if not several else "one for each row"
        )
    if target_weight is not None:
        arrays["target_weight"] = vector("target_weight", target_weight, y.shape, stats, "that of target")
    if of_rows:
        arrays["temperature"] = vector(
            "temperature",
            temperature,
            shape,
            stats,
            "that of target, or a number" if not several else "one for each row, or a number",
        )
    upstream = None
    if grad_loss is not None:
        loss_shape = shape if reduction == "none" else ()
        upstream = vector("grad_loss", grad_loss, loss_shape, stats, "that of the loss")
    out = _outputs(tokens, stats, reduction, names)
    draw = _draw(seed, names, tokens, stats) if gradient != "exact" and wanted else {}
    run = Run(spec, arrays, out, draw, threads or default_threads(), backend)
    found = run(wanted, upstream)

    loss = out["loss"].reshape(shape) if reduction == "none" else out["loss"][()]
    asked: dict[str, Any] = {name: out[name].reshape(shape) for name in _stats.of_rows(names)}
    asked |= {name: int(out[name]) for name in _stats.COUNTS if name in names}
    asked |= {name: found[name].reshape(shape) for name in _stats.DRAW_STATS if name in names}
    return LinearCrossEntropyResult(
        loss=loss,
        **asked,
        d_input=found["d_hidden"].reshape(x.shape) if "input" in wanted else None,
        d_linear_weight=found["d_classifier"] if "linear_weight" in wanted else None,
        d_linear_bias=found["d_bias"] if "linear_bias" in wanted else None,
    )


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
    out |= {s.name: np.zeros(tokens, s.dtype or stats) for s in _stats.ALL if s.name in names}
    return out | {name: np.zeros((), np.int64) for name in _stats.COUNTS if name in names}
