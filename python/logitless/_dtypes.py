"""The dtypes of tensors and arrays: one table for PyTorch, numpy and the library."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _c


class Dtype(NamedTuple):
    name: str  # PyTorch's and numpy's; numpy has bfloat16 of the package ml_dtypes
    code: int  # of logitless_dtype
    is_float: bool


ALL = (
    Dtype("float32", _c.F32, True),
    Dtype("bfloat16", _c.BF16, True),
    Dtype("float16", _c.F16, True),
    Dtype("float64", _c.F64, True),
    Dtype("int32", _c.I32, False),
    Dtype("int64", _c.I64, False),
)
FLOATS = {dtype.name: dtype.code for dtype in ALL if dtype.is_float}
INTEGERS = {dtype.name: dtype.code for dtype in ALL if not dtype.is_float}
FLOATS_TEXT = "float32, bfloat16, float16 or float64"
INTEGERS_TEXT = "int64 or int32 class indices"


_SHORT = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64"}  # as the command line takes them


def name_of(dtype: Any) -> str:
    """``float32`` of "float32", "f32", torch.float32, numpy.float32 or numpy.dtype("float32")."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    found = str(name or dtype).rpartition(".")[2]
    return _SHORT.get(found, found)


def float_code(argument: str, dtype: Any) -> int:
    code = FLOATS.get(name_of(dtype))
    if code is None:
        raise TypeError(f"{argument}: expected {FLOATS_TEXT}, got {dtype}")
    return code


def target_code(dtype: Any, argument: str = "target") -> int:
    code = INTEGERS.get(name_of(dtype))
    if code is None:
        raise TypeError(f"{argument}: expected {INTEGERS_TEXT}, got {dtype}")
    return code


def check_float64(float64: Any, input: Any, linear_weight: Any, linear_bias: Any) -> None:
    """That of tensors (torch.float64) or arrays (numpy.float64) all are float64 or none is; a bias may be None."""
    wide = input.dtype == float64
    for name, operand in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if operand is not None and (operand.dtype == float64) != wide:
            raise TypeError(
                f"{name}: expected float64 for all of input, linear_weight and linear_bias or for none, "
                f"got {operand.dtype} with input {input.dtype}"
            )
