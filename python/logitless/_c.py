"""The C ABI (include/logitless/) through ctypes: struct mirrors, function prototypes, status to exception.

ctypes releases the GIL during every call. tests/python compares the mirrors with the header.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Iterable
from ctypes import c_char, c_char_p, c_double, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

from . import errors

F32, BF16, F16, F64, I32, I64 = range(6)
REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
GRADIENTS = {"exact": 0, "thinned": 1, "always-thinned": 2}
FORWARD, BACKWARD, FORWARD_BACKWARD = range(3)
DIVERGENCE_VALUES, DIVERGENCE_GRADIENT = range(2)
OK, BUDGET_TOO_SMALL = 0, 3

LIBRARY_VARIABLE = "LOGITLESS_LIBRARY"


class ContextOptions(ctypes.Structure):
    """logitless_context_options"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_char_p),
        ("isa", c_char_p),
        ("threads", c_int32),
        ("parallel_for", c_void_p),
        ("pool", c_void_p),
        ("device", c_int32),
        ("device_model", c_char_p),
    ]


class Problem(ctypes.Structure):
    """logitless_problem"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("pass", c_int32),
        ("reduction", c_int32),
        ("tokens", c_int64),
        ("vocab", c_int64),
        ("hidden", c_int64),
        ("vocab_start", c_int64),
        ("vocab_total", c_int64),
        ("hidden_dtype", c_int32),
        ("classifier_dtype", c_int32),
        ("bias_dtype", c_int32),
        ("target_dtype", c_int32),
        ("d_hidden_dtype", c_int32),
        ("d_classifier_dtype", c_int32),
        ("d_bias_dtype", c_int32),
        ("has_bias", c_int32),
        ("has_class_weight", c_int32),
        ("has_token_weight", c_int32),
        ("scale", c_double),
        ("softcap", c_double),
        ("label_smoothing", c_double),
        ("z_loss", c_double),
        ("num_items", c_double),
        ("ignore_index", c_int64),
        ("shift", c_int64),
        ("sequence_length", c_int64),
        ("want_entropy", c_int32),
        ("want_argmax", c_int32),
        ("want_d_hidden", c_int32),
        ("want_d_classifier", c_int32),
        ("want_d_bias", c_int32),
        ("has_grad_nll", c_int32),
        ("has_grad_lse", c_int32),
        ("has_grad_entropy", c_int32),
        ("accumulate_d_hidden", c_int32),
        ("accumulate_d_classifier", c_int32),
        ("accumulate_d_bias", c_int32),
        ("unaligned_rows", c_int32),
        ("max_workspace_bytes", c_size_t),
        ("gradient", c_int32),
        ("keeps_draws", c_int32),
        ("threshold", c_double),
        ("seed", c_int64),
        ("compute_dtype", c_int32),
        ("allow_tf32", c_int32),
        ("has_temperature", c_int32),
        ("temperature", c_double),
        ("want_mean_logit", c_int32),
        ("want_log_sum_sq_probs", c_int32),
        ("has_grad_target_logit", c_int32),
        ("batch_invariant", c_int32),
        ("top_k", c_int64),
        ("group_size", c_int32),
        ("group_d_hidden", c_int32),
        ("group_vocab", c_int64),
        ("targets_per_row", c_int64),
    ]


class Buffers(ctypes.Structure):
    """logitless_buffers"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("hidden", c_void_p),
        ("hidden_stride", c_int64),
        ("classifier", c_void_p),
        ("classifier_stride", c_int64),
        ("bias", c_void_p),
        ("targets", c_void_p),
        ("class_weight", c_void_p),
        ("token_weight", c_void_p),
        ("grad_loss", c_void_p),
        ("grad_nll", c_void_p),
        ("grad_lse", c_void_p),
        ("grad_entropy", c_void_p),
        ("max", c_void_p),
        ("sum_exp", c_void_p),
        ("target_logit", c_void_p),
        ("sum_exp_logit", c_void_p),
        ("weighted_logit_sum", c_void_p),
        ("loss", c_void_p),
        ("nll", c_void_p),
        ("lse", c_void_p),
        ("entropy", c_void_p),
        ("argmax", c_void_p),
        ("correct_count", c_void_p),
        ("valid_count", c_void_p),
        ("d_hidden", c_void_p),
        ("d_hidden_stride", c_int64),
        ("d_classifier", c_void_p),
        ("d_classifier_stride", c_int64),
        ("d_bias", c_void_p),
        ("invalid_targets", c_void_p),
        ("num_items", c_void_p),
        ("draws", c_void_p),
        ("seed", c_void_p),
        ("kept_count", c_void_p),
        ("draw_variance", c_void_p),
        ("lse_low", c_void_p),
        ("temperature", c_void_p),
        ("grad_target_logit", c_void_p),
        ("logit_sum", c_void_p),
        ("sum_sq_exp", c_void_p),
        ("mean_logit", c_void_p),
        ("log_sum_sq_probs", c_void_p),
        ("max_logit", c_void_p),
        ("is_top1", c_void_p),
        ("top_ids", c_void_p),
        ("top_log_probs", c_void_p),
        ("target_weight", c_void_p),
        ("target_log_probs", c_void_p),
    ]


