"""The library's version, backends and plans, and whether it was built for CUDA. Needs neither PyTorch nor numpy."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import sys
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import native
from . import options as _options
from .errors import LibraryNotFoundError
from .native import PlanInfo
from .options import accepts

if TYPE_CHECKING:
    from typing_extensions import Unpack

_GRADIENTS = ("hidden", "weight", "bias")


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend of the library, in order of preference.

    Attributes:
        name: ``cuda``, ``cpu`` or ``reference``.
        description: The device, its engines and the chosen one.
        why_unavailable: Why it is not usable on this machine; empty if it is.
    """

    name: str
    description: str
    why_unavailable: str


def version() -> str:
    """Returns the version of the native library."""
    text: bytes = native.library().logitless_version()
    return text.decode()


def backends() -> list[Backend]:
    """Returns all backends, usable or not, in order of preference."""
    lib = native.library()
    result = []
    for index in range(lib.logitless_backend_count()):
        description, why = ctypes.create_string_buffer(512), ctypes.create_string_buffer(512)
        native.check(lib.logitless_backend_info(index, description, len(description), why, len(why)))
        result.append(
            Backend(lib.logitless_backend_name(index).decode(), description.value.decode(), why.value.decode())
        )
    return result


def default_threads() -> int:
    """Returns PyTorch's number of threads where PyTorch is imported, else 0: as many as the machine has."""
    torch: Any = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else 0


class PlanOptions(_options.MethodOptions, total=False):
    """Options of plan() and plans()."""

    dtype: Any
    weight_dtype: Any
    gradients: Collection[str]
    bias: bool
    threads: int | None
    backend: str | None
    device: Any
    top_k: int
    targets_per_row: int
    later: bool
    keeps_screen: bool


_NAMES = _options.names_of(PlanOptions)
_MORE: dict[str, Any] = dict.fromkeys(("weight_dtype", "threads", "backend", "device"))
_MORE |= {"dtype": "float32", "gradients": ("hidden", "weight"), "bias": False}
_MORE |= {"top_k": 0, "targets_per_row": 0, "later": False, "keeps_screen": False}


def _planned(function: str, sizes: tuple[int, int, int], given: Any) -> tuple[native.Spec, int, str | None, int | str]:
    """Returns the arguments of native.plan_of and native.list_plans."""
    o = _options.filled(function, _NAMES, given, _MORE)
    gradients = _options.gradient_names(o["gradients"], _GRADIENTS)
    tokens, vocab, hidden = sizes
    method = _options.checked_method(o) | {"max_workspace_bytes": _options.budget(o["max_workspace_bytes"])}
    method["compute_dtype"] = _options.compute_code(method["compute_dtype"])
    hidden_dtype = _options.float_code("dtype", o["dtype"])
    given_dtype = o["weight_dtype"]
    weight_dtype = hidden_dtype if given_dtype is None else _options.float_code("weight_dtype", given_dtype)
    bias_dtype = {"bias": weight_dtype} if o["bias"] else {}
    dtypes = {"hidden": hidden_dtype, "weight": weight_dtype, "targets": _options.I64, **bias_dtype}
    made = {f"d_{name}": dtypes.get(name, weight_dtype) for name in _GRADIENTS if name in gradients}
    passes: dict[str, Any] = {"pass_": _options.FORWARD_BACKWARD if gradients else _options.FORWARD}
    if _options.flag("later", o["later"]):
        if not gradients:
            raise ValueError("later: expected False without gradients, got True")
        passes = {"pass_": _options.BACKWARD, "saved_bytes": _options.FASTEST}
        made["saved"] = 0
    if _options.flag("keeps_screen", o["keeps_screen"]):
        made["screen_weight"] = 0
    spec = native.spec(
        (_options.integer("tokens", tokens), _options.integer("vocab", vocab), _options.integer("hidden", hidden)),
        dtypes | made,
        **passes,
        **method,
        top_k=_options.integer("top_k", o["top_k"]),
        targets_per_row=_options.integer("targets_per_row", o["targets_per_row"]),
    )
    threads = default_threads() if o["threads"] is None else o["threads"]
    return spec, threads, o["backend"], device_of(o["device"])


