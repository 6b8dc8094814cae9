"""What the library would do: its version, backends and plans. Needs neither PyTorch nor numpy."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import sys
from collections.abc import Collection
from typing import Any

from . import _c, _dtypes, _options, _plan
from ._plan import PlanInfo

_GRADIENTS = ("input", "linear_weight", "linear_bias")


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend of the library, in order of preference.

    Attributes:
        name: ``cuda``, ``cpu`` or ``reference``.
        description: the device, its instruction sets and the one chosen.
        why_unavailable: empty when it is usable on this machine.
    """

    name: str
    description: str
    why_unavailable: str


def version() -> str:
    """The version of the native library."""
    text: bytes = _c.library().logitless_version()
    return text.decode()


def backends() -> list[Backend]:
    """All backends, usable or not."""
    lib = _c.library()
    result = []
    for index in range(lib.logitless_backend_count()):
        description, why = ctypes.create_string_buffer(512), ctypes.create_string_buffer(512)
        _c.check(lib.logitless_backend_info(index, description, len(description), why, len(why)))
        result.append(
            Backend(lib.logitless_backend_name(index).decode(), description.value.decode(), why.value.decode())
        )
    return result


def default_threads() -> int:
    """PyTorch's number of threads where PyTorch is in use, else as many as the machine gives."""
    torch: Any = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else 0


def _spec(
    tokens: int,
    vocab: int,
    hidden: int,
    dtype: Any,
    weight_dtype: Any,
    gradients: Collection[str],
    linear_bias: bool,
    max_workspace_bytes: int | str | None,
    *,
    gradient: str,
    threshold: float,
    batch_invariant: bool,
    top_k: int,
    targets_per_row: int,
) -> _plan.Spec:
    _options.check_gradient(gradient)
    _options.check_batch_invariant(batch_invariant, gradient)
    for name in gradients:
        if name not in _GRADIENTS:
            raise ValueError(f"gradients: expected names out of {', '.join(_GRADIENTS)}, got {name!r}")
    hidden_dtype = _dtypes.float_code("dtype", dtype)
    classifier_dtype = hidden_dtype if weight_dtype is None else _dtypes.float_code("weight_dtype", weight_dtype)
    return _plan.Spec(
        pass_=_c.FORWARD_BACKWARD if gradients else _c.FORWARD,
        tokens=_options.integer("tokens", tokens),
        vocab=_options.integer("vocab", vocab),
        hidden=_options.integer("hidden", hidden),
        hidden_dtype=hidden_dtype,
        classifier_dtype=classifier_dtype,
        bias_dtype=classifier_dtype,
        d_hidden_dtype=hidden_dtype,
        d_classifier_dtype=classifier_dtype,
        d_bias_dtype=classifier_dtype,
        has_bias=linear_bias,
        want_d_hidden="input" in gradients,
        want_d_classifier="linear_weight" in gradients,
        want_d_bias="linear_bias" in gradients,
        max_workspace_bytes=_options.budget(max_workspace_bytes),
        gradient=_c.GRADIENTS[gradient],
        threshold=_options.checked_threshold(threshold),
        batch_invariant=batch_invariant,
        top_k=_options.integer("top_k", top_k),
        targets_per_row=_options.integer("targets_per_row", targets_per_row),
    )


def _place(device: Any) -> int | str:
    """An ordinal of a CUDA device, the host, or the name of a model."""
    if device is None:
        return _plan.HOST
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    name = str(device).lower() if isinstance(getattr(device, "type", device), str) else None
    if name is None:
        raise TypeError(
            'device: expected a torch.device, "cpu", "cuda", "cuda:N", an ordinal of a CUDA device, a model of one '
            f'(such as "h200") or None, got {type(device).__name__}'
        )
    found = re.fullmatch(r"(cpu|cuda)(?::([0-9]+))?", name)
    if found is None:
        return name
    if found[1] == "cpu":
        return _plan.HOST
    if found[2] is not None:
        return int(found[2])
    torch = sys.modules.get("torch")  # whose current device "cuda" is
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0


