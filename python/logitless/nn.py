"""Modules: ``logitless.LinearCrossEntropyLoss``, a head with its loss; in ``logitless.nn`` ``FusedHead``, a model's
``lm_head`` that also computes its loss, ``MultiHeadLoss``, several heads, ``AdaptiveLogSoftmaxWithLoss``, and
``InfoNCELoss``, the loss of pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import options as _options
from .adaptive import AdaptiveLogSoftmaxWithLoss
from .call import Number, check_linear, hooks_of
from .errors import UnsupportedError
from .functional import LinearCrossEntropyOutput, linear_cross_entropy
from .multi_head import (
    Factors,
    MultiHeadOutput,
    check_factors,
    check_reduction,
    checked_shifts,
    multi_head_linear_cross_entropy,
)
from .options import DEFAULTS, LOSS_OPTIONS, CallOptions, LossOptions, PairCallOptions, PairOptions, accepts
from .retrieval import info_nce
from .run import torch_dtype
from .screened import ScreenedWeight

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FusedHeadOptions(LossOptions, total=False):
    class_weight: Tensor | None


__all__ = ["AdaptiveLogSoftmaxWithLoss", "FusedHead", "InfoNCELoss", "MultiHeadLoss"]


# Heads have shifts of their own, and their statistics have no gradient.
MultiHeadOptions = _options.without(LossOptions, "shift")
MultiHeadCallOptions = _options.without(CallOptions, "differentiable_stats")
Head = TypeVar("Head", bound="FusedHead")
_CALL, _PAIR_CALL = _options.names_of(CallOptions), _options.names_of(PairCallOptions)
_NAMES = tuple(name for name in DEFAULTS if name in LOSS_OPTIONS)
_PAIR_NAMES = tuple(name for name in DEFAULTS if name in PairOptions.__annotations__)

# Keywords of torch.nn.LinearCrossEntropyLoss in their order; its weight is class_weight here.
_UPSTREAM = "out_features bias device dtype reduction class_weight ignore_index label_smoothing options".split()


def _keep(module: nn.Module, given: Mapping[str, Any], names: Sequence[str] = _NAMES, **defaults: Any) -> None:
    """Checks the options of a module's constructor and keeps them as attributes."""
    _options.check_names(type(module).__name__, given, frozenset(names))
    options = {name: given.get(name, defaults.get(name, DEFAULTS[name])) for name in names}
    _options.check_choice("reduction", options["reduction"], _options.REDUCTIONS)
    is_kept = isinstance(options["screen"], ScreenedWeight)
    _options.checked_training(options | ({"screen": "fp8"} if is_kept else {}))
    smoothing = options["label_smoothing"]
    if not (isinstance(smoothing, (int, float, Tensor)) and 0 <= smoothing <= 1):
        raise ValueError(f"label_smoothing: expected a number in [0, 1], got {smoothing!r}")
    for name, value in options.items():
        setattr(module, name, value)


def _kept(module: nn.Module, temperature: Number | None) -> Any:
    """Returns the options of a call. temperature: replaces the module's unless None."""
    options = {name: getattr(module, name) for name in _NAMES}
    if temperature is not None:
        options["temperature"] = temperature
    return options


