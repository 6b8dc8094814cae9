"""The C ABI (include/logitless/) through ctypes: the library, its structs and prototypes, contexts, plans and runs.

ctypes releases the GIL during every call. tests/python compares the mirrors with the header. Contexts and plans are
cached, as they depend on shapes, dtypes and options, not on data. Several threads may use them at once. They also work
after a fork: they hold no threads, and in a forked process the library starts new threads for each parallel loop.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_char, c_char_p, c_double, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, Generic, TypeVar

from . import errors
from .errors import BudgetTooSmallError, InvalidArgumentError, LogitlessError

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

DIVERGENCE_VALUES, DIVERGENCE_GRADIENT, DIVERGENCE_SUMS, DIVERGENCE_TERMS = range(4)
OK = 0
ABI_VERSION = 1

LIBRARY_VARIABLE = "LOGITLESS_LIBRARY"

# Hugging Face's kernels imports this package under another name. What the whole process sees, such as operators, has
# names that derive from the package's, so that two copies work side by side.
PACKAGE = __name__.rpartition(".")[0]
NAMESPACE = PACKAGE.replace(".", "_")


# Functions of logitless/distributed.h: data (and where to receive), count, dtype, stream, host.
ALL_GATHER = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_void_p)
ALL_REDUCE = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int64, c_int32, c_void_p, c_void_p)
PROGRESS = ctypes.CFUNCTYPE(c_int32, c_double, c_void_p)

_TYPES: dict[str, Any] = {
    "int32": c_int32,
    "int64": c_int64,
    "size": c_size_t,
    "double": c_double,
    "char": c_char,
    "text": c_char_p,
    "pointer": c_void_p,
    "none": None,
    "all_gather": ALL_GATHER,
    "all_reduce": ALL_REDUCE,
    "progress": PROGRESS,
}


def _fields(declarations: str) -> list[tuple[str, Any]]:
    """Parses the fields of a C struct, ``"int32 rank, size; char name[32]"``, with the type names of _TYPES."""
    fields = []
    for declaration in declarations.split(";"):
        kind, names = declaration.split(maxsplit=1)
        for name in names.split(","):
            name, _, size = name.strip(" \n]").partition("[")
            fields.append((name, _TYPES[kind] * int(size) if size else _TYPES[kind]))
    return fields


class ContextOptions(ctypes.Structure):
    """logitless_context_options"""

    _fields_ = _fields(
        "text backend, engine; int32 threads; pointer parallel_for, pool; int32 device; text device_model"
    )


class Option(ctypes.Structure):
    """logitless_option"""

    _fields_ = _fields("int32 id; int64 integer; double real")


class TensorDesc(ctypes.Structure):
    """logitless_tensor_desc"""

    _fields_ = _fields("int32 id, dtype, accumulate")


class ErrorInfo(ctypes.Structure):
    """logitless_error_info"""

    _fields_ = _fields("int32 status; text argument, expected, got; size required_bytes; int64 row")


class PlanInfoStruct(ctypes.Structure):
    """logitless_plan_info"""

    _fields_ = _fields(
        """int32 kind, threads; size workspace_bytes; double cost_matmuls, predicted_seconds; int64 token_chunk;
        char backend[32], config[128]; size saved_bytes; char engine[32], reason[128];
        int64 cached_columns, vocab_window, gathers; size gathered_bytes, reduced_bytes; char choice[96];
        size screen_weight_bytes"""
    )


class TuneOptions(ctypes.Structure):
    """logitless_tune_options"""

    _fields_ = _fields(
        """int32 device; pointer heads; size head_count; double seconds; text path; progress progress;
        pointer progress_data"""
    )


class Communicator(ctypes.Structure):
    """logitless_communicator"""

    _fields_ = _fields(
        "int32 rank, size; pointer host; all_gather all_gather; all_reduce all_reduce; all_gather reduce_scatter"
    )


class Divergence(ctypes.Structure):
    """logitless_divergence"""

    _fields_ = _fields(
        """int32 stage, dtype, gradient_dtype; int64 rows, columns; double beta, temperature;
        double student_scale, student_softcap, teacher_scale, teacher_softcap;
        pointer student; int64 student_stride; pointer teacher; int64 teacher_stride;
        pointer student_bias, teacher_bias, student_lse, teacher_lse, student_kl, divergence, entropy, grad;
        pointer d_logits; int64 d_logits_stride"""
    )


class DivergenceProblem(ctypes.Structure):
    """logitless_divergence_problem"""

    _fields_ = _fields(
        """int32 pass, want_d_hidden, want_d_weight, want_d_bias; int64 rows, vocab, ranks;
        int64 student_width, teacher_width; int32 student_hidden_dtype, student_weight_dtype, student_product_dtype;
        int32 teacher_hidden_dtype, teacher_weight_dtype, teacher_product_dtype;
        int32 rounded_dtype, gathers_rows, copied_biases; size max_workspace_bytes"""
    )


class DivergenceTiles(ctypes.Structure):
    """logitless_divergence_tiles"""

    _fields_ = _fields("int64 rows, window, hidden_sums, weight_sums; size workspace_bytes")

    rows: int
    window: int
    hidden_sums: int
    weight_sums: int


class SampleNoise(ctypes.Structure):
    """logitless_sample_noise"""

    _fields_ = _fields("int64 rows, columns, sample; int32 has_seeds_of_rows; pointer seed, row_numbers, ids, noise")


_FILES = {"win32": "logitless.dll", "darwin": "liblogitless.dylib"}


def package_folders() -> Iterable[Path]:
    """Returns this package's folders. An editable installation has modules in one, the native library in another."""
    return [Path(folder).resolve() for folder in sys.modules[__package__ or ""].__path__]


