"""Runs of the library on tensors: no autograd, no dispatcher.

What of a run depends on no data (its plan, the strides, the sizes of what it writes) is a Run, found again by the
layouts of the tensors and the options.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _c, _numbers, _options, _plan, _stats
from ._cache import Cache
from ._flags import Flags, Wants
from ._overlap import check_own_memory
from ._saved import read_by_backward
from ._torch import (
    CODES,
    DTYPES,
    Inputs,
    Result,
    are_unaligned,
    contiguous,
    readable,
    resolved,
    results,
    row_stride,
    stats_dtype,
)
from .errors import InvalidArgumentError, InvalidTargetError

Tensors = dict[str, Tensor]  # by the names of logitless_buffers; a d_classifier that is given is added to


def _tf32_switch() -> Callable[[], bool]:
    """Reads PyTorch's permission of TF32 in products of float32 matrices on CUDA devices."""
    precision: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is None:  # PyTorch before 2.9
        return torch._C._get_cublas_allow_tf32
    return lambda: precision("cuda", "matmul") == "tf32"


_allows_tf32 = _tf32_switch()


def _asked() -> str | None:
    return os.environ.get("LOGITLESS_CUDA_IMPLEMENTATION")  # sm90, mma or portable in place of the library's choice


def place(hidden: Tensor, weight: Tensor) -> Any:
    """What plans depend on beside devices and layouts: threads of the CPU; on CUDA the alignment of both, the
    implementation asked for by name and whether TF32 is permitted."""
    if not hidden.is_cuda:
        return torch.get_num_threads()
    return hidden.data_ptr() % 16, weight.data_ptr() % 16, _asked(), _allows_tf32()


def plan_on(spec: _plan.Spec, device: torch.device) -> _plan.Plan:
    """The plan for tensors on a device."""
    if device.type == "cpu":
        return _plan.plan_of(spec, torch.get_num_threads())
    name = _asked()
    spec = dataclasses.replace(spec, allow_tf32=_allows_tf32())
    with torch.cuda.device(device):
        return _plan.plan_of(spec, 1, f"cuda:{name}" if name else None, device.index)


def _d_bias_dtype(hidden: Tensor, bias: Tensor, flags: Flags) -> torch.dtype:
    return stats_dtype(hidden) if flags.want_d_temperature else bias.dtype


def spec_of(
    pass_: int, tensors: Mapping[str, Tensor], options: Mapping[str, Any], flags: Flags, unaligned: bool
) -> _plan.Spec:
    """The problem of tensors that are there; they may be fake ones, whose sizes become constants."""
    hidden, weight, bias = tensors["hidden"], tensors["classifier"], tensors.get("bias")
    fields: dict[str, Any] = dict(options)
    fields |= {name: int(fields[name]) for name in ("ignore_index", "shift", "sequence_length", "max_workspace_bytes")}
    if pass_ != _c.FORWARD:
        into = tensors.get("d_classifier")
        fields |= {
            "d_hidden_dtype": CODES[stats_dtype(hidden) if flags.learns_numbers() else hidden.dtype],
            "d_classifier_dtype": CODES[weight.dtype if into is None else into.dtype],
            "d_bias_dtype": _c.F32 if bias is None else CODES[_d_bias_dtype(hidden, bias, flags)],
            "accumulate_d_classifier": into is not None,
        }
    return _plan.Spec(
        **fields
        | {
            "reduction": _c.REDUCTIONS[options["reduction"]],
            "gradient": _c.GRADIENTS[options["gradient"]],
            "num_items": options["num_items"] or 0.0,
        },
        pass_=pass_,
        tokens=int(hidden.shape[0]),
        vocab=int(weight.shape[0]),
        hidden=int(hidden.shape[1]),
        hidden_dtype=CODES[hidden.dtype],
        classifier_dtype=CODES[weight.dtype],
        bias_dtype=_c.F32 if bias is None else CODES[bias.dtype],
        target_dtype=CODES[tensors["targets"].dtype],
        has_bias=bias is not None,
        has_class_weight="class_weight" in tensors,
        has_token_weight="token_weight" in tensors,
        has_temperature="temperature" in tensors,
        targets_per_row=int(tensors["target_weight"].shape[1]) if "target_weight" in tensors else 0,
        want_d_hidden=flags.want_d_hidden or flags.learns_numbers(),
        want_d_classifier=flags.want_d_weight,
        want_d_bias=flags.want_d_bias or (flags.want_d_temperature and bias is not None),
        flags=(*_stats.wants(flags.stats), *(f"has_{name}" for name in _stats.GRADIENTS if name in tensors)),
        unaligned_rows=unaligned,
        keeps_draws=flags.keeps_draws or "draws" in tensors,
    )


