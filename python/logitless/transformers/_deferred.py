"""The tensor that a head returns in place of its logits: it has their shape, dtype and device, and no values.

The model's own code goes on with it. An operation that the fused head computes exactly is recorded. Any other one
raises an error with its name, so an unknown transform stops the training instead of being left out silently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ._logits import Logits
from ._loss import cross_entropy

_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
METADATA = frozenset(
    "shape device dtype ndim layout is_cuda is_cpu is_mps is_meta is_sparse is_quantized is_nested requires_grad size "
    "is_contiguous dim ndimension numel nelement __len__ get_device is_floating_point is_complex".split()
)


class DeferredLogits(Tensor):
    """Logits without values; :attr:`logits` records how they would be computed."""

    logits: Logits

    @staticmethod
    def __new__(cls, logits: Logits) -> DeferredLogits:
        made: DeferredLogits = Tensor._make_wrapper_subclass(
            cls, logits.shape, dtype=logits.dtype, device=logits.terms[0].hidden.device
        )
        made.logits = logits
        return made

    def __init__(self, logits: Logits) -> None:
        pass

    # Tensor-parallel modules call these of the DTensor that their head returns. All ranks have the same logits here.

    @property
    def placements(self) -> tuple[Any, ...]:
        if not self.logits.as_dtensor:
            raise AttributeError("placements")
        hidden: Any = self.logits.terms[0].hidden
        return tuple(type(placement)() for placement in self._replicated(hidden.placements))

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DeferredLogits:
        self._replicated(placements)
        return self

    def to_local(self, **options: Any) -> DeferredLogits:
        return DeferredLogits(replace(self.logits, as_dtensor=False))

    def _replicated(self, placements: Any) -> Any:
        if not all(placement.is_replicate() for placement in placements):
            raise self.logits.refuse(
                f"a distribution as {tuple(placements)}; expected Replicate() for the head's output"
            )
        return placements

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        logits = _first(args, kwargs)
        if logits is None:
            raise NotImplementedError(f"logitless.transformers: {name} of the logits inside a container")
        if name == "detach" and str(sys._getframe(1).f_globals.get("__name__")).startswith("deepspeed."):
            return cls(logits)  # ZeRO-3's hooks pass all outputs of a module through an autograd function
        if name not in _KNOWN:
            raise logits.refuse(f"{name}()")
        if logits.session.gradients and not torch.is_grad_enabled():  # its backward pass would never be called
            raise logits.refuse(f"{name}() without gradients (under torch.no_grad, or in an autograd function)")
        return _KNOWN[name](logits, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        logits = _first(args, kwargs or {})
        if logits is None:
            raise NotImplementedError(f"logitless.transformers: {func} of logits that are never made")
        raise logits.refuse(f"{func}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={list(self.logits.shape)}, dtype={self.logits.dtype})"


def name_of(func: Any) -> str:
    name = str(getattr(func, "__name__", func))
    return str(func.__self__.__name__) if name == "__get__" else name


def _first(args: Any, kwargs: dict[str, Any]) -> Logits | None:
    """Returns the first logits among the arguments, also inside a list or tuple such as torch.stack's."""
    for value in (*args, *kwargs.values()):
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, DeferredLogits):
                return part.logits
    return None


