"""The names of Apple's Cut Cross Entropy: ``linear_cross_entropy``, ``LinearCrossEntropy`` and ``cce_patch``.

Signatures are those of the public repository apple/ml-cross-entropy at version 25.6.4, which its instructions install.
PyPI only has 25.1.1, whose arguments are a subset of these with the same meaning. There ``ignore_index`` has the
position that ``bias`` has here, so a positional argument after ``targets`` of another type raises an error. See
docs/pytorch.md.
"""

from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..functional import linear_cross_entropy as _fused
from ..transformers import patch
from ._group import raises_on_all_ranks, with_parts_of_gradient
from ._module import module_of_options, options_of
from ._targets import indices

__all__ = [
    "LinearCrossEntropy",
    "LinearCrossEntropyImpl",
    "VocabParallelOptions",
    "cce_patch",
    "compute_z_loss",
    "linear_cross_entropy",
]

Model = TypeVar("Model", bound=nn.Module)


class LinearCrossEntropyImpl(enum.IntEnum):
    """Names of implementations; here all of them compute the same."""

    CCE = enum.auto()
    TORCH_COMPILE = enum.auto()
    CCE_KAHAN_FULL_C = enum.auto()
    CCE_KAHAN_FULL_E = enum.auto()
    CCE_EXACT = enum.auto()
    CCE_KAHAN_FULL_C_FULL_E = enum.auto()
    CCE_KAHAN_FULL = enum.auto()


_IMPLS = tuple(impl.name.lower() for impl in LinearCrossEntropyImpl)


@dataclass
class VocabParallelOptions:
    """This rank's range of a vocabulary that is sharded over a group.

    Args:
        start: The first row of the vocabulary. The ranks' ranges follow one another.
        stop: The end of the range, exclusive.
        group: A ``torch.distributed`` process group, or None for the default group.
        reduce_e_grad: Whether the gradient of ``e`` is summed over the ranks. If False, each rank has a part of it.
    """

    start: int
    stop: int
    group: Any = None
    reduce_e_grad: bool = True

    @classmethod
    def from_vocab(cls, vocab_size: int, group: Any = None, reduce_e_grad: bool = True) -> VocabParallelOptions:
        """Returns this rank's range, in the order of ranks; where V / ranks is not whole, first ranks have one more."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        size, more = divmod(vocab_size, ranks)
        start = rank * size + min(rank, more)
        return cls(start, start + size + (rank < more), group, reduce_e_grad)


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: str | LinearCrossEntropyImpl = LinearCrossEntropyImpl.CCE,
    vocab_parallel_options: VocabParallelOptions | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of the logits ``e @ c.T + bias`` at ``targets``.

    Args:
        e: Hidden states ``[..., D]``.
        c: Weight ``[V, D]``.
        targets: Class indices ``[...]``.
        bias: ``[V]``, or None.
        ignore_index: The target of rows that are left out of the loss.
        softcap: Bound of the logits, a number > 0, or None.
        reduction: ``"mean"`` over rows that are not ignored (NaN where there are none), ``"sum"`` or ``"none"``. The
            last one has the shape of ``targets``, and 0 for ignored rows.
        shift: Position t predicts ``targets[..., t + shift]``; True is 1. With reduction "none" the last dimension of
            the loss is shorter by ``shift``, and so is that of lse with any reduction.
        return_lse: Whether the log-sum-exp of each row is returned as well. It is differentiable, and 0 for ignored
            rows.
        filter_eps: Accepted and not used; gradients are not filtered.
        accum_e_fp32: Accepted and not used; gradients are summed in float32.
        accum_c_fp32: As ``accum_e_fp32``.
        filter_e_grad: As ``filter_eps``.
        filter_c_grad: As ``filter_eps``.
        impl: A name of :class:`LinearCrossEntropyImpl`; not used.
        vocab_parallel_options: Says that ``c`` and ``bias`` are this rank's part of the vocabulary. All ranks have the
            same ``e`` and ``targets``.

    Returns:
        The loss, or with ``return_lse`` the loss and lse; float32, or float64 for float64 inputs.

    Raises:
        AssertionError: ``e`` or ``targets`` has a wrong shape.
        IndexError: ``targets`` has no dimension.
        ValueError: ``shift``, ``bias``, ``softcap`` or ``reduction`` is out of range, or a tensor is a DTensor.
        RuntimeError: ``filter_eps`` is none of the known values.
        NotImplementedError: ``impl`` is not known.
    """
    _check_impl(impl, NotImplementedError)
    _check_filter_eps(filter_eps)
    shard = vocab_parallel_options
    with contextlib.nullcontext() if shard is None else raises_on_all_ranks(shard.group):
        _check_kinds(e, c, targets, bias)
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap: expected a number > 0 or None, got {softcap}")
        length = targets.size(-1)
        if not 0 <= shift < length:
            raise ValueError(f"shift: expected an integer in [0, {length}), got {shift}")
        if shard is not None and c.shape[0] != shard.stop - shard.start:
            raise ValueError(f"c: expected {shard.stop - shard.start} rows of vocab_parallel_options, got {c.shape[0]}")
        _check_shapes(e, c, bias)
        targets = indices("targets", targets, e.shape[:-1], AssertionError)
    steps = int(shift)
    options: dict[str, Any] = {
        "bias": bias,
        "ignore_index": ignore_index,
        "softcap": softcap,
        "reduction": reduction,
        "shift": steps,
        "return_stats": ("lse",) if return_lse else (),
    }
    outputs: Any
    outputs = _fused(e, c, targets, **options) if shard is None else _sharded(e, c, targets, shard, options)
    loss: Tensor = outputs.loss[..., : length - steps] if reduction == "none" else outputs.loss
    if outputs.lse is None:
        return loss
    return loss, outputs.lse[..., : length - steps]


