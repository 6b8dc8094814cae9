"""Modules: ``logitless.LinearCrossEntropyLoss``, a head and its loss as one, and ``logitless.nn.FusedHead``, a head
that owns its weight, and computes its loss.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import options as _options
from .call import Number, check_linear
from .errors import UnsupportedError
from .functional import LinearCrossEntropyOutput, linear_cross_entropy
from .options import DEFAULTS, LOSS_OPTIONS, CallOptions, LossOptions, accepts
from .run import torch_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FusedHeadOptions(LossOptions, total=False):
    class_weight: Tensor | None


__all__ = ["FusedHead"]

Head = TypeVar("Head", bound="FusedHead")
_CALL = _options.names_of(CallOptions)
_NAMES = tuple(name for name in DEFAULTS if name in LOSS_OPTIONS)

# Keywords of PyTorch's module, in its order.
_UPSTREAM = "out_features bias device dtype reduction class_weight ignore_index label_smoothing options".split()


def _keep(module: nn.Module, given: Mapping[str, Any], **defaults: Any) -> None:
    """Checks the options that a module is made with, and keeps them as attributes."""
    _options.check_names(type(module).__name__, given, LOSS_OPTIONS)
    options = {name: given.get(name, defaults.get(name, DEFAULTS[name])) for name in _NAMES}
    _options.check_choice("reduction", options["reduction"], _options.REDUCTIONS)
    _options.checked_method(options)
    if not 0 <= options["label_smoothing"] <= 1:
        raise ValueError(f"label_smoothing: expected a number in [0, 1], got {options['label_smoothing']}")
    for name, value in options.items():
        setattr(module, name, value)


def _kept(module: nn.Module, temperature: Number | None) -> Any:
    """The options of a call. temperature: in the place of the module's."""
    options = {name: getattr(module, name) for name in _NAMES}
    if temperature is not None:
        options["temperature"] = temperature
    return options


class LinearCrossEntropyLoss(nn.Module):
    """A linear head and its cross entropy, with the constructor and state_dict of ``torch.nn.LinearCrossEntropyLoss``.

    The head is ``self.linear``; assign another module's weight to ``self.linear.weight`` to tie them. Options are
    those of :func:`logitless.linear_cross_entropy`.

    Args:
        in_features: D, size of each hidden state.
        num_classes: V, size of the vocabulary.
        out_features: only ``()``; here for the signature.
        bias: whether the head has a bias ``[V]``.
        device: of the head: the CPU or a CUDA device.
        dtype: of the head: a torch.dtype, or a name such as "bf16".
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        class_weight: class weights ``[V]``, kept as a buffer.
        ignore_index: None means -100.
        label_smoothing: in [0, 1].
        options: PyTorch's choice of chunks; accepted and not used, for Logitless plans from ``max_workspace_bytes``.
        scale, temperature: as in :func:`logitless.linear_cross_entropy`. A ``torch.nn.Parameter`` is learned with the
            module. The other options of the signature have the meanings of that function's.

    Shapes: hidden ``[..., D]``, targets ``[...]``; the loss is a scalar, or ``[...]`` with reduction "none".
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
        """The loss, or with ``return_stats`` a :class:`LinearCrossEntropyOutput`.

        temperature: in the place of the module's, such as one for each row.
        """
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


class FusedHead(nn.Linear):
    """A linear layer in the place of a model's ``lm_head``, which called with labels returns their loss.

        model.lm_head = logitless.nn.FusedHead.from_linear(model.lm_head, shift=1)
        loss = model.lm_head(hidden, labels)

    Called with hidden states only it is the linear layer that it replaces, so the model's own forward and ``generate``
    work as before, and apply what they do to logits themselves. The state dict has the keys of ``nn.Linear``.

    The weight is read within the module's own call, so hooks around it see every use: FSDP2 may shard the head as a
    unit of its own, and its gradients are reduced as those of any layer.

    LoRA on the head is not for it: PEFT's layer adds its product to whatever the head returns, so with labels to a
    loss. That is refused, though not within ``torch.compile``, which traces no frames.
    ``logitless.transformers.patch`` computes the loss of such a head.

    Args:
        in_features: D, size of each hidden state.
        vocab: V, size of the vocabulary.
        bias: whether the head has a bias ``[V]``.
        device: of the head.
        dtype: of the head: a torch.dtype, or a name such as "bf16".
        class_weight: ``weight`` of :func:`logitless.linear_cross_entropy`, ``[V]``; not in the state dict.
        scale, temperature: as in :func:`logitless.linear_cross_entropy`. A ``torch.nn.Parameter`` is learned with the
            head, and in its state dict. The other options of the signature have the meanings of that function's.
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
        """A head with the very parameters of ``linear``: those that are tied to others stay tied. Options: the class's.

        Call it before the model is wrapped, sharded or given hooks, which stay with ``linear``.

        Raises:
            TypeError: not a plain ``nn.Linear``, such as a quantised one or one with parametrizations.
            ValueError: a layer with hooks, or with a weight that is sharded already.
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
        """With labels ``[...]`` the loss of ``hidden`` ``[..., D]``, or with ``return_stats`` a
        :class:`logitless.LinearCrossEntropyOutput`; without them what ``nn.Linear`` returns.

        Args:
            temperature: in the place of the head's, such as one for each row.
            transformed: without labels, the logits that the loss is of: see :meth:`logits`.

        Raises:
            ValueError: ``transformed`` with labels; without them what only a loss has, or a temperature unless
                ``transformed``. And what :func:`logitless.linear_cross_entropy` raises.
            UnsupportedError: labels through an adapter's layer around the head, such as PEFT's LoRA.
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
                f"labels: expected one for each row, got shape {list(labels.shape)}; several, with target_weight, are "
                "for logitless.linear_cross_entropy"
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
        """The logits that the loss is of, ``[..., V]``, with scale, softcap and temperature; through the module's call,
        and with its hooks."""
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


def _kind(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


_CALLS = 6  # frames between an adapter's forward and the head's, with hooks of both


def refuse_adapter(head: nn.Module) -> None:
    """Refuses a call that comes from a layer with ``base_layer``, as PEFT names what it adds its own product to."""
    frame = sys._getframe(2)
    for _ in range(_CALLS):
        caller = frame.f_locals.get("self")
        if isinstance(caller, nn.Module) and caller is not head and caller._modules.get("base_layer") is head:
            kind = f"{type(caller).__module__}.{type(caller).__name__}"
            raise UnsupportedError(
                f"labels: expected a call of {type(head).__name__} itself, got one of {kind} around it, which adds "
                "logits to what the head returns; logitless.transformers.patch has the loss of such a head"
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
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    if any(hooks) or "forward" in linear.__dict__:
        raise ValueError("linear: expected a layer without hooks, got one with; make the head before they are added")