class LinearCrossEntropyLoss(nn.Module):
    """A linear head with its cross entropy.

    The constructor has the parameters of ``torch.nn.LinearCrossEntropyLoss`` in their order, and then more. PyTorch's
    ``weight`` is called ``class_weight`` here, in the state dict as well. ``logitless.compat.torch`` has a module with
    PyTorch's own names. The head is ``self.linear``; assign another module's weight to ``self.linear.weight`` to tie
    them.

    Shapes: hidden ``[..., D]``, targets ``[...]``. The loss is a scalar, or ``[...]`` with reduction "none".

    Args:
        in_features: D, the size of each hidden state.
        num_classes: V, the size of the vocabulary.
        out_features: Only ``()`` is supported.
        bias: Whether the head has a bias, ``[V]``.
        device: The head's device: the CPU or a CUDA device.
        dtype: The head's dtype: a torch.dtype, or a name such as "bf16".
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        class_weight: A weight for each class, ``[V]``, kept as a buffer.
        ignore_index: Rows with this target have no loss and no gradient. None means -100.
        label_smoothing: A number in [0, 1].
        options: PyTorch's choice of chunks. It is accepted and not used: Logitless plans from ``max_workspace_bytes``.
        scale: As in :func:`logitless.linear_cross_entropy`. A ``torch.nn.Parameter`` is learned with the module.
        temperature: As in :func:`logitless.linear_cross_entropy`. A ``torch.nn.Parameter`` is learned with the module.

    The other options have the meanings they have in :func:`logitless.linear_cross_entropy`.

    Raises:
        ValueError: ``class_weight`` has another shape, or an option is out of range.
        NotImplementedError: ``out_features`` is not ``()``.
    """

    class_weight: Tensor | None
    reduction: str
    gradient: str

    @accepts(LossOptions, _UPSTREAM, ignore_index=None)
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        class_weight: Tensor | None = None,
        options: object = None,
        **head: Unpack[LossOptions],
    ) -> None:
        super().__init__()
        if tuple(out_features) != ():
            raise NotImplementedError(f"out_features: expected (), got {out_features}; use leading batch dimensions")
        if class_weight is not None and tuple(class_weight.shape) != (num_classes,):
            raise ValueError(f"class_weight: expected shape [{num_classes}], got {list(class_weight.shape)}")
        _keep(self, head, ignore_index=None)
        self.num_classes = num_classes
        self.out_features = ()
        self.options = options
        self.register_buffer("class_weight", class_weight)
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=torch_dtype(dtype))

    @accepts(CallOptions)
    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        target_weight: Tensor | None = None,
        temperature: Number | None = None,
        return_stats: bool | Sequence[str] = False,
        **call: Unpack[CallOptions],
    ) -> Tensor | LinearCrossEntropyOutput:
        """Returns the loss, or with ``return_stats`` a :class:`LinearCrossEntropyOutput`.

        Args:
            hidden: Hidden states, ``[..., D]``.
            targets: Class indices, ``[...]``, or ``[..., K]`` with ``target_weight``.
            target_weight: Weights of several targets a row, as in :func:`logitless.linear_cross_entropy`.
            temperature: Replaces the module's, for example with one for each row.
            return_stats: As in :func:`logitless.linear_cross_entropy`, as are all other options.

        Raises:
            UnsupportedError: ``self.linear`` is no plain ``nn.Linear``, but for example an adapter's layer, or it has
                hooks.
            TypeError, ValueError, BudgetTooSmallError: As in :func:`logitless.linear_cross_entropy`.
        """
        _options.check_names("forward", call, _CALL)
        check_linear(self.linear)
        return linear_cross_entropy(
            hidden,
            self.linear.weight,
            targets,
            bias=self.linear.bias,
            class_weight=self.class_weight,
            target_weight=target_weight,
            return_stats=return_stats,
            **call,
            **_kept(self, temperature),
        )

    def extra_repr(self) -> str:
        said = ", ".join(f"{name}={getattr(self, name)}" for name in _NAMES)
        return (
            f"in_features={self.linear.in_features}, num_classes={self.num_classes}, "
            f"bias={self.linear.bias is not None}, {said}"
        )