class PlanInfo(ctypes.Structure):
    """logitless_plan_info"""

    _fields_ = [
        ("struct_size", c_size_t),
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


# Of logitless/distributed.h. Data (and what is received), count, dtype, stream, host.
ALL_GATHER = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_void_p)
ALL_REDUCE = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int64, c_int32, c_void_p, c_void_p)


class Communicator(ctypes.Structure):
    """logitless_communicator"""

    _fields_ = [
        ("struct_size", c_size_t),
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
        ("struct_size", c_size_t),
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


_STRUCTS = {
    "logitless_context_options": ContextOptions,
    "logitless_problem": Problem,
    "logitless_buffers": Buffers,
    "logitless_plan_info": PlanInfo,
    "logitless_communicator": Communicator,
    "logitless_divergence": Divergence,
}


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
    prototypes = {
        "version": (c_char_p, []),
        "plan_kind_name": (c_char_p, [c_int32]),
        "last_error": (c_char_p, []),
        "backend_count": (c_int32, []),
        "backend_name": (c_char_p, [c_int32]),
        "backend_info": (c_int32, [c_int32, c_char_p, c_size_t, c_char_p, c_size_t]),
        "context_create": (c_int32, [ctypes.POINTER(ContextOptions), ctypes.POINTER(c_void_p)]),
        "context_destroy": (None, [c_void_p]),
        "plan_create": (c_int32, [c_void_p, ctypes.POINTER(Problem), ctypes.POINTER(c_void_p)]),
        "plan_destroy": (None, [c_void_p]),
        "plan_get_info": (c_int32, [c_void_p, ctypes.POINTER(PlanInfo)]),
        "plan_list": (
            c_int32,
            [c_void_p, ctypes.POINTER(Problem), ctypes.POINTER(PlanInfo), c_int32, ctypes.POINTER(c_int32)],
        ),
        "scale_gradients": (c_int32, [c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
        "divergence_run": (c_int32, [c_void_p, ctypes.POINTER(Divergence), c_void_p]),
        "run": (c_int32, [c_void_p, ctypes.POINTER(Buffers), c_void_p, c_size_t, c_void_p]),
        "run_group": (
            c_int32,
            [c_void_p, ctypes.POINTER(Buffers), c_void_p, c_size_t, c_void_p, ctypes.POINTER(Communicator)],
        ),
    }
    for name, (result, arguments) in prototypes.items():
        function = getattr(lib, f"logitless_{name}")
        function.restype = result
        function.argtypes = arguments
    for name in _STRUCTS:
        init = getattr(lib, f"{name}_init_sized")
        init.restype = None
        init.argtypes = [c_void_p, c_size_t]
    return lib


def _load_before_fork() -> None:
    """A child must not use the OpenMP threads of its parent, which it does not have: the library watches for forks."""
    try:
        library()
    except errors.LibraryNotFoundError:
        pass  # said where the library is used


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_load_before_fork)


def make(struct_name: str) -> ctypes.Structure:
    """A struct of the ABI with its defaults, such as ``make("logitless_problem")``."""
    struct = _STRUCTS[struct_name]()
    getattr(library(), f"{struct_name}_init_sized")(ctypes.byref(struct), ctypes.sizeof(struct))
    return struct


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
    message = library().logitless_last_error().decode(errors="replace")
    if status == BUDGET_TOO_SMALL:
        found = re.search(r"at least (\d+)", message)
        raise errors.BudgetTooSmallError(message, int(found.group(1)) if found else None)
    raise _ERRORS.get(status, errors.InternalError)(message)
