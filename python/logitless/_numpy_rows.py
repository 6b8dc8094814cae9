"""``logitless.numpy.linear_top_k`` and ``linear_log_probs``: of rows of logits, without a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from . import _dtypes, _options
from ._numpy_run import Run, head_problem, operand
from ._options import shape_text
from .inspection import default_threads

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray
else:
    import numpy as np


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
    max_workspace_bytes: int | str | None = None,
    threads: int = 0,
    backend: str | None = None,
) -> LinearTopK:
    """The k largest logits of each row of ``input @ linear_weight.T``, without ever holding all of them; arguments and
    results as of :func:`logitless.linear_top_k`.

    Args:
        temperature: a number, or an array of ``input.shape[:-1]``.
        threads: 0: as many as the machine gives.
        backend: by name; None: the first that can run the problem.
    """
    x, c = operand(input), operand(linear_weight)
    y = np.zeros(x.shape[:-1], np.int64)  # that no row is ignored
    spec, arrays, stats = head_problem(x, c, y, linear_bias, scale, softcap, temperature, max_workspace_bytes)
    spec["top_k"] = k = _options.checked_k(k, c.shape[0])
    found = LinearTopK(np.empty((*y.shape, k), np.int64), np.empty((*y.shape, k), stats))
    out = {"top_ids": found.ids, "top_log_probs": found.log_probs}
    Run(spec, arrays, out, {}, threads or default_threads(), backend)(wanted=(), upstream=None)
    return found


def linear_log_probs(
    input: ArrayLike,
    linear_weight: ArrayLike,
    ids: ArrayLike,
    *,
    linear_bias: ArrayLike | None = None,
    ignore_index: int | None = -100,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: ArrayLike = 1.0,
    max_workspace_bytes: int | str | None = None,
    threads: int = 0,
    backend: str | None = None,
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
    x, c, y = operand(input), operand(linear_weight), operand(ids)
    if y.ndim != x.ndim:
        raise ValueError(f"ids: expected shape {shape_text((*x.shape[:-1], 'K'))}, got {shape_text(y.shape)}")
    _options.check_targets_shape("ids", y.shape, x.shape[:-1], True)
    _dtypes.target_code(y.dtype, "ids")
    spec, arrays, stats = head_problem(x, c, y, linear_bias, scale, softcap, temperature, max_workspace_bytes)
    spec["ignore_index"] = -100 if ignore_index is None else _options.integer("ignore_index", ignore_index)
    spec["targets_per_row"] = y.shape[-1]
    found = np.empty(y.shape, stats)
    Run(spec, arrays, {"target_log_probs": found}, {}, threads or default_threads(), backend, "ids")((), None)
    return found