def draws_size(inputs: Inputs, options: dict[str, Any], flags: Flags) -> int:
    """Bytes that a forward pass keeps of its draws, from sizes alone: the tensors may be fake ones."""
    names = {"hidden": 0, "classifier": 1, "targets": 2, "bias": 3, "class_weight": 4, "token_weight": 5}
    names["temperature"] = 6
    tensors = {name: inputs[index] for name, index in names.items() if inputs[index] is not None}
    options = _numbers.joined(options, None) | {"num_items": None}
    spec = spec_of(_c.FORWARD, tensors, options, flags.with_gradients(Wants()), False)  # type: ignore[arg-type]
    return plan_on(spec, inputs.hidden.device).info.draws_bytes


def _raw_stream() -> Callable[[int], int]:
    """Of PyTorch's functions for the current stream of a device, the one that makes no object."""
    found: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return found or (lambda device: torch.cuda.current_stream(device).cuda_stream)


stream_of = _raw_stream()


_SMALL_WORKSPACE = 1 << 16  # bytes on the host: the page faults of fresh memory would be most of a small run
# Names of tensors that are others in Python.
_ARGUMENTS = {
    "hidden": "input",
    "classifier": "linear_weight",
    "targets": "target",
    "bias": "linear_bias",
    "class_weight": "weight",
    "d_classifier": "main_grad",
}
_ROWS = ("lse", "lse_low", "entropy", "grad_loss", *_stats.GRADIENTS)


