"""Contexts and plans, cached: the part of every call that does not depend on data.

A plan depends on shapes, dtypes and options only. Contexts and plans may be used by several threads at once, and
after a fork: they hold no threads, and the library runs a loop of a forked process on threads of that loop alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import mmap
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from . import _c, _options
from .errors import BudgetTooSmallError, InvalidArgumentError, LogitlessError

T = TypeVar("T")

HOST = -1  # the device of buffers in host memory; others are ordinals of CUDA devices


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a plan depends on: options by name (``pass_`` is ``pass``), and of tensors has_, want_, keeps_, accumulate_
    and _dtype."""

    pass_: int
    tokens: int
    vocab: int
    hidden: int
    reduction: int = 2
    hidden_dtype: int = _c.F32
    classifier_dtype: int = _c.F32
    bias_dtype: int = _c.F32
    target_dtype: int = _c.I64
    d_hidden_dtype: int = _c.F32
    d_classifier_dtype: int = _c.F32
    d_bias_dtype: int = _c.F32
    has_bias: bool = False
    has_class_weight: bool = False
    has_token_weight: bool = False
    has_temperature: bool = False
    scale: float = 1.0
    softcap: float = 0.0
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    num_items: float = 0.0
    ignore_index: int = -100
    shift: int = 0
    sequence_length: int = 0
    want_d_hidden: bool = False
    want_d_classifier: bool = False
    want_d_bias: bool = False
    accumulate_d_classifier: bool = False
    unaligned_rows: bool = False
    max_workspace_bytes: int = 0
    gradient: int = 0
    keeps_draws: bool = False
    threshold: float = _options.DEFAULT_THRESHOLD
    compute_dtype: int = _c.F32
    allow_tf32: bool = False
    top_k: int = 0
    targets_per_row: int = 0
    flags: tuple[str, ...] = ()  # names of others that are 1
    batch_invariant: bool = False
    vocab_start: int = 0
    vocab_total: int = 0
    group_size: int = 0
    group_vocab: int = 0

    def to_c(self) -> tuple[Any, int, Any, int]:
        """Options and tensor descriptors, as logitless_plan_create takes them."""
        schema = _c.schema()
        tensors, options = {"hidden", "classifier", "targets", *map(_tensor_of, self.flags)}, []
        for field, value in self.__dict__.items():
            option = schema.options.get(field.rstrip("_"))
            if option is not None:
                is_real = option["type"] == "real"
                options.append(_c.Option(option["id"], 0 if is_real else int(value), value if is_real else 0))
            elif value is True and (name := _tensor_of(field)) in schema.tensors:
                tensors.add(name)
        descs = [
            _c.TensorDesc(
                schema.tensors[name]["id"],
                getattr(self, "target_dtype" if name == "targets" else f"{name}_dtype", 0),
                getattr(self, f"accumulate_{name}", False),
            )
            for name in sorted(tensors)
        ]
        return (_c.Option * len(options))(*options), len(options), (_c.TensorDesc * len(descs))(*descs), len(descs)


def _tensor_of(flag: str) -> str:
    """The tensor that a plan with has_NAME, want_NAME or keeps_NAME is made for."""
    return flag.partition("_")[2] if flag.startswith(("has_", "want_", "keeps_")) else ""


@dataclasses.dataclass(frozen=True)
class PlanInfo:
    """How one problem would be run.

    Attributes:
        kind: ``forward``, ``whole``, ``token_chunks``, ``vocab_chunks``, ``backward`` or ``thinned``.
        backend: which backend runs it.
        threads: threads used: those asked for, or fewer where a problem is too small for them.
        workspace_bytes: memory beyond inputs and outputs; exact.
        cost_f: work in units of one bare matrix product of the problem (2 N V D FLOP).
        predicted_seconds: the planner's estimate.
        token_chunk: rows whose exponentials are kept at once, 0 for none.
        config: the kernels' configuration, for people.
        implementation: which kernels, by the name that ``backend="cpu:NAME"`` or ``"cuda:NAME"`` takes.
        reason: why these, for people.
        draws_bytes: memory of drawn elements that a forward pass keeps for a later backward pass.
        kept_columns: the first columns of the vocabulary, whose exponentials are kept for the gradients, 0 for none.
        vocab_window: columns that are made at once of those that are not kept, 0 for no such cut.
        gathers: of a group of ranks: all-gathers in a run, of row statistics, guesses of lse and, on the host, cuts.
        gathered_bytes: that they bring to each rank.
        choice: why it was chosen among others, for people; empty in lists of plans.
    """

    kind: str
    backend: str
    threads: int
    workspace_bytes: int
    cost_f: float
    predicted_seconds: float
    token_chunk: int
    config: str
    implementation: str
    reason: str
    draws_bytes: int = 0
    kept_columns: int = 0
    vocab_window: int = 0
    gathers: int = 0
    gathered_bytes: int = 0
    choice: str = ""


