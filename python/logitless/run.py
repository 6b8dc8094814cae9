"""Runs of the library on tensors, without autograd and without the dispatcher.

A Run holds what does not depend on data: the plan, the strides and the sizes of outputs. It is looked up by the layouts
of the tensors and the options.

Below the public functions shapes are: hidden [N, D], weight [V, D], bias [V], and targets of N elements in the caller's
shape, or of N x K with a target_weight [N, K]. Vectors of rows and classes have stats_dtype.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import native
from . import options as _options
from .errors import InvalidArgumentError, InvalidTargetError
from .native import Cache
from .options import LSE, Flags
from .passes import PassKey, Result, alone, later_spec, size_to_save, spec_of, writes

# Tensors that have another name for the caller.
_ARGUMENTS = {
    "d_weight": "main_grad",
    "learned_scale": "scale",
    "learned_temperature": "temperature",
}
CODES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in _options.CODES.items()}
DTYPES = {code: dtype for dtype, code in CODES.items()}


def torch_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Returns torch.bfloat16 for "bf16" or "bfloat16", and anything but text unchanged."""
    return DTYPES[_options.float_code("dtype", dtype)] if isinstance(dtype, str) else dtype


Tensors = dict[str, Tensor]  # by the names of tensors.def; a d_weight among inputs is added to
# A pass has these tensors beside the library's: scalars whose gradients are wanted, with the values of the options, and
# float64 numbers on the CPU, which replace the options NUMBERS.
OF_PASS = ("learned_scale", "learned_temperature", "numbers")


def stats_dtype(hidden: Tensor) -> torch.dtype:
    """Returns the dtype of losses, statistics, and weights of rows and classes."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


# The order is that of Arguments.
_READ = ("hidden", "weight", "targets", "bias", "class_weight", "token_weight", "temperature", "target_weight")


def read_as_they_are(arguments: Iterable[Any], tensors: Tensors) -> tuple[str, ...] | None:
    """Returns the names of the tensors from readable() if they are the first of these Arguments, else None."""
    names = tuple(tensors)
    same = names == _READ[: len(names)] and all(tensors[name] is given for name, given in zip(names, arguments))
    return names if same else None


def rows(matrix: Tensor) -> Tensor:
    """Returns the matrix itself if its rows are contiguous and do not overlap, at any stride; else a copy."""
    if matrix.is_contiguous():
        return matrix
    count, columns = matrix.shape
    contiguous_rows = columns == 1 or matrix.stride(1) == 1
    if contiguous_rows and (count <= 1 or matrix.stride(0) >= columns):
        return matrix
    return matrix.contiguous()


def row_stride(matrix: Tensor) -> int:
    return matrix.stride(0) if matrix.shape[0] > 1 else 0


def rows_are_aligned(matrix: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes. True if their length is no such multiple."""
    size = matrix.element_size()
    if matrix.shape[1] * size % 16 != 0:
        return True  # the kernels copy such rows anyway
    return matrix.data_ptr() % 16 == 0 and (matrix.shape[0] <= 1 or matrix.stride(0) * size % 16 == 0)


def are_unaligned(hidden: Tensor, weight: Tensor) -> bool:
    """Returns the option unaligned_rows."""
    return hidden.is_cuda and not (rows_are_aligned(hidden) and rows_are_aligned(weight))