def _check_rows(tensors: Tensors) -> None:
    """Of a backward pass what lies a number a row, which a hook of saved tensors may have changed."""
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
    """As torch.empty of contiguous tensors, in half of its time."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return functools.partial(torch.empty_strided, tuple(shape), tuple(strides), dtype=dtype, device=device)


def _refuse_freed(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if tensor.data_ptr() == 0 and tensor.numel() > 0:
            argument = _ARGUMENTS.get(name, name)
            raise InvalidArgumentError(f"{argument}: expected a tensor in memory, got one whose storage was freed")


class Run:
    """One pass over tensors of one layout, with the same options, as often as it is called and by any thread."""

    targets_name = "target"  # in messages

    def __init__(self, pass_: int, tensors: Tensors, options: dict[str, Any], flags: Flags) -> None:
        hidden, weight = tensors["hidden"], tensors["classifier"]
        _check_rows(tensors)
        self.pass_, self.flags, self.device = pass_, flags, hidden.device
        self._ordinal: int | None = None if self.device.type == "cpu" else self.device.index
        adds = "d_classifier" in tensors
        spec = spec_of(pass_, tensors, options, flags, are_unaligned(hidden, weight))
        self.plan = plan_on(self._specified(spec), self.device)
        draws = tensors["draws"].numel() if "draws" in tensors else self.plan.info.draws_bytes
        if pass_ == _c.BACKWARD and draws != self.plan.info.draws_bytes:
            raise RuntimeError(f"draws: expected {self.plan.info.draws_bytes} bytes of a forward pass, got {draws}")
        self._workspace_bytes = self.plan.info.workspace_bytes
        self._new_workspace = allocator((self._workspace_bytes,), torch.uint8, self.device)
        self._scale: float = options["scale"]
        self._temperature: float = options["temperature"]
        rounds = options["compute_dtype"] != _c.F32
        self._product_dtype = DTYPES[options["compute_dtype"]] if rounds else hidden.dtype
        bias = tensors.get("bias")
        inputs = Inputs(hidden, weight, tensors["targets"], bias, *[None] * (len(Inputs._fields) - 4))
        returned = results(pass_, inputs, options["reduction"], flags, self.plan.info.draws_bytes)
        for name in ("d_scale", "d_temperature"):  # made of d_hidden and d_bias, not rounded yet
            returned.pop(name, None)
        if flags.learns_numbers():
            returned["d_hidden"] = Result(tuple(hidden.shape), stats_dtype(hidden))
        if flags.want_d_temperature and bias is not None:
            returned["d_bias"] = Result(tuple(bias.shape), stats_dtype(hidden))
        if adds:
            del returned["d_classifier"]
        self._has_counts = "counts" in returned and returned.pop("counts").wanted
        self._writes = [
            (name, allocator(shape, dtype, self.device)) for name, (shape, dtype, wanted) in returned.items() if wanted
        ]
        one_target = "target_weight" not in tensors
        self._has_correct_count = one_target and "want_argmax" in _stats.wants(flags.stats)
        self._learns_numbers = flags.learns_numbers()
        buffers: Any = _c.make("logitless_buffers")
        buffers.hidden_stride, buffers.classifier_stride = row_stride(hidden), row_stride(weight)
        if adds:
            buffers.d_classifier_stride = row_stride(tensors["d_classifier"])
        self._template = bytes(buffers)

    def _specified(self, spec: _plan.Spec) -> _plan.Spec:
        """The problem of the tensors, and what is known beside them."""
        return spec

    def __call__(self, tensors: Tensors) -> Tensors:
        """Reads (and adds to) tensors of that layout. Returns what it has written, by RESULTS' names."""
        written: Tensors = {}
        buffers = _c.schema().Buffers.from_buffer_copy(self._template)
        for name, tensor in tensors.items():
            setattr(buffers, name, tensor.data_ptr())
        for name, allocate in self._writes:
            written[name] = tensor = allocate()
            setattr(buffers, name, tensor.data_ptr())
        if self._has_counts:
            written["counts"] = counts = torch.zeros(2, dtype=torch.int64, device=self.device)
            buffers.valid_count = counts.data_ptr() + counts.element_size()
            if self._has_correct_count:
                buffers.correct_count = counts.data_ptr()
        try:
            self._launch(buffers, written)
        except InvalidTargetError as error:
            shape = tensors["targets"].shape
            raise InvalidTargetError(_options.target_message(str(error), shape, self.targets_name)) from None
        except InvalidArgumentError:
            _refuse_freed(tensors)
            raise
        return self._with_numbers(written, tensors) if self._learns_numbers else written

    def _launch(self, buffers: Any, written: Tensors) -> None:
        if self._ordinal is None and self._workspace_bytes > _SMALL_WORKSPACE:
            return _plan.run_on_host(self.plan, buffers)
        # From PyTorch's allocators; on CUDA freed when this returns, to be used again in stream order.
        workspace = self._new_workspace()
        stream = None if self._ordinal is None else stream_of(self._ordinal)
        _plan.run(self.plan, buffers, workspace.data_ptr(), stream)

    def _with_numbers(self, written: Tensors, tensors: Tensors) -> Tensors:
        """The gradients of scale and temperature, and those that they are made of, rounded, as far as they are wanted.

        _numbers.inner_product says what they are."""
        flags, hidden, bias = self.flags, tensors["hidden"], tensors.get("bias")
        d_hidden = written.pop("d_hidden")
        product = _numbers.inner_product(hidden, d_hidden, self._product_dtype)
        if flags.want_d_scale:
            written["d_scale"] = (product / self._scale).to(d_hidden.dtype)
        if flags.want_d_hidden:
            written["d_hidden"] = d_hidden.to(hidden.dtype)
        if flags.want_d_temperature:
            if bias is not None:
                d_bias = written.pop("d_bias")
                product = product + _numbers.inner_product(bias[:, None], d_bias[:, None], bias.dtype)
                if flags.want_d_bias:
                    written["d_bias"] = d_bias.to(bias.dtype)
            written["d_temperature"] = (product / -self._temperature).to(d_hidden.dtype)
        return written