def library_path() -> Path:
    """Returns the file of the native library: ``LOGITLESS_LIBRARY`` if set, else the file in this package."""
    override = os.environ.get(LIBRARY_VARIABLE)
    if override:
        path = Path(override)
        if not path.is_file():
            raise errors.LibraryNotFoundError(f"{LIBRARY_VARIABLE}: expected the path of the library, got {override}")
        return path
    name, folders = _FILES.get(sys.platform, "liblogitless.so"), package_folders()
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise errors.LibraryNotFoundError(
        f"the native library {name} is not in {' or '.join(map(str, folders))}: install the package with pip, "
        f"or point {LIBRARY_VARIABLE} at a build of it"
    )


_FUNCTIONS = {  # types of result and arguments
    "version": "text",
    "plan_kind_name": "text int32",
    "abi_version": "int32",
    "schema": "text",
    "last_error": "text",
    "last_error_info": "none pointer",
    "backend_count": "int32",
    "backend_name": "text int32",
    "backend_info": "int32 int32 text size text size",
    "context_create": "int32 pointer pointer",
    "context_destroy": "none pointer",
    "plan_create": "int32 pointer pointer size pointer size pointer",
    "plan_destroy": "none pointer",
    "plan_get_info": "int32 pointer pointer",
    "plan_list": "int32 pointer pointer size pointer size pointer int32 pointer",
    "scale_gradients": "int32 pointer int32 pointer pointer pointer pointer pointer",
    "candidates_workspace_bytes": "int32 pointer pointer pointer",
    "candidates_run": "int32 pointer pointer pointer size pointer",
    "divergence_plan": "int32 pointer pointer pointer pointer",
    "divergence_run": "int32 pointer pointer pointer",
    "sample_noise_run": "int32 pointer pointer pointer",
    "run": "int32 pointer pointer size pointer size pointer",
    "tune": "int32 pointer pointer",
    "run_group": "int32 pointer pointer size pointer size pointer pointer",
}


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Loads the library once and declares its functions."""
    path = library_path()
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise errors.LibraryNotFoundError(
            f"the native library {path} cannot be loaded (a library that it needs may be missing): {error}"
        ) from error
    for name, types in _FUNCTIONS.items():
        function = getattr(lib, f"logitless_{name}")
        function.restype, *function.argtypes = [_TYPES[kind] for kind in types.split()]
    version = lib.logitless_abi_version()
    if version != ABI_VERSION:
        raise errors.LibraryNotFoundError(f"{lib._name}: expected version {ABI_VERSION} of the ABI, got {version}")
    return lib


class Schema:
    """The library's lists of options and tensors.

    Attributes:
        options: By name: id, name, type, default, doc, and a range (lowest, highest) or values.
        tensors: By name: id, name, shape, dtype, role, matrix, planned, null, needed and doc.
        Buffers: A ctypes structure with a pointer for each tensor and a stride for each matrix, by name. Its memory is
            the array of ``logitless_tensor`` that a run takes.
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
    """Loads the library before a fork, as it must watch for forks: a child lacks its parent's OpenMP threads."""
    try:
        library()
    except errors.LibraryNotFoundError:
        pass  # reported where the library is used


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_load_before_fork)