def resolve_options(given: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the operator's options with all numbers by name, including those in tensors on the CPU."""
    resolved = unpack_numbers(options, given.get("numbers"))
    if "num_items" in given and given["hidden"].device.type == "cpu":
        resolved["num_items"] = _options.checked_num_items(given["num_items"].item(), resolved["reduction"])
    if "learned_scale" in given:
        check_learned_scale(resolved["scale"])
    if "learned_temperature" in given:
        check_learned_temperature(resolved["softcap"])
    return resolved


def readable(given: Mapping[str, Tensor], num_items: float | None) -> Tensors:
    """Returns the tensors that the library reads, in layouts that it supports. num_items: the resolved option."""
    hidden = given["hidden"]
    tensors = {
        name: rows(tensor) if name in ("hidden", "weight") else tensor.contiguous()
        for name, tensor in given.items()
        if name not in OF_PASS
    }
    if num_items == 0:  # the option 0 would mean none
        tensors["num_items"] = torch.zeros((), dtype=stats_dtype(hidden), device=hidden.device)
    elif "num_items" in given:
        del tensors["num_items"]
        if num_items is None:  # only the device knows it
            tensors["num_items"] = given["num_items"].to(hidden.device, stats_dtype(hidden))
    return tensors


# ---- options that are numbers


# The gradient of scale is <hidden, d_hidden> / scale: d_hidden, in float32, must not underflow.
LEAST_LEARNED_SCALE = 2.0**-64


def unpack_numbers(options: Mapping[str, Any], tensor: Tensor | None) -> dict[str, Any]:
    """Returns the options with their numbers by name. The numbers are those of the tensor if there is one."""
    unpacked = dict(options)
    numbers = unpacked.pop("numbers")
    unpacked |= zip(_options.NUMBERS, numbers if tensor is None else tensor.tolist())
    if math.isnan(unpacked["num_items"]):
        unpacked["num_items"] = None
    return unpacked


def check_learned_scale(scale: float) -> None:
    if not abs(scale) >= LEAST_LEARNED_SCALE:
        raise ValueError(
            "scale: expected a magnitude of at least 2^-64 where its gradient is wanted (the product of hidden "
            f"and its gradient, divided by scale), got {scale}"
        )


def check_learned_temperature(softcap: float) -> None:
    if softcap != 0:
        raise ValueError(
            "temperature: expected one that does not require grad with a softcap (its gradient is made of those of "
            f"hidden and bias, which holds only without a softcap), got one that does, and softcap {softcap}"
        )


def inner_product(hidden: Tensor, d_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns <hidden, d_hidden> of [N, D] matrices as a float64 scalar. dtype: hidden's dtype in the products.

    The gradients of scale and temperature follow from it. Scaling the logits by scale is like scaling hidden, so the
    gradient of scale is <hidden, d_hidden> / scale. Without a softcap, scaling the logits by the inverse temperature is
    like scaling hidden and bias together. So the gradient of T is -(<hidden, d_hidden> + <bias, d_bias>) / T.
    """
    rows = max(1, (1 << 20) // max(1, hidden.shape[1]))
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        gradient = d_hidden[part]  # 0 in ignored rows, where hidden may hold NaN
        total += torch.where(gradient == 0, 0, hidden[part].to(dtype) * gradient).sum(dtype=torch.float64)
    return total


# ---- runs


_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)  # None: PyTorch before 2.9


def _allows_tf32() -> bool:
    """Whether PyTorch permits TF32 in products of float32 matrices on CUDA devices."""
    return bool(_precision("cuda", "matmul") == "tf32" if _precision else torch._C._get_cublas_allow_tf32())


def _chosen_engine() -> str | None:
    return os.environ.get("LOGITLESS_CUDA_ENGINE")  # sm90, mma or portable instead of the library's choice


def device_key(hidden: Tensor, weight: Tensor) -> Any:
    """Returns what plans depend on beside devices and layouts.

    On the CPU it is the number of threads. On CUDA it is the alignment of both matrices, the chosen engine and whether
    TF32 is permitted.
    """
    if not hidden.is_cuda:
        return torch.get_num_threads()
    return hidden.data_ptr() % 16, weight.data_ptr() % 16, _chosen_engine(), _allows_tf32()


def plan_on(spec: native.Spec, device: torch.device) -> native.Plan:
    """Returns the plan for tensors on a device."""
    if device.type == "cpu":
        return native.plan_of(spec, torch.get_num_threads())
    name = _chosen_engine()
    spec = spec.with_options(allow_tf32=_allows_tf32())
    with torch.cuda.device(device):
        return native.plan_of(spec, 1, f"cuda:{name}" if name else None, device.index)


def saved_size(
    pass_key: PassKey, given: Mapping[str, Tensor], main_grad: Tensor | None, options: dict[str, Any]
) -> int:
    """Returns the size of the tensor saved by a forward pass of an operator. The tensors may be fake ones."""
    tensors = {name: tensor for name, tensor in given.items() if name in _READ}
    options = options | {"num_items": None}
    size = _saved_bytes(pass_key, tensors, options, main_grad, traced=True)
    spec = spec_of(alone(pass_key), tensors, options, unaligned_rows=False, saved_bytes=size)
    return plan_on(spec, given["hidden"].device).info.saved_bytes


# PyTorch's function for a device's current stream that creates no object.
stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: torch.cuda.current_stream(device).cuda_stream
)


_SAVED_ALIGNMENT = 64  # bytes, as in tensors.def; PyTorch's allocators align to it
_SMALL_WORKSPACE = 1 << 16  # bytes on the host; below, page faults of fresh memory would dominate a run
_ROWS = ("lse", "lse_residual", "entropy", "grad_loss", *_options.STAT_GRADIENTS)


def _check_rows(tensors: Tensors) -> None:
    """Checks the tensors of a backward pass with a number a row; hooks of saved tensors may have altered them."""
    hidden = tensors["hidden"]
    tokens, stats = hidden.shape[0], stats_dtype(hidden)
    for name in _ROWS:
        if name not in tensors:
            continue
        tensor, count = tensors[name], 1 if name == "grad_loss" and tensors[name].dim() == 0 else tokens
        if tensor.dtype != stats or tensor.numel() != count:
            raise RuntimeError(f"{name}: expected {count} elements of {stats}, got {tensor.numel()} of {tensor.dtype}")
    weight = tensors.get("target_weight")
    count = tensors["targets"].numel()
    if weight is not None and (weight.dtype != stats or weight.numel() != count or count % max(tokens, 1) != 0):
        raise RuntimeError(
            f"target_weight: expected {count} elements of {stats}, got {weight.numel()} of {weight.dtype}"
        )


def allocator(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Returns a function like torch.empty for contiguous tensors, which takes half the time."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return functools.partial(torch.empty_strided, tuple(shape), tuple(strides), dtype=dtype, device=device)


class PlannedRun:
    """A plan, its strides, and the tensors that it writes. Any thread may call it, any number of times."""

    def __init__(self, spec: native.Spec, tensors: Tensors) -> None:
        hidden, weight = tensors["hidden"], tensors["weight"]
        self.device = hidden.device
        self._ordinal: int | None = None if self.device.type == "cpu" else self.device.index
        self.plan = plan_on(spec, self.device)
        self._workspace_bytes = self.plan.info.workspace_bytes
        self._new_workspace = allocator((self._workspace_bytes,), torch.uint8, self.device)
        buffers: Any = native.schema().buffers()
        buffers.hidden_stride, buffers.weight_stride = row_stride(hidden), row_stride(weight)
        if "d_weight" in tensors:
            buffers.d_weight_stride = row_stride(tensors["d_weight"])
        self._template, self._copied = bytes(buffers), native.schema().Buffers.from_buffer_copy

    def _set_writes(self, written: Mapping[str, Result]) -> None:
        self._writes = [
            (name, allocator(shape, getattr(torch, dtype), self.device)) for name, (shape, dtype, _) in written.items()
        ]

    def _filled(self, tensors: Tensors) -> tuple[Any, Tensors]:
        """Returns the buffers of a run that reads (and adds to) these tensors, and the new ones that it writes."""
        buffers = self._copied(self._template)
        for name, tensor in tensors.items():
            setattr(buffers, name, tensor.data_ptr())
        written: Tensors = {}
        for name, allocate in self._writes:
            written[name] = tensor = allocate()
            setattr(buffers, name, tensor.data_ptr())
        return buffers, written

    def _launch(self, buffers: Any, written: Tensors) -> None:
        if self._ordinal is None and self._workspace_bytes > _SMALL_WORKSPACE:
            return native.run_on_host(self.plan, buffers)
        # PyTorch's allocator reuses memory in stream order, so on CUDA this may be freed before the run ends.
        workspace = self._new_workspace()
        stream = None if self._ordinal is None else stream_of(self._ordinal)
        native.run(self.plan, buffers, workspace.data_ptr(), stream)


class Run(PlannedRun):
    """One pass over tensors of one layout with the same options."""

    def __init__(
        self,
        pass_key: PassKey,
        tensors: Tensors,
        options: dict[str, Any],
        saved_bytes: int = 0,
        screen_weight_bytes: int = 0,
    ) -> None:
        hidden, weight, flags = tensors["hidden"], tensors["weight"], pass_key.flags
        _check_rows(tensors)
        self.pass_key = pass_key
        self._targets_name = _options.FUNCTIONS[pass_key.function].targets  # for messages
        sizes = {"saved_bytes": saved_bytes, "screen_weight_bytes": screen_weight_bytes}
        more = {name: size for name, size in sizes.items() if size}
        spec = spec_of(pass_key, tensors, options, unaligned_rows=are_unaligned(hidden, weight), **more)
        super().__init__(self._specified(spec), tensors)
        self._scale: float = options["scale"]
        self._temperature: float = options["temperature"]
        rounds_to = _options.product_code(options["compute_dtype"])
        self._product_dtype = DTYPES[rounds_to] if rounds_to != _options.F32 else hidden.dtype
        written = writes(pass_key, tensors, options)
        if "saved" in written:
            written["saved"] = Result((self.plan.info.saved_bytes,), "uint8")
        self._set_writes(written)
        self._has_counts = flags.want_counts and pass_key.kind != _options.BACKWARD
        one_target = "target_weight" not in tensors
        self._has_correct_count = one_target and not {"argmax", "is_top1"}.isdisjoint(flags.stats)
        self._learns_numbers = flags.learns_numbers()

    def _specified(self, spec: native.Spec) -> native.Spec:
        """Returns the problem with options beyond those of the tensors; a rank's run adds its shard."""
        return spec

    def __call__(self, tensors: Tensors) -> Tensors:
        """Reads (and adds to) tensors of the run's layout. Returns the tensors written, by the names of results()."""
        if "saved" in tensors and tensors["saved"].data_ptr() % _SAVED_ALIGNMENT:  # a hook of saved tensors moved them
            tensors = tensors | {"saved": tensors["saved"].clone()}
        buffers, written = self._filled(tensors)
        if self._has_counts:
            written["counts"] = counts = torch.zeros(2, dtype=torch.int64, device=self.device)
            buffers.valid_count = counts.data_ptr() + counts.element_size()
            if self._has_correct_count:
                buffers.correct_count = counts.data_ptr()
        try:
            self._launch(buffers, written)
        except InvalidTargetError as error:
            shape = tensors["targets"].shape
            raise _options.named_target(error, shape, self._targets_name) from None
        except InvalidArgumentError:
            for name, tensor in tensors.items():
                if tensor.data_ptr() == 0 and tensor.numel() > 0:
                    expected = "expected a tensor in memory, got one whose storage was freed"
                    raise InvalidArgumentError(f"{_ARGUMENTS.get(name, name)}: {expected}") from None
            raise
        return self._with_numbers(written, tensors) if self._learns_numbers else written

    def _with_numbers(self, written: Tensors, tensors: Tensors) -> Tensors:
        """Adds the gradients of scale and temperature, and rounds d_hidden and d_bias, as far as they are wanted.

        inner_product() explains the formulas.
        """
        flags, hidden, bias = self.pass_key.flags, tensors["hidden"], tensors.get("bias")
        d_hidden = written.pop("d_hidden")
        product = inner_product(hidden, d_hidden, self._product_dtype)
        if flags.want_d_scale:
            written["d_scale"] = (product / self._scale).to(d_hidden.dtype)
        if flags.want_d_hidden:
            written["d_hidden"] = d_hidden.to(hidden.dtype)
        if flags.want_d_temperature:
            if bias is not None:
                d_bias = written.pop("d_bias")
                product = product + inner_product(bias[:, None], d_bias[:, None], bias.dtype)
                if flags.want_d_bias:
                    written["d_bias"] = d_bias.to(bias.dtype)
            written["d_temperature"] = (product / -self._temperature).to(d_hidden.dtype)
        return written


_runs: Cache[Any, Run] = Cache(256)


def layouts(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


def find(
    pass_key: PassKey, tensors: Tensors, options: dict[str, Any], saved_bytes: int = 0, screen_weight_bytes: int = 0
) -> Run:
    """Returns the run of tensors with these names and layouts. options: resolved ones."""
    hidden, weight = tensors["hidden"], tensors["weight"]
    sizes = saved_bytes, screen_weight_bytes
    key = (pass_key, hidden.device, device_key(hidden, weight), *sizes, *options.values(), *tensors)
    key = (*key, *layouts(tensors.values()))
    run = _runs.get(key)
    if run is None:
        run = Run(pass_key, tensors, options, *sizes)
        _runs.put(key, run)
    return run


def _later_spec(
    pass_key: PassKey, tensors: Tensors, options: dict[str, Any], main_grad: Tensor | None, **more: Any
) -> native.Spec:
    given = tensors if main_grad is None or not pass_key.flags.want_d_weight else tensors | {"d_weight": main_grad}
    return later_spec(pass_key, given, options, **more)


def _saved_bytes(
    pass_key: PassKey, tensors: Tensors, options: dict[str, Any], main_grad: Tensor | None, traced: bool
) -> int:
    """Returns the size of saved exp logits; see passes.size_to_save().

    traced: for an operator, whose fake tensors have no addresses, and which may not know all numbers. It counts on
    copies of rows that are not aligned, and of a bias that a temperature scales.
    """
    device, budget = tensors["hidden"].device, options["max_workspace_bytes"]
    # A plan for "sparsified" may be exact. An operator then saves nothing, as it does not know all numbers before.
    if not pass_key.flags.saves or options["gradient"] not in ("exact", *([] if traced else ["sparsified"])):
        return 0
    alignment = {"unaligned_rows": traced or are_unaligned(tensors["hidden"], tensors["weight"])}
    if traced and "temperature" not in tensors:  # compiled code may not know it: any but 1 needs a copy of the bias
        options = options | {"temperature": 2.0}

    def later(for_later: int) -> native.Plan:
        given = options | {"max_workspace_bytes": for_later}
        spec = _later_spec(pass_key, tensors, given, main_grad, saved_bytes=_options.FASTEST, **alignment)
        return plan_on(spec, device)

    return size_to_save(
        budget,
        later,
        lambda size: plan_on(spec_of(alone(pass_key), tensors, options, saved_bytes=size, **alignment), device),
    )


def find_forward(
    pass_key: PassKey, tensors: Tensors, options: dict[str, Any], main_grad: Tensor | None, traced: bool = False
) -> Run:
    """Returns the run of a forward pass whose flags have the gradients of its later backward pass.

    The budget must also be enough for that backward pass. traced: as in _saved_bytes().
    """
    now, hidden = alone(pass_key), tensors["hidden"]
    if not any(pass_key.flags.wants()):
        return find(now, tensors, options)
    saved_bytes = _saved_bytes(pass_key, tensors, options, main_grad, traced)
    if options["max_workspace_bytes"] in (0, _options.FASTEST):
        return find(now, tensors, options, saved_bytes)
    alignment = {"unaligned_rows": are_unaligned(hidden, tensors["weight"])}
    spec = _later_spec(pass_key, tensors, options, main_grad, saved_bytes=saved_bytes, **alignment)
    runs: list[Any] = native.enough(
        lambda: find(now, tensors, options, saved_bytes), lambda: plan_on(spec, hidden.device)
    )
    return runs[0]  # type: ignore[no-any-return]


def read_later(given: Mapping[str, Tensor], main_grad: Tensor | None, options: dict[str, Any], flags: Flags) -> Tensors:
    """Returns the tensors that a backward pass reads, in supported layouts, and main_grad, to which it adds."""
    for name in LSE:
        if name not in given:
            raise RuntimeError(f"{name}: expected the tensor saved by the forward pass, got None")
    read = {name: value for name, value in given.items() if name != "entropy" or "grad_entropy" in given}
    tensors = readable(read, options["num_items"])
    return tensors if main_grad is None or not flags.want_d_weight else tensors | {"d_weight": main_grad}


def _find_first(pass_key: PassKey, tensors: Tensors, main_grad: Tensor | None, options: dict[str, Any]) -> Run:
    if pass_key.kind == _options.FORWARD:
        return find_forward(pass_key, tensors, options, main_grad, traced=True)
    return find(pass_key, tensors, options)


def plan_pass(pass_key: PassKey, given: Tensors, options: dict[str, Any]) -> Callable[[Tensors], Tensors]:
    """Returns a function that runs a pass with the loss, as run_pass() does, over tensors of these layouts."""
    run = _find_first(pass_key, readable(given, options["num_items"]), None, options)
    return lambda given: run(readable(given, options["num_items"]))


def run_pass(
    pass_key: PassKey, given: Mapping[str, Tensor], main_grad: Tensor | None, options: dict[str, Any]
) -> Tensors:
    """Runs a pass.

    A backward pass adds the gradient of the weight to main_grad [V, D] if it is given. A forward pass only checks that
    buffer; its flags and main_grad are as in find_forward().

    given: for a backward pass, includes the tensors saved by the forward pass and the upstream gradients. options:
    resolved ones.
    """
    if main_grad is not None and pass_key.flags.want_d_weight:
        check_own_memory(main_grad, given)
    if pass_key.kind == _options.BACKWARD:
        tensors = read_later(given, main_grad, options, pass_key.flags)
        return find(pass_key, tensors, options, tensors["saved"].numel() if "saved" in tensors else 0)(tensors)
    tensors = readable(given, options["num_items"])
    return _find_first(pass_key, tensors, main_grad, options)(tensors)


def scale_in_place(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Computes ``gradient *= factor`` for contiguous gradients on a CUDA device without reading the factor on the host.

    Zeros stay 0 even if the factor is infinite or NaN. With a factor of 1 the kernel does nothing.
    """
    if not gradients:
        return
    device, factor = factor.device.index, factor.to(stats_dtype(gradients[0]))
    native.scale_gradients(
        [gradient.data_ptr() for gradient in gradients],
        [CODES[gradient.dtype] for gradient in gradients],
        [gradient.numel() for gradient in gradients],
        factor.data_ptr(),
        device,
        stream_of(device),
    )


# ---- memory of main_grad


class _Region(NamedTuple):
    """Pieces of memory of one width at one stride, by addresses. exact: no piece includes gaps."""

    start: int
    width: int
    stride: int
    pieces: int
    exact: bool

    def end(self) -> int:
        return self.start + self.stride * (self.pieces - 1) + self.width


def _region(tensor: Tensor) -> _Region | None:
    """Returns the memory of a tensor; None if it has none."""
    start, size = tensor.data_ptr(), tensor.element_size()
    if start == 0 or tensor.numel() == 0:
        return None
    width, apart = size, list[tuple[int, int]]()
    for stride, count in sorted((stride * size, count) for stride, count in zip(tensor.stride(), tensor.shape)):
        if count == 1 or stride == 0:
            continue
        if stride <= width and not apart:
            width += stride * (count - 1)
        else:
            apart.append((stride, count))
    for stride, count in apart[:-1]:
        width += stride * (count - 1)
    stride, count = apart[-1] if apart else (width, 1)
    return _Region(start, width, stride, count, len(apart) <= 1)


def _meet(a: _Region, b: _Region) -> bool:
    if a.end() <= b.start or b.end() <= a.start:
        return False
    few, many = (a, b) if a.pieces <= b.pieces else (b, a)
    # The first and the last piece of the many that each piece of the few could share bytes with.
    starts = few.start - many.start + few.stride * torch.arange(few.pieces, device="cpu")
    first = torch.div(starts - many.width, many.stride, rounding_mode="floor") + 1
    last = torch.div(starts + few.width - 1, many.stride, rounding_mode="floor")
    return bool((first.clamp(min=0) <= last.clamp(max=many.pieces - 1)).any())


def check_own_memory(main_grad: Tensor, given: Mapping[str, Tensor]) -> None:
    """Raises if main_grad shares bytes with tensors that the backward pass reads."""
    own = _region(main_grad)
    if own is None:
        return
    for name, tensor in given.items():
        other = _region(tensor)
        if other is not None and _meet(own, other):
            argument = _ARGUMENTS.get(name, name)
            where = "that shares memory with" if other.exact else "in or between the memory of"
            raise ValueError(f"main_grad: expected a buffer of its own, got one {where} {argument}")