_runs: Cache[Any, Run] = Cache(256)


def layouts(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


def find(pass_: int, tensors: Tensors, options: dict[str, Any], flags: Flags) -> Run:
    """The run of tensors of these names and layouts. options: the resolved ones."""
    hidden, weight = tensors["hidden"], tensors["classifier"]
    key = (pass_, flags, hidden.device, place(hidden, weight), *options.values(), *tensors, *layouts(tensors.values()))
    run = _runs.get(key)
    if run is None:
        run = Run(pass_, tensors, options, flags)
        _runs.put(key, run)
    return run


def later_plans(
    tensors: Tensors, options: Mapping[str, Any], flags: Flags, main_grad: Tensor | None
) -> list[Callable[[], _plan.Plan]]:
    """Calls that plan the later backward pass, of the loss and every statistic that may have a gradient, where a
    budget may be too small for it. Other upstream gradients, some of these, need no more memory."""
    wants, hidden, weight = flags.wants(), tensors["hidden"], tensors["classifier"]
    if not any(wants) or options["max_workspace_bytes"] in (0, _options.FASTEST):
        return []
    given = dict.fromkeys((f"grad_{name}" for name in _stats.DIFFERENTIABLE if name in flags.stats), hidden)  # by name
    if main_grad is not None and wants.weight:
        given["d_classifier"] = main_grad
    gradients = Flags(*wants)._replace(keeps_draws=flags.keeps_draws)
    spec = spec_of(_c.BACKWARD, tensors | given, options, gradients, are_unaligned(hidden, weight))
    return [lambda: plan_on(spec, hidden.device)]


def find_forward(tensors: Tensors, options: dict[str, Any], flags: Flags, main_grad: Tensor | None) -> Run:
    """As find(), of a forward pass. flags: with the gradients that its backward pass will be asked for, for which the
    budget must be enough as well."""
    now = flags.with_gradients(Wants())
    later = later_plans(tensors, options, flags, main_grad)
    if not later:
        return find(_c.FORWARD, tensors, options, now)
    found: list[Any] = _plan.enough(lambda: find(_c.FORWARD, tensors, options, now), *later)
    return found[0]  # type: ignore[no-any-return]


def run(pass_: int, inputs: Inputs, options: dict[str, Any], flags: Flags, main_grad: Tensor | None = None) -> Tensors:
    """Runs a forward pass, or both in one. options: as the operators take them; of a forward pass flags and main_grad:
    as in find_forward."""
    options = resolved(inputs, options)
    tensors = readable(inputs, options["num_items"])
    if pass_ == _c.FORWARD:
        return find_forward(tensors, options, flags, main_grad)(tensors)
    return find(pass_, tensors, options, flags)(tensors)


def run_backward(
    inputs: Inputs,
    saved: dict[str, Tensor | None],
    main_grad: Tensor | None,
    options: dict[str, Any],
    flags: Flags,
) -> Tensors:
    """The backward pass; saved: lse, lse_low, entropy, draws and upstream gradients; options: the resolved ones. The
    gradient of the weight is added to main_grad [V, D] when that is given."""
    more = {name: contiguous(tensor) for name, tensor in read_by_backward(saved).items()}
    if main_grad is not None and flags.want_d_weight:
        check_own_memory(main_grad, inputs, saved)
        more["d_classifier"] = main_grad
    tensors = readable(inputs, options["num_items"]) | more
    return find(_c.BACKWARD, tensors, options, flags)(tensors)


def scale_in_place(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """``gradient *= factor`` of contiguous gradients on a CUDA device, where only the device knows the factor. What is
    0 stays 0, and nothing is done if the factor is 1."""
    if not gradients:
        return
    device, factor = factor.device.index, factor.to(stats_dtype(gradients[0]))
    _plan.scale_gradients(
        [gradient.data_ptr() for gradient in gradients],
        [CODES[gradient.dtype] for gradient in gradients],
        [gradient.numel() for gradient in gradients],
        factor.data_ptr(),
        device,
        stream_of(device),
    )
