"""``logitless.ScreenedWeight``: the 8-bit copy of a weight that a screen reads, kept from call to call."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import options as _options
from .call import PreparedCall, check_tensor
from .errors import UnsupportedError
from .run import Tensors, find

__all__ = ["ScreenedWeight"]


# ---- steps of optimizers


class _Steps:
    """Counts the steps of all optimizers of the process.

    Some optimizers write their parameters so that no version counts it: kernels of other packages, master weights that
    are copied into ``.data``, and gathers of FSDP.
    """

    def __init__(self) -> None:
        self.count = 0
        self.captured = False  # whether a CUDA graph holds a step, whose replays nothing counts
        self._counts = False

    def begin(self) -> None:
        if not self._counts:
            self._counts = True
            register_optimizer_step_pre_hook(self._add)  # a step may write and fail
            register_optimizer_step_post_hook(self._add)

    # A compiled step would be compiled again for each count.
    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def _add(self, *_: Any) -> None:
        self.count += 1
        if _captures():
            self.captured = True


def _captures() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_steps = _Steps()


# ---- weights that a client gathers before each use, into the same memory and past the version


def _sharded_params() -> Iterator[Any]:
    """Yields the parameters of FSDP2 in this process. It has no public list of them."""
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    for state in list(states.values()):
        state = state() if callable(state) else state
        one = getattr(state, "_fsdp_param_group", None)
        for group in (*getattr(state, "_fsdp_param_groups", ()), *([] if one is None else [one])):
            yield from getattr(group, "fsdp_params", ())


def _marked_by(weight: Tensor) -> str:
    if getattr(weight, "_fsdp_flattened", False):
        return "FSDP"
    return "DeepSpeed ZeRO-3" if hasattr(weight, "ds_id") else ""


def _gathered_by(weight: Tensor) -> str:
    client = _marked_by(weight)
    if client:
        return client
    return "FSDP" if any(getattr(param, "_unsharded_param", None) is weight for param in _sharded_params()) else ""


def _refuse_gathered(weight: Tensor, client: str) -> None:
    if client:
        raise UnsupportedError(
            f"weight: expected a tensor whose changes PyTorch counts, got one that {client} gathers before each use"
        )


# ---- the copy


class ScreenedWeight:
    """The 8-bit copy of a head's weight behind ``screen="fp8"``, for several calls with one weight.

        screen = logitless.ScreenedWeight(model.lm_head.weight)
        for hidden, labels in micro_batches:
            loss = logitless.linear_cross_entropy(
                hidden, model.lm_head.weight, labels, gradient="sparsified", screen=screen
            )

    The first call makes the copy: V x D bytes and a few more on GPUs with 8-bit products, twice as many on others or
    for float32, 4 V on CPUs. Later calls read it. It is made again after a change of the weight: an optimizer's step
    (any optimizer of the process), an operation in place, ``load_state_dict``, an assignment of other memory to
    ``weight.data``, another device or dtype.

    PyTorch does not count every write. Call :meth:`refresh` after writes through ``weight.data`` or another tensor of
    the same memory, collectives such as ``torch.distributed.broadcast``, replays of CUDA graphs that write the weight,
    and inside a step's closure. An older copy acts as larger 8-bit errors do: estimates become noisier, which
    ``loss_error`` reports. CPUs keep exponents alone, and a far larger element makes a row NaN.

    A copy belongs to one tensor. Copies of a module, by ``copy.deepcopy`` or pickle, get their own.

    Args:
        weight: The head's weight, ``[V, D]``: the tensor that the calls get.

    Attributes:
        weight: The weight.

    Raises:
        TypeError: ``weight`` is no plain tensor.
        UnsupportedError: The weight has no version (it was made under inference mode), or FSDP or DeepSpeed gathers it
            before each use.
    """

    def __init__(self, weight: Tensor) -> None:
        check_tensor("weight", weight)
        if weight.dim() != 2:
            raise ValueError(f"weight: expected shape [V, D], got {list(weight.shape)}")
        if weight.is_inference():
            raise UnsupportedError("weight: expected a tensor whose changes PyTorch counts, got one of inference mode")
        _refuse_gathered(weight, _gathered_by(weight))
        _steps.begin()
        self.weight = weight
        self._lock = threading.Lock()
        self._bytes: Tensor | None = None
        self._made_of: Any = None  # the state of the weight, and the call's dtypes; None: there is no copy
        self._storage: StorageWeakRef | None = None  # no other storage can have its address
        self._stream: Any = None  # the last use's

    def __repr__(self) -> str:
        return f"ScreenedWeight(shape={list(self.weight.shape)}, nbytes={self.nbytes})"

    def __reduce__(self) -> Any:
        return ScreenedWeight, (self.weight,)

    @property
    def nbytes(self) -> int:
        """The size of the copy; 0 before there is one."""
        return 0 if self._bytes is None else self._bytes.numel()

    def refresh(self) -> None:
        """Lets the next call make the copy again."""
        with self._lock:
            self._made_of = None

    def check(self, weight: object) -> None:
        """Raises unless a call with this weight may use the copy."""
        if weight is not self.weight:
            raise ValueError("screen: expected a ScreenedWeight of this call's weight, got one of another tensor")
        _refuse_gathered(self.weight, _marked_by(self.weight))  # it may be wrapped since
        if torch.compiler.is_compiling():
            raise UnsupportedError('screen: expected "fp8" under torch.compile, got a ScreenedWeight')
        if self.weight.is_cuda and (_steps.captured or _captures()):
            what = "an optimizer's step" if _steps.captured else "this call"
            raise UnsupportedError(
                f'screen: expected "fp8" where a CUDA graph captures {what} (replays may change the weight unseen), '
                "got a ScreenedWeight"
            )

    def run(self, call: PreparedCall, tensors: Tensors) -> Tensors:
        """Runs the first pass of a call, which reads the copy or makes it."""
        with self._lock:
            key = self._key(tensors, call.options)
            has_copy = key == self._made_of and self._is_same_storage()
            run = self._find(call, tensors, self.nbytes if has_copy else 0)
            size: int = run.plan.info.screen_weight_bytes
            if size == 0:  # an exact plan, or no rows
                self._bytes = self._stream = self._made_of = None
                return run(tensors | {"screen_weight": _NONE})  # type: ignore[no-any-return]
            if not has_copy:
                self._made_of = None
                self._allocate(size)
            self._follow_stream()
            outputs: Tensors = run(tensors | {"screen_weight": self._bytes})
            self._storage = StorageWeakRef(self.weight.untyped_storage())  # type: ignore[no-untyped-call]
            self._made_of = key
            return outputs

    @staticmethod
    def _find(call: PreparedCall, tensors: Tensors, size: int) -> Any:
        """Returns the run that reads a copy of this size; 0: that makes one."""
        run = call.screened_runs.get(size)
        if run is None:
            given = tensors | {"screen_weight": _NONE}
            run = call.screened_runs[size] = find(call.pass_key, given, call.options, screen_weight_bytes=size)
        return run

    def _allocate(self, size: int) -> None:
        if self._bytes is not None and self.nbytes == size and self._bytes.device == self.weight.device:
            return
        self._bytes = self._stream = None  # frees the old one before
        with torch.inference_mode(False):
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self.weight.device)

    def _key(self, tensors: Tensors, options: dict[str, Any]) -> Any:
        """Returns all that the copy depends on beside the storage. tensors: as a run reads them, perhaps cast."""
        weight = self.weight
        layout = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device
        operands = tensors["hidden"].dtype, tensors["weight"].dtype, _options.rounded_to(options)
        return weight._version, _steps.count, layout, operands, os.environ.get("LOGITLESS_CUDA_ENGINE")

    def _is_same_storage(self) -> bool:
        return self._storage is not None and self._storage.cdata == self.weight.untyped_storage()._cdata

    def _follow_stream(self) -> None:
        """Orders the work that follows behind the last use."""
        if not self.weight.is_cuda:
            return
        stream = torch.cuda.current_stream(self.weight.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
            if self._bytes is not None:
                self._bytes.record_stream(stream)
        self._stream = stream


_NONE = torch.empty(0, dtype=torch.uint8)  # in the place of the copy where a plan is looked up