def device_of(device: Any) -> int | str:
    """Returns the ordinal of a CUDA device, HOST, or the name of a model."""
    if device is None:
        return native.HOST
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    name = str(device).lower() if isinstance(getattr(device, "type", device), str) else None
    if name is None:
        raise TypeError(
            'device: expected a torch.device, "cpu", "cuda", "cuda:N", an ordinal of a CUDA device, a model of one '
            f'(such as "h200") or None, got {type(device).__name__}'
        )
    match = re.fullmatch(r"(cpu|cuda)(?::([0-9]+))?", name)
    if match is None:
        return name
    if match[1] == "cpu":
        return native.HOST
    if match[2] is not None:
        return int(match[2])
    torch = sys.modules.get("torch")  # "cuda" is its current device
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0


@accepts(PlanOptions, **_MORE)
def plan(tokens: int, vocab: int, hidden: int, **options: Unpack[PlanOptions]) -> PlanInfo:
    """Returns the plan of a loss of ``tokens`` rows, with its gradients. Allocates and computes nothing.

    Args:
        tokens: N, the rows of hidden.
        vocab: V, the rows of weight.
        hidden: D, the columns of both.
        dtype: The dtype of hidden: a name ("bfloat16", "bf16"), a torch dtype or a numpy dtype.
        weight_dtype: The dtype of weight. None means ``dtype``.
        gradients: The wanted gradients, from ``hidden``, ``weight`` and ``bias``. None of them means loss only.
        bias: Whether there is a bias.
        max_workspace_bytes: Hard bound of the memory beyond inputs and outputs: bytes, a size such as ``"256MiB"``,
            ``"fastest"`` or None, as in :func:`logitless.linear_cross_entropy`.
        threads: Threads of the CPU. None means PyTorch's number where PyTorch is imported, else the machine's.
        backend: A backend's name. None means the first of :func:`backends` that can run the problem.
        device: The device of the tensors: a ``torch.device``, ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or the ordinal of a
            CUDA device. None means the CPU. The model of a GPU that need not be present is another choice: ``"a100"``,
            ``"a10"``, ``"l40s"``, ``"rtx-4090"``, ``"rtx-5090"``, ``"h100"``, ``"h200"`` or ``"b200"``.
        gradient: ``"exact"``, ``"sparsified"`` or ``"always-sparsified"``.
        threshold: Threshold of sparsified gradients, in [2^-126, 1].
        screen: As in :func:`logitless.linear_cross_entropy`.
        compute_dtype: As in :func:`logitless.linear_cross_entropy`.
        batch_invariant: As in :func:`logitless.linear_cross_entropy`.
        top_k: k of :func:`logitless.linear_top_k`, a problem without gradients. 0 means a loss.
        targets_per_row: K where rows have several targets, as in :func:`logitless.linear_log_probs`. 0 means one.

        later: Whether the gradients come after the loss, in a backward pass. The plan is then that pass's, and its
            ``saved_bytes`` live from the forward pass on. ``max_workspace_bytes`` limits both together.
        keeps_screen: Whether the screen is a :class:`logitless.ScreenedWeight`. Its memory is the plan's
            ``screen_weight_bytes``. ``max_workspace_bytes`` limits it together with the workspace.

    Raises:
        BudgetTooSmallError: No plan fits. Its ``required_bytes`` is the smallest budget that works.
        InvalidArgumentError: A size is out of range.
    """
    return native.plan_of(*_planned("plan", (tokens, vocab, hidden), options)).info


@accepts(PlanOptions, **_MORE)
def plans(tokens: int, vocab: int, hidden: int, **options: Unpack[PlanOptions]) -> list[PlanInfo]:
    """Returns the plans among which :func:`plan` chooses for the same arguments: all that fit the budget."""
    return native.list_plans(*_planned("plans", (tokens, vocab, hidden), options))


# ---- a build without CUDA

_DEVICES = Path("/dev")  # has a file nvidia0 for the first GPU


def why_no_cuda() -> str:
    """Returns why the library has no CUDA kernels, and a remedy; empty if it has them, or the reason is unknown."""
    try:
        return native.library_path().with_name("no_cuda.txt").read_text(encoding="utf-8").strip()
    except (OSError, LibraryNotFoundError):  # a missing library is reported where it is used
        return ""


def warn_without_cuda() -> None:
    """Warns if the machine has a GPU and the library no CUDA kernels. Calls no CUDA function: no process may fork after
    one."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    why = why_no_cuda() if not is_hidden and any(_DEVICES.glob("nvidia[0-9]*")) else ""
    if why:
        warnings.warn(f"logitless: this machine has an NVIDIA GPU, but {why}", RuntimeWarning, stacklevel=3)
