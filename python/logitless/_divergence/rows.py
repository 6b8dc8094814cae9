"""The library's kernel over the products of some rows (include/logitless/divergence.h)."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..run import CODES, stream_of


class Options(NamedTuple):
    """Numbers of the formula; a softcap of 0 is none."""

    beta: float
    temperature: float
    student_scale: float
    student_softcap: float
    teacher_scale: float
    teacher_softcap: float


class RowNumbers(NamedTuple):
    """What the values of rows are and what their gradients need, each ``[rows]``, of the products' dtype."""

    divergence: Tensor
    entropy: Tensor
    student_lse: Tensor
    teacher_lse: Tensor
    student_kl: Tensor

    def rows(self, part: slice) -> RowNumbers:
        return RowNumbers(*(numbers[part] for numbers in self))

    @staticmethod
    def empty(rows: int, like: Tensor) -> RowNumbers:
        return RowNumbers(*like.new_empty((len(RowNumbers._fields), rows)).unbind())


class Biases(NamedTuple):
    """Of all columns, in the products' dtype; None: none."""

    student: Tensor | None
    teacher: Tensor | None

    def columns(self, part: slice) -> Biases:
        return Biases(*(None if bias is None else bias[part] for bias in self))


class Products(NamedTuple):
    """Of hidden states and weights, ``[rows, columns]`` of each head."""

    student: Tensor
    teacher: Tensor

    def part(self, rows: int, columns: int) -> Products:
        """The first ones."""
        return Products(*(products[:rows, :columns] for products in self))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _run(stage: int, products: Products, biases: Biases, options: Options, **more: Any) -> None:
    student, teacher = products
    given: Any = native.Divergence(stage=stage, dtype=CODES[student.dtype])
    given.rows, given.columns = student.shape
    given.student, given.student_stride = student.data_ptr(), student.stride(0)
    given.teacher, given.teacher_stride = teacher.data_ptr(), teacher.stride(0)
    given.student_bias, given.teacher_bias = _address(biases.student), _address(biases.teacher)
    for name, value in (options._asdict() | more).items():
        setattr(given, name, value)
    on_host = student.device.type == "cpu"
    place = (torch.get_num_threads(), None, native.HOST) if on_host else (1, None, student.device.index)
    stream = None if on_host else stream_of(student.device.index)
    native.check(
        native.library().logitless_divergence_run(native._context(*place).pointer, ctypes.byref(given), stream)
    )


def write_values(products: Products, biases: Biases, options: Options, out: RowNumbers) -> None:
    """From the products ``[rows, V]`` of both heads to numbers of the rows."""
    numbers = {name: tensor.data_ptr() for name, tensor in out._asdict().items()}
    _run(native.DIVERGENCE_VALUES, products, biases, options, **numbers)


def write_gradient(
    products: Products, biases: Biases, options: Options, numbers: RowNumbers, grad: Tensor, out: Tensor
) -> None:
    """From the products ``[rows, columns]`` of any columns to the gradient of the student's logits before the softcap.

    grad: upstream of the divergence, ``[rows]``; out: ``[rows, columns]``, which may be the student's products.
    """
    known = {name: getattr(numbers, name).data_ptr() for name in ("student_lse", "teacher_lse", "student_kl")}
    _run(
        native.DIVERGENCE_GRADIENT,
        products,
        biases,
        options,
        **known,
        grad=grad.data_ptr(),
        d_logits=out.data_ptr(),
        d_logits_stride=out.stride(0),
        gradient_dtype=CODES[out.dtype],
    )