def _to_info(info: Any) -> PlanInfo:
    return PlanInfo(
        kind=_c.library().logitless_plan_kind_name(info.kind).decode(),
        backend=info.backend.decode(),
        threads=info.threads,
        workspace_bytes=info.workspace_bytes,
        cost_f=info.cost_f,
        predicted_seconds=info.predicted_seconds,
        token_chunk=info.token_chunk,
        config=info.config.decode(),
        implementation=info.implementation.decode(),
        reason=info.reason.decode(),
        draws_bytes=info.draws_bytes,
        kept_columns=info.kept_columns,
        vocab_window=info.vocab_window,
        gathers=info.gathers,
        gathered_bytes=info.gathered_bytes,
        choice=info.choice.decode(),
    )


class _Handle:
    """Owns one object of the library."""

    _destroy: Any = None  # until there is something to destroy

    def __init__(self, pointer: ctypes.c_void_p, destroy: Any) -> None:
        self.pointer = pointer
        self._destroy = destroy

    def __del__(self) -> None:
        if self._destroy is not None:
            self._destroy(self.pointer)


@functools.lru_cache(maxsize=64)
def _context(threads: int, backend: str | None, device: int | str) -> _Handle:
    lib = _c.library()
    options: Any = _c.make("logitless_context_options")
    options.threads = threads
    if isinstance(device, str):
        options.device_model = device.encode()
    else:
        options.device = device
    name, _, isa = (backend or "").partition(":")
    options.isa = isa.encode() if isa else None
    backend = name or None
    if backend is not None:
        options.backend = backend.encode()
    pointer = ctypes.c_void_p()
    try:
        _c.check(lib.logitless_context_create(ctypes.byref(options), ctypes.byref(pointer)))
    except LogitlessError as error:
        if error.argument != "device_model":
            raise
        expected = f'"cpu", "cuda", "cuda:N" or a model, {error.expected}'
        raise InvalidArgumentError(f"device: expected {expected}; got {device!r}") from None
    return _Handle(pointer, lib.logitless_context_destroy)


class Plan(_Handle):
    """A logitless_plan; it holds copies of all that it needs of its context."""

    def __init__(self, spec: Spec, threads: int, backend: str | None = None, device: int | str = HOST) -> None:
        lib = _c.library()
        pointer = ctypes.c_void_p()
        context = _context(threads, backend, device)
        _c.check(lib.logitless_plan_create(context.pointer, *spec.to_c(), ctypes.byref(pointer)))
        super().__init__(pointer, lib.logitless_plan_destroy)
        info = _c.make("logitless_plan_info")
        _c.check(lib.logitless_plan_get_info(pointer, ctypes.byref(info)))
        self.info = _to_info(info)


@functools.lru_cache(maxsize=256)
def plan_of(spec: Spec, threads: int, backend: str | None = None, device: int | str = HOST) -> Plan:
    return Plan(spec, threads, backend, device)


def enough(*passes: Callable[[], T]) -> list[T]:
    """Makes every plan within one budget; where that is too small, raises the refusal that asks for most."""
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
    """All plans that the planner considers for a problem."""
    capacity = 64
    infos: Any = (_c.PlanInfo * capacity)()
    count = ctypes.c_int32()
    context = _context(threads, backend, device)
    status = _c.library().logitless_plan_list(context.pointer, *spec.to_c(), infos, capacity, ctypes.byref(count))
    _c.check(status)
    return [_to_info(infos[i]) for i in range(min(count.value, capacity))]


class Workspace:
    """Page-aligned memory of one run, given back to the system with this object.

    Huge pages, where the system lends them on request, save most of the page faults of a fresh allocation.
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


def run(plan: Plan, buffers: ctypes.Structure, workspace: int | None = None, stream: int | None = None) -> None:
    """Runs a plan in a workspace of the plan's size."""
    size = plan.info.workspace_bytes
    status = _c.library().logitless_run(
        plan.pointer, ctypes.byref(buffers), len(_c.schema().tensors), workspace, size, stream
    )
    if status != _c.OK:
        _c.check(status)


def run_group(
    plan: Plan, buffers: ctypes.Structure, workspace: int | None, stream: int | None, communicator: _c.Communicator
) -> None:
    """The same of a rank's shard, with the other ranks."""
    size = plan.info.workspace_bytes
    arguments = (
        plan.pointer,
        ctypes.byref(buffers),
        len(_c.schema().tensors),
        workspace,
        size,
        stream,
        ctypes.byref(communicator),
    )
    _c.check(_c.library().logitless_run_group(*arguments))


def run_on_host(plan: Plan, buffers: ctypes.Structure) -> None:
    """The same in a workspace of its own."""
    workspace = Workspace(plan.info.workspace_bytes)
    run(plan, buffers, workspace.address)


def scale_gradients(
    data: Sequence[int], dtypes: Sequence[int], sizes: Sequence[int], factor: int, device: int, stream: int
) -> None:
    """logitless_scale_gradients"""
    count = len(data)
    arrays = struct.pack(f"{count}P", *data), struct.pack(f"{count}i", *dtypes), struct.pack(f"{count}q", *sizes)
    context = _context(1, None, device)
    _c.check(_c.library().logitless_scale_gradients(context.pointer, count, *arrays, factor, stream))