def _only_positional(logits: Logits, func: Any, kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise logits.refuse(f"{name_of(func)}() with {', '.join(kwargs)}")


def _on_probe(logits: Logits, run: Callable[[Tensor], Tensor]) -> Tensor | None:
    if logits.probe is None:
        return None
    with torch.no_grad():
        made = run(logits.probe)
        return made.reshape(-1, made.shape[-1])


def _number(logits: Logits, value: object, func: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Tensor) and not isinstance(value, DeferredLogits) and value.numel() == 1:
        if value.requires_grad:
            raise logits.refuse(f"{name_of(func)}() by a factor that is learned")
        return float(value)
    raise logits.refuse(f"{name_of(func)}() by {_text(value)}")


def _text(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _pair(logits: Logits, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    _only_positional(logits, func, kwargs)
    if len(args) != 2:
        raise logits.refuse(f"{name_of(func)}() with {len(args)} arguments")
    return args[0], args[1]


def _scale(logits: Logits, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    first, second = _pair(logits, func, args, kwargs)
    divides, is_first = "div" in name_of(func), isinstance(first, DeferredLogits)
    if divides and not is_first:
        raise logits.refuse("a division by them")
    number = _number(logits, second if is_first else first, func)
    if divides and number == 0.0:
        raise logits.refuse("a division by 0")
    probe = _on_probe(logits, lambda z: func(*(z if isinstance(a, DeferredLogits) else a for a in args)))
    return DeferredLogits(replace(logits.scaled(1.0 / number if divides else number), probe=probe))


def _add(logits: Logits, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    first, second = _pair(logits, func, args, kwargs)
    if isinstance(first, DeferredLogits) and isinstance(second, DeferredLogits):
        probe, other = first.logits.probe, second.logits.probe
        total = first.logits.plus(second.logits)
        both = None if probe is None or other is None else probe + other
        dtype = torch.promote_types(first.logits.dtype, second.logits.dtype)
        return DeferredLogits(replace(total, probe=both, dtype=dtype))
    bias = second if isinstance(first, DeferredLogits) else first
    if not isinstance(bias, Tensor):
        raise logits.refuse(f"{name_of(func)}() of {_text(bias)}")
    dtype = torch.promote_types(logits.dtype, bias.dtype)
    return DeferredLogits(replace(logits.with_bias(bias), dtype=dtype, probe=_on_probe(logits, lambda z: z + bias)))


def _tanh(logits: Logits, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    _only_positional(logits, func, kwargs)
    return DeferredLogits(replace(logits.capped(), probe=_on_probe(logits, torch.tanh)))


def _cast(logits: Logits, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Only records the dtype: products are always accumulated in float32 (float64 for float64)."""
    name, dtype, device = name_of(func), logits.dtype, logits.terms[0].hidden.device
    dtype = _CASTS.get(name, dtype)
    if not isinstance(args[0], DeferredLogits) or (name == "type" and len(args) == 1):
        raise logits.refuse(f"{name}()")
    for value in (*args[1:], *(kwargs[key] for key in ("dtype", "device", "other") if key in kwargs)):
        wanted: Any = device
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, Tensor):
            dtype, wanted = value.dtype, value.device
        elif isinstance(value, (torch.device, str, int)) and not isinstance(value, bool):
            wanted = torch.empty(0, device=value).device
        if wanted != device:
            raise logits.refuse(f"a move to {wanted}")
    if not dtype.is_floating_point:
        raise logits.refuse(f"a cast to {dtype}")
    probe = _on_probe(logits, lambda z: z.to(torch.promote_types(z.dtype, dtype)))  # never to fewer bits
    return DeferredLogits(replace(logits, dtype=dtype, probe=probe))


def _meta(logits: Logits) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device="meta")


def _same(logits: Logits, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    return DeferredLogits(logits)


def _reshape(logits: Logits, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Reshapes the rows; they keep their order as long as the last size stays, as memory is row-major."""
    if not isinstance(args[0], DeferredLogits):
        raise logits.refuse(f"{name_of(func)}() of another tensor")
    try:
        made = func(_meta(logits), *args[1:], **kwargs)
    except Exception as error:
        raise logits.refuse(f"{name_of(func)}() as {args[1:]} of shape {list(logits.shape)} ({error})") from error
    shape = made.shape
    if made.dtype != logits.dtype or not shape or shape[-1] != logits.vocab:
        raise logits.refuse(f"{name_of(func)}() to shape {list(shape)}, which splits the vocabulary of {logits.vocab}")
    return DeferredLogits(logits.over_rows(lambda hidden: hidden.reshape(*shape[:-1], hidden.shape[-1])))


def _index(logits: Logits, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    if not isinstance(args[0], DeferredLogits):
        raise logits.refuse("an index made of them")
    parts = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(not (p is None or p is Ellipsis or type(p) in (int, slice, Tensor)) for p in parts):
        raise logits.refuse(f"[{', '.join(type(p).__name__ for p in parts)}]")
    rank = len(logits.shape)
    used = sum(_dimensions(p) for p in parts)
    if Ellipsis in [p for p in parts if not isinstance(p, Tensor)]:
        place = next(i for i, p in enumerate(parts) if p is Ellipsis)
        parts = (*parts[:place], *[slice(None)] * (rank - used), *parts[place + 1 :])
        used = rank
    if used > rank:
        raise logits.refuse(f"an index of {used} dimensions")
    if used == rank:
        last = parts[-1]
        if not isinstance(last, slice) or last.start not in (None, 0) or last.step not in (None, 1):
            raise logits.refuse(f"an index {last!r} of the vocabulary")
        count = len(range(logits.vocab)[last])
        if count != logits.vocab:
            probe = _on_probe(logits, lambda z: z[:, :count])
            logits = replace(logits.first_entries(count), probe=probe)
        parts = parts[:-1]
    return DeferredLogits(logits.over_rows(lambda hidden: hidden[parts]))


def _dimensions(part: object) -> int:
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


def _loss(logits: Logits, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    if not args or not isinstance(args[0], DeferredLogits):
        if not isinstance(kwargs.get("input"), DeferredLogits):
            raise logits.refuse("cross_entropy() with them as targets")
        args, kwargs = (kwargs["input"],), {key: value for key, value in kwargs.items() if key != "input"}
    return cross_entropy(logits, *args[1:], **kwargs)


def _table(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: handler for names, handler in entries.items() for name in names.split()}


_KNOWN: dict[str, Callable[[Logits, Any, Any, dict[str, Any]], Tensor]] = _table(
    {
        "mul multiply __mul__ __rmul__ div divide true_divide __truediv__ __div__": _scale,
        "add __add__ __radd__": _add,
        "tanh": _tanh,
        "to float double half bfloat16 type type_as": _cast,
        "contiguous clone": _same,
        "view reshape flatten squeeze unsqueeze": _reshape,
        "__getitem__": _index,
        "cross_entropy": _loss,
    }
)