class MultiHeadLoss(nn.Module):
    """Several heads with their cross entropies, as :func:`logitless.multi_head_linear_cross_entropy` computes them.

    The heads are ``self.heads``, linear layers. One layer is a head that all losses share, as in multi-token
    prediction: assign another module's weight to ``self.heads[0].weight`` to tie them.

    Args:
        in_features: D, the size of each hidden state.
        num_classes: V of a shared head, or the vocabulary of each of H heads.
        bias: Whether the heads have biases.
        device: The heads' device.
        dtype: The heads' dtype: a torch.dtype, or a name such as "bf16".
        head_weights: Factors of the losses: H numbers, or a tensor ``[H]``. A ``torch.nn.Parameter``, or a
            ``torch.nn.ParameterList`` of H, is learned with the module, and in its state dict. None means 1.
        shifts: As in :func:`logitless.multi_head_linear_cross_entropy`.

    The other options have the meanings they have in :func:`logitless.linear_cross_entropy`, for all heads alike.

    Raises:
        TypeError, ValueError: An argument has the wrong type, an option is out of range, or the number of
            ``head_weights`` or ``shifts`` is not that of heads.
    """

    head_weights: Factors

    @accepts(MultiHeadOptions)
    def __init__(
        self,
        in_features: int,
        num_classes: int | Sequence[int],
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        head_weights: Factors = None,
        shifts: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _options.check_names("MultiHeadLoss", options, _options.names_of(MultiHeadOptions))
        _keep(self, options)
        check_reduction(self.reduction)
        self.is_shared = not isinstance(num_classes, Sequence)
        given = num_classes if isinstance(num_classes, Sequence) else [num_classes]
        sizes = [_options.integer("num_classes", size) for size in given]
        if not sizes or min(sizes) < 1:
            raise ValueError(f"num_classes: expected a number >= 1 for each head, got {num_classes!r}")
        count = None if self.is_shared else len(sizes)
        if shifts is not None:
            count = len(checked_shifts(shifts, count))
        if head_weights is not None:
            check_factors(head_weights, count)
        made = torch_dtype(dtype)
        self.heads = nn.ModuleList(nn.Linear(in_features, size, bias, device=device, dtype=made) for size in sizes)
        self.shifts = shifts
        if isinstance(head_weights, Sequence) and any(isinstance(one, Tensor) for one in head_weights):
            raise ValueError(
                "head_weights: expected numbers, a tensor or a ParameterList, got a sequence with a tensor, which the "
                "module would neither learn nor move"
            )
        if isinstance(head_weights, Tensor) and not isinstance(head_weights, nn.Parameter):
            self.register_buffer("head_weights", head_weights, persistent=False)
        else:
            self.head_weights = head_weights

    @accepts(MultiHeadCallOptions)
    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        return_losses: bool = False,
        return_stats: bool | Sequence[str] = False,
        **call: Any,
    ) -> Tensor | MultiHeadOutput:
        """Returns the weighted sum of losses, or a :class:`logitless.MultiHeadOutput`.

        Args:
            hidden: Hidden states, ``[..., D]``, or ``[H, ..., D]`` of each head.
            targets: Class indices, ``[H, ...]``, or with ``shifts`` ``[...]``.
            return_losses: As in :func:`logitless.multi_head_linear_cross_entropy`, as are all other options.

        Raises:
            UnsupportedError: A head is no plain ``nn.Linear``, but for example an adapter's layer, or it has hooks.
            TypeError, ValueError, BudgetTooSmallError: As in :func:`logitless.multi_head_linear_cross_entropy`.
        """
        _options.check_names("forward", call, _options.names_of(MultiHeadCallOptions))
        for index, head in enumerate(self.heads):
            check_linear(head, f"heads[{index}]")
        weights: list[Any] = [head.weight for head in self.heads]
        biases: list[Any] = [head.bias for head in self.heads]
        kept = _kept(self, None)
        del kept["shift"]
        return multi_head_linear_cross_entropy(
            hidden,
            weights[0] if self.is_shared else weights,
            targets,
            head_weights=self.head_weights,
            shifts=self.shifts,
            biases=biases[0] if self.is_shared else biases,
            return_losses=return_losses,
            return_stats=return_stats,
            **call,
            **kept,
        )