def _sharded(e: Tensor, c: Tensor, targets: Tensor, shard: VocabParallelOptions, options: dict[str, Any]) -> Any:
    if shard.reduce_e_grad:
        from ..distributed import linear_cross_entropy

        return linear_cross_entropy(e, c, targets, group=shard.group, vocab_start=shard.start, **options)
    return with_parts_of_gradient(e, c, targets, group=shard.group, vocab_start=shard.start, **options)


def _name(impl: object) -> object:
    return impl.name.lower() if isinstance(impl, enum.IntEnum) else impl


def _check_impl(impl: object, error: type[Exception]) -> None:
    if _name(impl) not in _IMPLS:
        raise error(f"impl: expected one of {', '.join(_IMPLS)}, got {impl!r}")


def _check_filter_eps(filter_eps: object) -> None:
    """Raises unless the value is one of 25.6.4's, or "high", the default of 25.1.1."""
    if filter_eps is not None and not isinstance(filter_eps, float) and filter_eps not in ("auto", "high"):
        raise RuntimeError(f'filter_eps: expected "auto", a float or None, got {filter_eps!r}')


def _check_kinds(e: Tensor, c: Tensor, targets: Tensor, bias: object) -> None:
    if bias is not None and not isinstance(bias, Tensor):
        raise TypeError(
            f"bias: expected a tensor or None, got {bias!r}; cut-cross-entropy 25.1.1 has ignore_index in this place: "
            "pass ignore_index, softcap, reduction and shift by name"
        )
    for name, tensor in {"e": e, "c": c, "targets": targets, "bias": bias}.items():
        if hasattr(tensor, "full_tensor") and hasattr(tensor, "placements"):
            raise ValueError(f"{name}: expected a plain torch.Tensor, got a DTensor: pass {name}.full_tensor()")


def _check_shapes(e: Tensor, c: Tensor, bias: Tensor | None) -> None:
    assert e.shape[-1] == c.shape[1], f"e: expected shape [..., {c.shape[1]}], got {list(e.shape)}"
    if bias is not None and bias.shape != c.shape[:1]:
        raise ValueError(f"bias: expected shape [{c.shape[0]}], got {list(bias.shape)}")


@module_of_options
class LinearCrossEntropy(nn.Module):
    """A module without parameters; its options are those of :func:`linear_cross_entropy`."""

    ignore_index: int = -100
    softcap: float | None = None
    reduction: str = "mean"
    shift: bool | int = 0
    filter_eps: float | str | None = "auto"
    accum_e_fp32: bool = False
    accum_c_fp32: bool = False
    filter_e_grad: bool = True
    filter_c_grad: bool = True
    impl: str | LinearCrossEntropyImpl = LinearCrossEntropyImpl.CCE
    return_lse: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.shift, int):
            raise TypeError(
                f"shift: expected an integer, got {self.shift!r}; cut-cross-entropy 25.1.1 has filter_eps in this "
                "place: pass filter_eps and shift by name"
            )

    def forward(
        self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        return linear_cross_entropy(e, c, targets, bias, **options_of(self))


def compute_z_loss(
    lse: Tensor,
    targets: Tensor | None = None,
    shift: bool | int = False,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Returns ``lse ** 2``, reduced over rows whose target is not ``ignore_index``, or without targets over all rows.

    Args:
        lse: Log-sum-exp of each row.
        targets: Class indices, or None.
        shift: As in :func:`linear_cross_entropy`.
        ignore_index: As in :func:`linear_cross_entropy`.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Raises:
        ValueError: ``reduction`` is another one.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction: expected one of "mean", "sum", "none", got {reduction!r}')
    rows = lse.square()
    if targets is None:
        return rows if reduction == "none" else rows.sum() if reduction == "sum" else rows.mean()
    valid = targets[..., int(shift) :] != ignore_index
    rows = torch.where(valid, rows, 0.0)
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / valid.sum()


def cce_patch(
    model_type_or_model: Model,
    impl: str | LinearCrossEntropyImpl = LinearCrossEntropyImpl.CCE,
    reduction: str = "mean",
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    train_only: bool = False,
) -> Model:
    """Calls :func:`logitless.transformers.patch` with a model, and returns the model.

    Args:
        model_type_or_model: A model. Its class may be any that :func:`logitless.transformers.patch` accepts.
        impl: A name of :class:`LinearCrossEntropyImpl`; not used.
        reduction: ``"mean"``, which the model's own loss has.
        filter_eps: Accepted and not used, like ``accum_e_fp32``, ``accum_c_fp32``, ``filter_e_grad`` and
            ``filter_c_grad``.
        train_only: False also leaves the logits out where no gradient is wanted.

    Raises:
        ValueError: ``impl`` is not known.
        RuntimeError: The argument is a name or a configuration; only models are patched, no classes.
        NotImplementedError: ``reduction`` is not "mean".
    """
    _check_impl(impl, ValueError)
    _check_filter_eps(filter_eps)
    if not isinstance(model_type_or_model, nn.Module):
        got = model_type_or_model if isinstance(model_type_or_model, str) else type(model_type_or_model).__name__
        raise RuntimeError(
            f"model_type_or_model: expected a model, got {got!r}: classes are not patched; call cce_patch(model) after "
            "the model is made"
        )
    if reduction != "mean":
        raise NotImplementedError(f'reduction: expected "mean" (the model\'s own loss), got {reduction!r}')
    return patch(model_type_or_model, evaluate=not train_only)