_ERRORS: dict[int, type[errors.LogitlessError]] = {
    1: errors.InvalidArgumentError,
    2: errors.InvalidTargetError,
    3: errors.BudgetTooSmallError,
    4: errors.UnsupportedError,
    5: errors.BackendUnavailableError,
    6: errors.OutOfMemoryError,
    8: errors.CommunicationError,
}


def check(status: int) -> None:
    """Raises the exception of a failed call. The library keeps a last error for each thread."""
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


class Cache(Generic[K, V]):
    """Holds at least the ``size`` values used last, and at most twice as many.

    A used value moves from the old half to the young half. A full young half becomes the old one. Threads may use it at
    once; at worst a value is made twice.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: K) -> V | None:
        value = self._young.get(key)
        if value is None:
            value = self._old.pop(key, None)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        if len(self._young) >= self._size:
            self._old, self._young = self._young, {}
        self._young[key] = value


HOST = -1  # the device of host memory; CUDA devices have their ordinals


@dataclasses.dataclass(frozen=True)
class Spec:
    """All that a plan depends on beside the context, by the names of options.def and tensors.def.

    Attributes:
        options: Numbers and flags by value, choices by number or text.
        tensors: The tensors that a run reads and writes, with their logitless_dtype. It is ignored for a tensor
            that has only one.
        added: Gradients that a run adds to.
    """

    options: tuple[tuple[str, Any], ...]
    tensors: tuple[tuple[str, int], ...]
    added: tuple[str, ...] = ()

    def with_options(self, **options: Any) -> Spec:
        return dataclasses.replace(self, options=tuple((dict(self.options) | options).items()))

    def to_c(self) -> tuple[Any, int, Any, int]:
        """Returns options and tensor descriptors as logitless_plan_create takes them."""
        lists = schema()
        options, tensors = [], []
        for name, value in self.options:
            option = lists.options[name]
            if option["type"] == "real":
                options.append(Option(option["id"], 0, value))
            else:
                number = option["values"].index(value) if isinstance(value, str) else int(value)
                options.append(Option(option["id"], number, 0))
        for name, dtype in self.tensors:
            tensor = lists.tensors[name]
            has_several = tensor["dtype"] in ("FLOAT", "INDEX")
            tensors.append(TensorDesc(tensor["id"], dtype if has_several else 0, name in self.added))
        return (Option * len(options))(*options), len(options), (TensorDesc * len(tensors))(*tensors), len(tensors)


def spec(sizes: tuple[int, int, int], tensors: Mapping[str, int], added: Iterable[str] = (), **options: Any) -> Spec:
    """Returns a problem.

    sizes: tokens, vocab, hidden. tensors: dtype codes, including those of hidden, weight and targets. options: by the
    library's names, with ``pass_`` for ``pass``.
    """
    named = zip(("tokens", "vocab", "hidden"), sizes)
    given = {name.rstrip("_"): value for name, value in options.items()}
    return Spec((*named, *given.items()), tuple(tensors.items()), tuple(added))


@dataclasses.dataclass(frozen=True)
class PlanInfo:
    """A plan of one problem.

    Attributes:
        kind: ``forward``, ``whole``, ``token_chunks``, ``vocab_chunks``, ``backward`` or ``sparsified``.
        backend: The backend that runs it.
        threads: The number of threads: the requested one, or fewer if the problem is too small for them.
        workspace_bytes: The exact memory beyond inputs and outputs.
        cost_matmuls: The work in matmuls of the problem, of 2 N V D FLOP each.
        predicted_seconds: The planner's estimate of the time.
        token_chunk: Rows whose exp logits are kept at one time; 0 means none.
        config: The kernels' configuration, for people.
        engine: The engine, by the name in ``backend="cpu:NAME"`` or ``"cuda:NAME"``.
        reason: Why this engine was chosen, for people.
        saved_bytes: Memory that a forward pass keeps for a later backward pass: exp logits or drawn elements.
        cached_columns: The first columns of the vocabulary, whose exp logits are kept for the gradients; 0 means none.
        vocab_window: Columns beyond these whose logits exist at one time; 0 means that they are not cut.
        gathers: All-gathers in a run of a group of ranks: of row statistics, lse estimates and, on the host, cuts.
        gathered_bytes: Bytes that these bring to each rank.
        choice: Why the plan was chosen among others, for people; empty in lists of plans.
        screen_weight_bytes: Memory of a :class:`logitless.ScreenedWeight`, which a budget limits together with the
            workspace.
    """

    kind: str
    backend: str
    threads: int
    workspace_bytes: int
    cost_matmuls: float
    predicted_seconds: float
    token_chunk: int
    config: str
    engine: str
    reason: str
    saved_bytes: int = 0
    cached_columns: int = 0
    vocab_window: int = 0
    gathers: int = 0
    gathered_bytes: int = 0
    choice: str = ""
    screen_weight_bytes: int = 0


def _to_info(info: Any) -> PlanInfo:
    fields: dict[str, Any] = {field.name: getattr(info, field.name) for field in dataclasses.fields(PlanInfo)}
    fields["kind"] = library().logitless_plan_kind_name(info.kind)
    fields = {name: value.decode() if isinstance(value, bytes) else value for name, value in fields.items()}
    return PlanInfo(**fields)


class _Handle:
    """Owns an object of the library."""

    _destroy: Any = None  # set once there is an object to destroy

    def __init__(self, pointer: ctypes.c_void_p, destroy: Any) -> None:
        self.pointer = pointer
        self._destroy = destroy

    def __del__(self) -> None:
        if self._destroy is not None:
            self._destroy(self.pointer)


@functools.lru_cache(maxsize=64)
def _context(threads: int, backend: str | None, device: int | str) -> _Handle:
    lib = library()
    options = ContextOptions(threads=threads, device=HOST)
    if isinstance(device, str):
        options.device_model = device.encode()
    else:
        options.device = device
    name, _, engine = (backend or "").partition(":")
    options.backend, options.engine = (text.encode() or None for text in (name, engine))
    pointer = ctypes.c_void_p()
    try:
        check(lib.logitless_context_create(ctypes.byref(options), ctypes.byref(pointer)))
    except LogitlessError as error:
        if error.argument != "device_model":
            raise
        expected = f'"cpu", "cuda", "cuda:N" or a model, {error.expected}'
        raise InvalidArgumentError(f"device: expected {expected}; got {device!r}") from None
    return _Handle(pointer, lib.logitless_context_destroy)


class Plan(_Handle):
    """A logitless_plan, which copies all that it needs from its context."""

    def __init__(self, spec: Spec, threads: int, backend: str | None = None, device: int | str = HOST) -> None:
        lib = library()
        pointer = ctypes.c_void_p()
        context = _context(threads, backend, device)
        check(lib.logitless_plan_create(context.pointer, *spec.to_c(), ctypes.byref(pointer)))
        super().__init__(pointer, lib.logitless_plan_destroy)
        info = PlanInfoStruct()
        check(lib.logitless_plan_get_info(pointer, ctypes.byref(info)))
        self.info = _to_info(info)


@functools.lru_cache(maxsize=256)
def plan_of(spec: Spec, threads: int, backend: str | None = None, device: int | str = HOST) -> Plan:
    return Plan(spec, threads, backend, device)


def enough(*passes: Callable[[], T]) -> list[T]:
    """Makes every plan within one budget. If it is too small, raises the error with the largest required_bytes."""
    made, refused = [], None
    for make in passes:
        try:
            made.append(make())
        except BudgetTooSmallError as error:
            if refused is None or (error.required_bytes or 0) > (refused.required_bytes or 0):
                refused = error
    if refused is not None:
        raise refused
    return made


def list_plans(spec: Spec, threads: int, backend: str | None = None, device: int | str = HOST) -> list[PlanInfo]:
    """Returns all plans that the planner considers for a problem."""
    capacity = 64
    infos: Any = (PlanInfoStruct * capacity)()
    count = ctypes.c_int32()
    context = _context(threads, backend, device)
    status = library().logitless_plan_list(context.pointer, *spec.to_c(), infos, capacity, ctypes.byref(count))
    check(status)
    return [_to_info(infos[i]) for i in range(min(count.value, capacity))]


class Workspace:
    """Page-aligned memory of one run, returned to the system with this object.

    Huge pages save most of the page faults of a fresh allocation, where the system grants them on request.
    """

    _HUGE = 4 << 20

    def __init__(self, size: int) -> None:
        self.address: int | None = None
        if size == 0:
            return
        if sys.platform == "win32":
            self._memory = mmap.mmap(-1, size)
        else:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if size >= self._HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._view)


def run(
    plan: Plan,
    buffers: ctypes.Structure,
    workspace: int | None = None,
    stream: int | None = None,
    communicator: Communicator | None = None,
) -> None:
    """Runs a plan in a workspace of the plan's size. The plan of a rank's shard needs a communicator."""
    size, lib = plan.info.workspace_bytes, library()
    arguments = plan.pointer, ctypes.byref(buffers), len(schema().tensors), workspace, size, stream
    if communicator is None:
        status = lib.logitless_run(*arguments)
    else:
        status = lib.logitless_run_group(*arguments, ctypes.byref(communicator))
    if status != OK:
        check(status)


def run_on_host(plan: Plan, buffers: ctypes.Structure) -> None:
    """Runs a plan in a fresh workspace in host memory."""
    workspace = Workspace(plan.info.workspace_bytes)
    run(plan, buffers, workspace.address)


def scale_gradients(
    data: Sequence[int], dtypes: Sequence[int], sizes: Sequence[int], factor: int, device: int, stream: int
) -> None:
    """Calls logitless_scale_gradients."""
    count = len(data)
    arrays = struct.pack(f"{count}P", *data), struct.pack(f"{count}i", *dtypes), struct.pack(f"{count}q", *sizes)
    context = _context(1, None, device)
    check(library().logitless_scale_gradients(context.pointer, count, *arrays, factor, stream))


def run_divergence(given: Divergence, threads: int, device: int, stream: int | None = None) -> None:
    """Calls logitless_divergence_run."""
    check(library().logitless_divergence_run(_context(threads, None, device).pointer, ctypes.byref(given), stream))


def run_sample_noise(given: SampleNoise, threads: int, device: int, stream: int | None = None) -> None:
    """Calls logitless_sample_noise_run."""
    check(library().logitless_sample_noise_run(_context(threads, None, device).pointer, ctypes.byref(given), stream))


def plan_divergence(given: DivergenceProblem, device: int) -> tuple[DivergenceTiles, DivergenceTiles]:
    """Calls logitless_divergence_plan. Returns tiles of values and of gradients."""
    context, tiles = _context(1, None, device), (DivergenceTiles(), DivergenceTiles())
    check(library().logitless_divergence_plan(context.pointer, ctypes.byref(given), *map(ctypes.byref, tiles)))
    return tiles