class FusedHead(nn.Linear):
    """A linear layer that replaces a model's ``lm_head`` and, called with labels, returns their loss.

        model.lm_head = logitless.nn.FusedHead.from_linear(model.lm_head, shift=1)
        loss = model.lm_head(hidden, labels)

    Called with hidden states only, it is the linear layer that it replaces. The model's own forward and ``generate``
    work as before, and apply their own scale or softcap to the logits. The state dict has the keys of ``nn.Linear``.

    The weight is read within the module's own call, so hooks around it see every use. FSDP2 may shard the head as a
    unit of its own and reduces its gradients like any layer's.

    LoRA on the head is not supported: PEFT's layer adds its product to the head's result, so with labels to a loss.
    Such a call raises an error, except within ``torch.compile``, which traces no frames.
    ``logitless.transformers.patch`` computes the loss of such a head.

    Args:
        in_features: D, the size of each hidden state.
        vocab: V, the size of the vocabulary.
        bias: Whether the head has a bias, ``[V]``.
        device: The head's device.
        dtype: The head's dtype: a torch.dtype, or a name such as "bf16".
        class_weight: As in :func:`logitless.linear_cross_entropy`, ``[V]``; not in the state dict.
        scale: As in :func:`logitless.linear_cross_entropy`. A ``torch.nn.Parameter`` is learned with the head, and in
            its state dict.
        temperature: As in :func:`logitless.linear_cross_entropy`. A ``torch.nn.Parameter`` is learned with the head,
            and in its state dict.

    The other options have the meanings they have in :func:`logitless.linear_cross_entropy`.

    Raises:
        ValueError: ``class_weight`` has another shape, or an option is out of range.
    """

    class_weight: Tensor | None
    scale: Number
    softcap: Number | None
    temperature: Number

    @accepts(LossOptions)
    def __init__(
        self,
        in_features: int,
        vocab: int,
        bias: bool = False,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | str | None = None,
        class_weight: Tensor | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(in_features, vocab, bias=bias, device=device, dtype=torch_dtype(dtype))
        if class_weight is not None and tuple(class_weight.shape) != (vocab,):
            raise ValueError(f"class_weight: expected shape [{vocab}], got {list(class_weight.shape)}")
        self.register_buffer("class_weight", class_weight, persistent=False)
        _keep(self, options)

    @classmethod
    @accepts(FusedHeadOptions)
    def from_linear(
        cls: type[Head],
        linear: nn.Linear,
        **options: Unpack[FusedHeadOptions],
    ) -> Head:
        """Returns a head with the very parameters of ``linear``, so tied parameters stay tied.

        Call it before the model is wrapped, sharded or given hooks, which stay with ``linear``.

        Args:
            linear: The layer to replace. The options are those of the class.

        Raises:
            TypeError: The layer is no plain ``nn.Linear``: it is quantised, for example, or has parametrizations.
            ValueError: The layer has hooks, or its weight is sharded already.
        """
        _check_plain(linear)
        head = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            device="meta",
            **options,
        )
        head.weight = linear.weight
        head.bias = linear.bias
        return head.train(linear.training)

    @accepts(CallOptions)
    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        *,
        temperature: Number | None = None,
        return_stats: bool | Sequence[str] = False,
        transformed: bool = False,
        **call: Unpack[CallOptions],
    ) -> Tensor | LinearCrossEntropyOutput:
        """Returns the loss of labels, or without labels the logits of ``nn.Linear``.

        With ``return_stats`` the loss is a :class:`logitless.LinearCrossEntropyOutput`.

        Args:
            hidden: Hidden states, ``[..., D]``.
            labels: Class indices, ``[...]``.
            temperature: Replaces the head's, for example with one for each row.
            return_stats: As in :func:`logitless.linear_cross_entropy`, as are all other options.
            transformed: True returns the logits that the loss uses, without labels; see :meth:`logits`.

        Raises:
            ValueError: ``transformed`` is given with labels; or an option of the loss without labels; or a temperature
                without labels or ``transformed``.
            UnsupportedError: The call has labels and comes from an adapter's layer around the head, such as PEFT's
                LoRA.
            TypeError, ValueError, BudgetTooSmallError: As in :func:`logitless.linear_cross_entropy`.
        """
        _options.check_names("forward", call, _CALL)
        if labels is None:
            loss_only = call if transformed else {**call, "temperature": temperature}
            for name, value in loss_only.items():
                if value is not None and name != "differentiable_stats":
                    raise ValueError(f"{name}: expected None without labels, got {_kind(value)}")
            if return_stats:
                raise ValueError(f"return_stats: expected False without labels, got {return_stats!r}")
            return self._transformed(hidden, temperature) if transformed else super().forward(hidden)
        if transformed:
            raise ValueError("transformed: expected False with labels, got True")
        if isinstance(labels, Tensor) and labels.dim() == hidden.dim():
            raise ValueError(
                f"labels: expected one for each row, got shape {list(labels.shape)} (logitless.linear_cross_entropy "
                "takes several, with target_weight)"
            )
        if not torch.compiler.is_compiling():
            refuse_adapter(self)
        return linear_cross_entropy(
            hidden,
            self.weight,
            labels,
            bias=self.bias,
            class_weight=self.class_weight,
            return_stats=return_stats,
            **call,
            **_kept(self, temperature),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits that the loss uses, ``[..., V]``, with bias, scale, softcap and temperature.

        They are computed in the module's own call, so its hooks run.
        """
        made: Tensor = self(hidden, transformed=True)
        return made

    def _transformed(self, hidden: Tensor, temperature: Number | None) -> Tensor:
        z = F.linear(hidden, self.weight) * self.scale
        if self.bias is not None:
            z = z + self.bias
        if self.softcap is not None and self.softcap != 0:
            z = self.softcap * torch.tanh(z / self.softcap)
        by = self.temperature if temperature is None else temperature
        if isinstance(by, Tensor) and by.numel() != 1:
            by = by[..., None]
        return z / by

    def extra_repr(self) -> str:
        text = super().extra_repr().replace("out_features", "vocab")
        given = {name: getattr(self, name) for name in _NAMES if name != "threshold"}
        said = [
            f"{name}={value}" for name, value in given.items() if isinstance(value, Tensor) or value != DEFAULTS[name]
        ]
        return ", ".join([text, *said])


class InfoNCELoss(nn.Module):
    """The InfoNCE loss of pairs.

        criterion = logitless.nn.InfoNCELoss(0.07, symmetric=True)
        loss = criterion(F.normalize(images, dim=-1), F.normalize(texts, dim=-1))

    Args:
        temperature: As in :func:`logitless.info_nce`. A ``torch.nn.Parameter`` is learned with the module.
        symmetric: Whether both directions are counted.
        group: A ``torch.distributed`` process group whose ranks hold the pairs; None for pairs of this process alone.
            See :func:`logitless.distributed.info_nce`.
        scale: As in :func:`logitless.info_nce`. A ``torch.nn.Parameter`` is learned with the module.

    The other options have the meanings they have in :func:`logitless.info_nce`.

    Raises:
        ValueError: A choice or ``label_smoothing`` is out of range. The call checks other numbers.
    """

    @accepts(PairOptions)
    def __init__(
        self,
        temperature: Number = 1.0,
        *,
        symmetric: bool = False,
        group: Any = None,
        **options: Unpack[PairOptions],
    ) -> None:
        super().__init__()
        _keep(self, options, _PAIR_NAMES)
        self.temperature = temperature
        self.symmetric = _options.flag("symmetric", symmetric)
        self.group = group

    @accepts(PairCallOptions)
    def forward(
        self,
        a: Tensor,
        b: Tensor,
        targets: Tensor | None = None,
        *,
        temperature: Number | None = None,
        scale: Number | None = None,
        **call: Unpack[PairCallOptions],
    ) -> Tensor:
        """Returns the loss.

        Args:
            a: ``[N, D]``.
            b: ``[M, D]``.
            targets: As in :func:`logitless.info_nce`, as are all other options.
            temperature: Replaces the module's.
            scale: Replaces the module's: CLIP's ``logit_scale.exp()``, for example.

        Raises:
            TypeError, ValueError, BudgetTooSmallError: As in :func:`logitless.info_nce`.
        """
        _options.check_names("forward", call, _PAIR_CALL)
        options: Any = {name: getattr(self, name) for name in _PAIR_NAMES} | call
        if scale is not None:
            options["scale"] = scale
        chosen: Number = self.temperature if temperature is None else temperature
        given = {"symmetric": self.symmetric, "targets": targets, **options}
        if self.group is None:
            return info_nce(a, b, chosen, **given)
        from . import distributed

        of_group: Tensor = distributed.info_nce(a, b, chosen, group=self.group, **given)
        return of_group

    def extra_repr(self) -> str:
        names = ("temperature", "symmetric", *(name for name in _PAIR_NAMES if name != "threshold"))
        given = {name: getattr(self, name) for name in names}
        usual = DEFAULTS | {"symmetric": False}
        return ", ".join(f"{n}={v}" for n, v in given.items() if isinstance(v, Tensor) or v != usual.get(n))


def _kind(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


_CALLS = 6  # the most frames between an adapter's forward and the head's, with hooks of both


def refuse_adapter(head: nn.Module) -> None:
    """Refuses a call from an adapter's layer. PEFT gives such a layer the head as ``base_layer``."""
    frame = sys._getframe(2)
    for _ in range(_CALLS):
        caller = frame.f_locals.get("self")
        if isinstance(caller, nn.Module) and caller is not head and caller._modules.get("base_layer") is head:
            kind = f"{type(caller).__module__}.{type(caller).__name__}"
            raise UnsupportedError(
                f"labels: expected a call of {type(head).__name__} itself, got one of {kind} around it, which adds "
                "logits to the head's result; logitless.transformers.patch computes the loss of such a head"
            )
        if frame.f_back is None:
            return
        frame = frame.f_back


def _check_plain(linear: nn.Linear) -> None:
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise TypeError(f"linear: expected a torch.nn.Linear, got a {type(linear).__module__}.{type(linear).__name__}")
    if "weight" not in linear._parameters:
        raise TypeError("linear: expected a layer whose weight is a parameter, got one with a parametrization")
    if hasattr(linear.weight, "placements"):
        raise ValueError("linear: expected a plain weight, got a DTensor; make the head before the model is sharded")
    if hooks_of(linear):
        raise ValueError("linear: expected a layer without hooks, got one with; make the head before they are added")
