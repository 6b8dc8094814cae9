"""Runs of the library on numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _c, _dtypes, _options, _plan
from ._options import shape_text
from ._saved import SAVED, read_by_backward
from .errors import InvalidTargetError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray
else:
    try:
        import numpy as np
    except ImportError as error:
        raise ImportError("logitless.numpy needs numpy, which is not installed") from error

GRADIENTS = ("input", "linear_weight", "linear_bias")


def operand(values: ArrayLike) -> NDArray[Any]:
    """An array in the machine's own byte order."""
    array = np.asarray(values)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def rows(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself when the library can read it by a stride between rows."""
    item, (rows, columns) = array.itemsize, array.shape
    contiguous_rows = columns == 1 or array.strides[1] == item
    ordered = rows <= 1 or (array.strides[0] >= columns * item and array.strides[0] % item == 0)
    if contiguous_rows and ordered and array.flags.aligned:
        return array
    return np.array(array, order="C")


def vector(name: str, values: ArrayLike, shape: tuple[int, ...], dtype: Any, meaning: str) -> NDArray[Any]:
    array = np.asarray(values)
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape_text(shape)} ({meaning}), got {shape_text(array.shape)}")
    if np.iscomplexobj(array):
        raise TypeError(f"{name}: expected real numbers, got {array.dtype}")
    return np.require(array, dtype, ["C", "A"]).reshape(-1)


def check_shapes(x: NDArray[Any], c: NDArray[Any], y: NDArray[Any], several: bool) -> None:
    """several: targets a row."""
    if c.ndim != 2:
        raise ValueError(f"linear_weight: expected shape [V, D], got {shape_text(c.shape)}")
    _options.check_sizes(c.shape)
    if x.ndim < 1 or x.shape[-1] != c.shape[1]:
        raise ValueError(f"input: expected shape [..., D] with D = {c.shape[1]}, got {shape_text(x.shape)}")
    _options.check_targets_shape("target", y.shape, x.shape[:-1], several)


def head_problem(
    x: NDArray[Any],
    c: NDArray[Any],
    y: NDArray[Any],
    linear_bias: ArrayLike | None,
    scale: float,
    softcap: float | None,
    temperature: ArrayLike,
    max_workspace_bytes: int | str | None,
) -> tuple[dict[str, Any], dict[str, NDArray[Any]], Any]:
    """Of a forward pass without a loss: fields of the problem, arrays, and the dtype of statistics."""
    check_shapes(x, c, y, y.ndim == x.ndim)
    of_rows = np.ndim(temperature) > 0
    hidden, classifier = rows(x.reshape(-1, x.shape[-1])), rows(c)
    stats = np.float64 if hidden.dtype == np.float64 else np.float32
    targets = np.require(y, None, ["C", "A"])
    arrays: dict[str, NDArray[Any]] = {"hidden": hidden, "classifier": classifier, "targets": targets}
    spec: dict[str, Any] = {
        "tokens": hidden.shape[0],
        "vocab": classifier.shape[0],
        "hidden": hidden.shape[1],
        "hidden_dtype": _dtypes.float_code("input", hidden.dtype),
        "classifier_dtype": _dtypes.float_code("linear_weight", classifier.dtype),
        "target_dtype": _dtypes.target_code(y.dtype),
        "has_bias": linear_bias is not None,
        "has_temperature": of_rows,
        "scale": _options.number("scale", scale),
        "softcap": 0.0 if softcap is None else _options.number("softcap", softcap),
        "temperature": 1.0 if of_rows else _options.number("temperature", temperature),
        "max_workspace_bytes": _options.budget(max_workspace_bytes),
    }
    bias = None if linear_bias is None else operand(linear_bias)
    _dtypes.check_float64(np.float64, hidden, classifier, bias)
    if bias is not None:
        spec["bias_dtype"] = _dtypes.float_code("linear_bias", bias.dtype)
        arrays["bias"] = vector("linear_bias", bias, c.shape[:1], bias.dtype, "V")
    if of_rows:
        meaning = "that of input without its last dimension, or a number"
        arrays["temperature"] = vector("temperature", temperature, x.shape[:-1], stats, meaning)
    return spec, arrays, stats


class Run:
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
            self._run(_c.FORWARD, self.arrays | self.out)
            return {}
        gradients, fields = self._gradients(wanted)
        given = {} if upstream is None else {"grad_loss": upstream}
        if self.spec["reduction"] != _c.REDUCTIONS["none"]:
            self._run(_c.FORWARD_BACKWARD, self.arrays | self.out | gradients | given | self.draw, fields)
            return gradients | self.draw
        if upstream is None:
            given["grad_loss"] = np.ones_like(self.out["lse"])
        draws = {"keeps_draws": bool(self.draw)}
        fields |= draws
        _plan.enough(lambda: self._planned(_c.FORWARD, draws), lambda: self._planned(_c.BACKWARD, fields))
        kept = {"seed": self.draw["seed"], "draws": self._new_draws()} if self.draw else {}
        self._run(_c.FORWARD, self.arrays | self.out | kept, draws)
        saved = read_by_backward({name: (self.out | kept).get(name) for name in SAVED} | given)
        self._run(_c.BACKWARD, self.arrays | saved | gradients | self.draw, fields)
        return gradients | self.draw

    def _new_draws(self) -> NDArray[np.uint8]:
        """64-byte aligned memory for what a forward pass keeps of its draws."""
        size = self._planned(_c.FORWARD, {"keeps_draws": True}).info.draws_bytes
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

    def _planned(self, pass_: int, fields: dict[str, Any]) -> _plan.Plan:
        return _plan.plan_of(_plan.Spec(**self.spec | {"pass_": pass_} | fields), self.threads, self.backend)

    def _run(self, pass_: int, arrays: dict[str, NDArray[Any]], fields: dict[str, Any] | None = None) -> None:
        plan = self._planned(pass_, fields or {})
        buffers: Any = _c.make("logitless_buffers")
        for name, array in arrays.items():
            setattr(buffers, name, array.ctypes.data)
        for name in ("hidden", "classifier"):
            array = arrays[name]
            stride = array.strides[0] // array.itemsize if array.shape[0] > 1 else 0
            setattr(buffers, f"{name}_stride", stride)
        try:
            _plan.run_on_host(plan, buffers)
        except InvalidTargetError as error:
            shape = arrays["targets"].shape
            raise InvalidTargetError(_options.target_message(str(error), shape, self.target_name)) from None