def plan(
    tokens: int,
    vocab: int,
    hidden: int,
    *,
    dtype: Any = "float32",
    weight_dtype: Any = None,
    gradients: Collection[str] = ("input", "linear_weight"),
    linear_bias: bool = False,
    max_workspace_bytes: int | str | None = None,
    threads: int | None = None,
    backend: str | None = None,
    device: Any = None,
    gradient: str = "exact",
    threshold: float = _options.DEFAULT_THRESHOLD,
    batch_invariant: bool = False,
    top_k: int = 0,
    targets_per_row: int = 0,
) -> PlanInfo:
    """The plan of a loss (with its gradients) of ``tokens`` rows; allocates and computes nothing.

    Args:
        tokens: N, rows of input.
        vocab: V, rows of the head's weight.
        hidden: D, columns of both.
        dtype: of input; a name ("bfloat16", "bf16"), a torch dtype or a numpy dtype.
        weight_dtype: of the head's weight; None: as ``dtype``.
        gradients: which are wanted, out of ``input``, ``linear_weight``, ``linear_bias``; none: loss only.
        linear_bias: whether there is a bias.
        max_workspace_bytes: hard bound of memory beyond inputs and outputs: bytes, a size such as ``"256MiB"``,
            ``"fastest"`` or None, as in :func:`logitless.linear_cross_entropy`.
        threads: None: PyTorch's number where PyTorch is in use, else the machine's.
        backend: by name; None: the first of :func:`backends` that can run the problem.
        device: that holds the tensors: a ``torch.device``, ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or the ordinal of a CUDA
            device; or the model of one that need not be here: ``"a100"``, ``"a10"``, ``"l40s"``,
            ``"rtx-4090"``, ``"rtx-5090"``, ``"h100"``, ``"h200"``, ``"b200"``. None: the CPU.
        gradient: ``"exact"``, ``"thinned"`` or ``"always-thinned"``.
        threshold: of thinned gradients, in [2^-126, 1].
        batch_invariant: as in :func:`logitless.linear_cross_entropy`.
        top_k: k of :func:`logitless.linear_top_k`, which is a loss without gradients; 0: none.
        targets_per_row: K where a row has several targets, as of :func:`logitless.linear_log_probs`; 0: one.

    Raises:
        BudgetTooSmallError: no plan fits; its ``required_bytes`` is the smallest budget that works.
        InvalidArgumentError: a size out of range.
    """
    sizes = (tokens, vocab, hidden)
    method: dict[str, Any] = {"gradient": gradient, "threshold": threshold, "batch_invariant": batch_invariant}
    method |= {"top_k": top_k, "targets_per_row": targets_per_row}
    spec = _spec(*sizes, dtype, weight_dtype, gradients, linear_bias, max_workspace_bytes, **method)
    return _plan.plan_of(spec, default_threads() if threads is None else threads, backend, _place(device)).info


def plans(
    tokens: int,
    vocab: int,
    hidden: int,
    *,
    dtype: Any = "float32",
    weight_dtype: Any = None,
    gradients: Collection[str] = ("input", "linear_weight"),
    linear_bias: bool = False,
    max_workspace_bytes: int | str | None = None,
    threads: int | None = None,
    backend: str | None = None,
    device: Any = None,
    gradient: str = "exact",
    threshold: float = _options.DEFAULT_THRESHOLD,
    batch_invariant: bool = False,
    top_k: int = 0,
    targets_per_row: int = 0,
) -> list[PlanInfo]:
    """The plans among which :func:`plan` chooses, for the same arguments: those that fit the budget."""
    sizes = (tokens, vocab, hidden)
    method: dict[str, Any] = {"gradient": gradient, "threshold": threshold, "batch_invariant": batch_invariant}
    method |= {"top_k": top_k, "targets_per_row": targets_per_row}
    spec = _spec(*sizes, dtype, weight_dtype, gradients, linear_bias, max_workspace_bytes, **method)
    return _plan.list_plans(spec, default_threads() if threads is None else threads, backend, _place(device))
