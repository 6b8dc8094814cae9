"""The C ABI (include/logitless/) through ctypes: the library's own lists of options and tensors, mirrors of its small
structs, function prototypes, status to exception.

ctypes releases the GIL during every call. tests/python compares the mirrors with the headers.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
from collections.abc import Iterable
from ctypes import c_char, c_char_p, c_double, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from . import errors

F32, BF16, F16, F64, I32, I64 = range(6)
REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
GRADIENTS = {"exact": 0, "thinned": 1, "always-thinned": 2}
FORWARD, BACKWARD, FORWARD_BACKWARD = range(3)
DIVERGENCE_VALUES, DIVERGENCE_GRADIENT = range(2)
OK, BUDGET_TOO_SMALL = 0, 3
ABI_VERSION = 1

LIBRARY_VARIABLE = "LOGITLESS_LIBRARY"


class ContextOptions(ctypes.Structure):
    """logitless_context_options"""

    _fields_ = [
        ("backend", c_char_p),
        ("isa", c_char_p),
        ("threads", c_int32),
        ("parallel_for", c_void_p),
        ("pool", c_void_p),
        ("device", c_int32),
        ("device_model", c_char_p),
    ]


class Option(ctypes.Structure):
    """logitless_option"""

    _fields_ = [("id", c_int32), ("integer", c_int64), ("real", c_double)]


class TensorDesc(ctypes.Structure):
    """logitless_tensor_desc"""

    _fields_ = [("id", c_int32), ("dtype", c_int32), ("accumulate", c_int32)]


class ErrorInfo(ctypes.Structure):
    """logitless_error_info"""

    _fields_ = [
        ("status", c_int32),
        ("argument", c_char_p),
        ("expected", c_char_p),
        ("got", c_char_p),
        ("required_bytes", c_size_t),
        ("row", c_int64),
    ]


class PlanInfo(ctypes.Structure):
    """logitless_plan_info"""

    _fields_ = [
        ("kind", c_int32),
        ("threads", c_int32),
        ("workspace_bytes", c_size_t),
        ("cost_f", c_double),
        ("predicted_seconds", c_double),
        ("token_chunk", c_int64),
        ("backend", c_char * 32),
        ("config", c_char * 128),
        ("draws_bytes", c_size_t),
        ("implementation", c_char * 32),
        ("reason", c_char * 128),
        ("kept_columns", c_int64),
        ("vocab_window", c_int64),
        ("gathers", c_int64),
        ("gathered_bytes", c_size_t),
        ("reduced_bytes", c_size_t),
        ("choice", c_char * 96),
    ]


# Functions of logitless/distributed.h take data (and what is received), count, dtype, stream, host.
ALL_GATHER = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_void_p)
ALL_REDUCE = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int64, c_int32, c_void_p, c_void_p)


class Communicator(ctypes.Structure):
    """logitless_communicator"""

    _fields_ = [
        ("rank", c_int32),
        ("size", c_int32),
        ("host", c_void_p),
        ("all_gather", ALL_GATHER),
        ("all_reduce", ALL_REDUCE),
        ("reduce_scatter", ALL_GATHER),
    ]


class Divergence(ctypes.Structure):
    """logitless_divergence"""

    _fields_ = [
        ("stage", c_int32),
        ("dtype", c_int32),
        ("gradient_dtype", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("beta", c_double),
        ("temperature", c_double),
        ("student_scale", c_double),
        ("student_softcap", c_double),
        ("teacher_scale", c_double),
        ("teacher_softcap", c_double),
        ("student", c_void_p),
        ("student_stride", c_int64),
        ("teacher", c_void_p),
        ("teacher_stride", c_int64),
        ("student_bias", c_void_p),
        ("teacher_bias", c_void_p),
        ("student_lse", c_void_p),
        ("teacher_lse", c_void_p),
        ("student_kl", c_void_p),
        ("divergence", c_void_p),
        ("entropy", c_void_p),
        ("grad", c_void_p),
        ("d_logits", c_void_p),
        ("d_logits_stride", c_int64),
    ]


def _library_name() -> str:
    if sys.platform == "win32":
        return "logitless.dll"
    if sys.platform == "darwin":
        return "liblogitless.dylib"
    return "liblogitless.so"


def package_folders() -> Iterable[Path]:
    """Of this package: an editable installation has the Python modules in one and the native library in another."""
    return [Path(folder).resolve() for folder in sys.modules[__package__ or ""].__path__]


def library_path() -> Path:
    """The file of the native library: ``LOGITLESS_LIBRARY`` when it is set, else the one inside this package."""
    override = os.environ.get(LIBRARY_VARIABLE)
    if override:
        path = Path(override)
        if not path.is_file():
            raise errors.LibraryNotFoundError(f"{LIBRARY_VARIABLE}: expected the path of the library, got {override}")
        return path
    name, folders = _library_name(), package_folders()
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise errors.LibraryNotFoundError(
        f"the native library {name} is not in {' or '.join(map(str, folders))}: install the package with pip, "
        f"or point {LIBRARY_VARIABLE} at a build of it"
    )


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise errors.LibraryNotFoundError(
            f"the native library {path} cannot be loaded (a library that it needs may be missing): {error}"
        ) from error


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Loads the library once and declares its functions."""
    lib = _load(library_path())
    plan_of = [ctypes.POINTER(Option), c_size_t, ctypes.POINTER(TensorDesc), c_size_t]
    prototypes = {
        "version": (c_char_p, []),
        "plan_kind_name": (c_char_p, [c_int32]),
        "abi_version": (c_int32, []),
        "schema": (c_char_p, []),
        "last_error": (c_char_p, []),
        "last_error_info": (None, [ctypes.POINTER(ErrorInfo)]),
        "backend_count": (c_int32, []),
        "backend_name": (c_char_p, [c_int32]),
        "backend_info": (c_int32, [c_int32, c_char_p, c_size_t, c_char_p, c_size_t]),
        "context_create": (c_int32, [ctypes.POINTER(ContextOptions), ctypes.POINTER(c_void_p)]),
        "context_destroy": (None, [c_void_p]),
        "plan_create": (c_int32, [c_void_p, *plan_of, ctypes.POINTER(c_void_p)]),
        "plan_destroy": (None, [c_void_p]),
        "plan_get_info": (c_int32, [c_void_p, ctypes.POINTER(PlanInfo)]),
        "plan_list": (
            c_int32,
            [c_void_p, *plan_of, ctypes.POINTER(PlanInfo), c_int32, ctypes.POINTER(c_int32)],
        ),
        "scale_gradients": (c_int32, [c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
        "divergence_run": (c_int32, [c_void_p, ctypes.POINTER(Divergence), c_void_p]),
        "run": (c_int32, [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p]),
        "run_group": (
            c_int32,
            [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, ctypes.POINTER(Communicator)],
        ),
    }
    for name, (result, arguments) in prototypes.items():
        function = getattr(lib, f"logitless_{name}")
        function.restype = result
        function.argtypes = arguments
    version = lib.logitless_abi_version()
    if version != ABI_VERSION:
        raise errors.LibraryNotFoundError(f"{lib._name}: expected version {ABI_VERSION} of the ABI, got {version}")
    return lib


class Schema:
    """Options and tensors as the library lists them.

    Attributes:
        options: by name, each with id, name, type, default, doc, and its range (lowest, highest) or values.
        tensors: by name, each with id, name, shape, dtype, role, matrix, planned, null, needed and doc.
        Buffers: a ctypes structure with a pointer a tensor, and a stride a matrix, by name. Its memory is the array
            of ``logitless_tensor`` that a run takes.
    """

    def __init__(self, text: bytes) -> None:
        lists = json.loads(text)
        self.options: dict[str, dict[str, Any]] = {option["name"]: option for option in lists["options"]}
        self.tensors: dict[str, dict[str, Any]] = {tensor["name"]: tensor for tensor in lists["tensors"]}
        fields = []
        for name in self.tensors:
            fields += [(f"_{name}_id", c_int64), (name, c_void_p), (f"{name}_stride", c_int64)]
        self.Buffers: type[ctypes.Structure] = type("Buffers", (ctypes.Structure,), {"_fields_": fields})

    def buffers(self) -> ctypes.Structure:
        made = self.Buffers()
        for name, tensor in self.tensors.items():
            setattr(made, f"_{name}_id", tensor["id"] if sys.byteorder == "little" else tensor["id"] << 32)
        return made


@functools.lru_cache(maxsize=1)
def schema() -> Schema:
    """Reads the lists once."""
    return Schema(library().logitless_schema())


def _load_before_fork() -> None:
    """A child must not use the OpenMP threads of its parent, which it does not have: the library watches for forks."""
    try:
        library()
    except errors.LibraryNotFoundError:
        pass  # said where the library is used


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_load_before_fork)


def make(struct_name: str) -> ctypes.Structure:
    """What a call takes, with its defaults: ``logitless_buffers``, or a struct of the ABI by its name."""
    if struct_name == "logitless_buffers":
        return schema().buffers()
    struct, defaults = _MADE[struct_name]
    return struct(**defaults)


_MADE: dict[str, tuple[type[ctypes.Structure], dict[str, float]]] = {
    "logitless_context_options": (ContextOptions, {"device": -1}),
    "logitless_plan_info": (PlanInfo, {}),
    "logitless_communicator": (Communicator, {"size": 1}),
    "logitless_divergence": (Divergence, {"temperature": 1, "student_scale": 1, "teacher_scale": 1}),
}

_ERRORS: dict[int, type[errors.LogitlessError]] = {
    1: errors.InvalidArgumentError,
    2: errors.InvalidTargetError,
    BUDGET_TOO_SMALL: errors.BudgetTooSmallError,
    4: errors.UnsupportedError,
    5: errors.BackendUnavailableError,
    6: errors.OutOfMemoryError,
    7: errors.InternalError,
    8: errors.CommunicationError,
}


def check(status: int) -> None:
    """Raises the exception of a failed call. The message is the calling thread's own."""
    if status == OK:
        return
    lib, info = library(), ErrorInfo()
    lib.logitless_last_error_info(ctypes.byref(info))
    message = lib.logitless_last_error().decode(errors="replace")
    error = _ERRORS.get(status, errors.InternalError)(message)
    error.argument, error.expected, error.got = (
        text.decode(errors="replace") for text in (info.argument, info.expected, info.got)
    )
    error.required_bytes = info.required_bytes or None
    error.row = info.row if info.row >= 0 else None
    raise error
