"""``logitless.nn.FusedHead``: a head that owns its weight, and computes its loss."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _options
from ._arguments import Number, Seed
from ._torch import torch_dtype
from .errors import UnsupportedError
from .functional import LinearCrossEntropyOutput, linear_cross_entropy

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FusedHead"]

Head = TypeVar("Head", bound="FusedHead")


class _Options(TypedDict, total=False):
    class_weight: Tensor | None
    reduction: str
    ignore_index: int | None
    label_smoothing: Number
    scale: Number
    softcap: Number | None
    temperature: Number
    z_loss: Number
    shift: int
    max_workspace_bytes: int | str | None
    gradient: str
    threshold: float
    batch_invariant: bool


# What a repr does not say.
_DEFAULTS: dict[str, Any] = {
    "reduction": "mean",
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "scale": 1.0,
    "softcap": None,
    "temperature": 1.0,
    "z_loss": 0.0,
    "shift": 0,
    "max_workspace_bytes": None,
    "gradient": "exact",
    "batch_invariant": False,
}


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
        reduction, ignore_index, label_smoothing, softcap, z_loss, shift: as in :func:`logitless.linear_cross_entropy`.
        scale, temperature: the same. A ``torch.nn.Parameter`` is learned with the head, and in its state dict.
        max_workspace_bytes, gradient, threshold, batch_invariant: as in :func:`logitless.linear_cross_entropy`.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        vocab: int,
        bias: bool = False,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | str | None = None,
        class_weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int | None = -100,
        label_smoothing: Number = 0.0,
        scale: Number = 1.0,
        softcap: Number | None = None,
        temperature: Number = 1.0,
        z_loss: Number = 0.0,
        shift: int = 0,
        max_workspace_bytes: int | str | None = None,
        gradient: str = "exact",
        threshold: float = _options.DEFAULT_THRESHOLD,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(in_features, vocab, bias=bias, device=device, dtype=torch_dtype(dtype))
        if class_weight is not None and tuple(class_weight.shape) != (vocab,):
            raise ValueError(f"class_weight: expected shape [{vocab}], got {list(class_weight.shape)}")
        if reduction not in _options.REDUCTIONS:
            raise ValueError(f'reduction: expected one of "none", "sum", "mean", got {reduction!r}')
        _options.check_gradient(gradient)
        _options.checked_threshold(threshold)
        _options.check_batch_invariant(batch_invariant, gradient)
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.scale = scale
        self.softcap = softcap
        self.temperature = temperature
        self.z_loss = z_loss
        self.shift = shift
        _options.budget(max_workspace_bytes)
        self.max_workspace_bytes = max_workspace_bytes
        self.gradient = gradient
        self.threshold = threshold
        self.batch_invariant = batch_invariant

    @classmethod
    def from_linear(
        cls: type[Head],
        linear: nn.Linear,
        **options: Unpack[_Options],
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

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        *,
        token_weight: Tensor | None = None,
        num_items: Number | None = None,
        temperature: Number | None = None,
        main_grad: Tensor | None = None,
        return_stats: bool | Sequence[str] = False,
        differentiable_stats: bool = True,
        seed: Seed = None,
        transformed: bool = False,
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
        if labels is None:
            loss_only = {"token_weight": token_weight, "num_items": num_items, "main_grad": main_grad, "seed": seed}
            if not transformed:
                loss_only["temperature"] = temperature
            for name, value in loss_only.items():
                if value is not None:
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
            linear_bias=self.bias,
            weight=self.class_weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            scale=self.scale,
            softcap=self.softcap,
            temperature=self.temperature if temperature is None else temperature,
            z_loss=self.z_loss,
            token_weight=token_weight,
            num_items=num_items,
            shift=self.shift,
            max_workspace_bytes=self.max_workspace_bytes,
            main_grad=main_grad,
            return_stats=return_stats,
            differentiable_stats=differentiable_stats,
            gradient=self.gradient,
            threshold=self.threshold,
            seed=seed,
            batch_invariant=self.batch_invariant,
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
        given = {name: getattr(self, name) for name in _DEFAULTS}
        said = [
            f"{name}={value}" for name, value in given.items() if isinstance(value, Tensor) or value != _DEFAULTS[name]
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
