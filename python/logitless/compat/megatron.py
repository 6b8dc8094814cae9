"""Megatron core's language model loss with the fused head: no logits, for any split of the vocabulary.

    import logitless.compat.megatron
    logitless.compat.megatron.patch(gpt_model)       # one GPTModel, before or after Megatron's DDP; unpatch() undoes it

Written for megatron-core 0.16.1, which is not imported here. Its own code runs up to the output layer, which then
returns hidden states and weight in place of logits. ``compute_language_model_loss`` computes the loss from them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import options as _options
from ..errors import UnsupportedError
from ._group import raises_on_all_ranks
from ._targets import check_dtype, indices

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["patch", "unpatch"]

_KEY = "_logitless_patch"


class _Deferred(NamedTuple):
    """Operands of the logits, which the output layer returns; hidden [s, b, h], or sequence parallel [s / tp, b, h]."""

    layer: Any
    hidden: Tensor
    weight: Tensor


class PatchOptions(_options.Budget, total=False):
    gradient: str
    threshold: float


@_options.accepts(PatchOptions)
def patch(
    model: nn.Module,
    **options: Unpack[PatchOptions],
) -> nn.Module:
    """Makes a ``GPTModel`` compute its loss without the logits when it gets labels.

    Losses ``[b, s]`` are those of ``vocab_parallel_cross_entropy``, in float32, but rows with label -100 have loss 0
    and no gradient. Without labels and in inference the model's own code runs. Hooks of the output layer stay, so
    Megatron's DDP gathers its parameters as before.

    With ``gradient_accumulation_fusion`` the gradient of the weight is added to ``weight.main_grad`` (float32).
    ``grad_added_to_main_grad`` is set where the weight has it, and autograd gets a dummy.

    Args:
        model: A ``GPTModel``.
        max_workspace_bytes: As in :func:`logitless.linear_cross_entropy`.
        gradient: As there.
        threshold: As there.

    Returns:
        The same model.

    Raises:
        TypeError: The model has no ``output_layer``, ``_postprocess`` or ``compute_language_model_loss``.
        UnsupportedError: The output layer does more than a product; the message names it. Some of these are only found
            in the first step.
    """
    names = ("output_layer", "_postprocess", "compute_language_model_loss")
    missing = [name for name in names if not hasattr(model, name)]
    if missing:
        raise TypeError(
            f"model: expected a GPTModel of Megatron core, got a {type(model).__name__} without {missing[0]}"
        )
    unpatch(model)
    _options.check_names("patch", options, _options.names_of(PatchOptions))
    layer: Any = model.output_layer
    of_logits: Any = model.compute_language_model_loss
    postprocess: Any = model._postprocess
    own_forward: Any = layer.forward
    deferring = False

    @functools.wraps(own_forward)
    def forward(input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        if not deferring:
            return own_forward(input_, weight=weight, runtime_gather_output=runtime_gather_output)
        _check(layer, runtime_gather_output)
        used = layer.weight if weight is None else weight
        return _Deferred(layer, input_, used), None

    @functools.wraps(of_logits)
    def compute_language_model_loss(labels: Tensor, logits: Any) -> Any:
        return _loss(labels, logits, dict(options)) if isinstance(logits, _Deferred) else of_logits(labels, logits)

    @functools.wraps(postprocess)
    def in_training(*args: Any, **kwargs: Any) -> Any:
        nonlocal deferring
        # Megatron passes both by name. Without labels, and in inference, the logits themselves are wanted.
        deferring = kwargs.get("labels") is not None and kwargs.get("inference_context") is None
        try:
            return postprocess(*args, **kwargs)
        finally:
            deferring = False

    layer.__dict__["forward"] = forward
    model.__dict__.update(
        {"compute_language_model_loss": compute_language_model_loss, "_postprocess": in_training, _KEY: layer}
    )
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Gives a model its own methods back; does nothing to a model that is not patched."""
    layer = model.__dict__.pop(_KEY, None)
    if layer is not None:
        for owner, name in ((layer, "forward"), (model, "compute_language_model_loss"), (model, "_postprocess")):
            owner.__dict__.pop(name, None)
    return model


def _check(layer: Any, runtime_gather_output: bool | None) -> None:
    """Raises for an output layer (ColumnParallelLinear) that does more than a product."""
    gathers = layer.gather_output if runtime_gather_output is None else runtime_gather_output
    refused = {
        "gather_output": gathers and layer.tp_group.size() > 1,
        "defer_embedding_wgrad_compute": getattr(layer.config, "defer_embedding_wgrad_compute", False),
        "disable_grad_reduce": getattr(layer, "disable_grad_reduce", False),
        "explicit_expert_comm": getattr(layer, "explicit_expert_comm", False),
    }
    for name, is_on in refused.items():
        if is_on:
            raise UnsupportedError(f"logitless.compat.megatron: an output layer with {name} is not supported")


def _loss(labels: Tensor, deferred: _Deferred, options: dict[str, Any]) -> Tensor:
    """Returns losses [b, s] for labels [b, s]; raises IndexError unless labels are int64 or int32 of that shape."""
    from ..distributed import linear_cross_entropy

    layer, hidden, weight = deferred
    main_grad = _main_grad(layer, weight)
    if main_grad is not None:
        apply: Any = _WithMainGrad.apply
        weight = apply(weight)
    ranks = layer.tp_group.size()
    is_sequence_parallel = bool(layer.sequence_parallel) and ranks > 1
    with raises_on_all_ranks(layer.tp_group):
        rows = (hidden.shape[1], hidden.shape[0] * (ranks if is_sequence_parallel else 1))
        check_dtype("labels", labels, (torch.int64, torch.int32), IndexError)
        labels = indices("labels", labels, rows, IndexError)
    loss: Any = linear_cross_entropy(
        hidden,
        weight,
        labels.transpose(0, 1).contiguous(),
        group=layer.tp_group,
        sequence_parallel=is_sequence_parallel,
        bias=None if layer.skip_bias_add else layer.bias,
        reduction="none",
        main_grad=main_grad,
        **options,
    )
    made: Tensor = loss.transpose(0, 1).contiguous()
    return made


def _main_grad(layer: Any, weight: Any) -> Tensor | None:
    if not (layer.gradient_accumulation_fusion and weight.requires_grad and hasattr(weight, "main_grad")):
        return None
    if hasattr(weight, "__fsdp_param__"):
        raise UnsupportedError("logitless.compat.megatron: a weight of Megatron-FSDP, whose main_grad is made in place")
    main_grad: Tensor = weight.main_grad
    if main_grad.dtype != torch.float32:
        raise UnsupportedError(f"logitless.compat.megatron: main_grad: expected float32, got {main_grad.dtype}")
    return main_grad


class _WithMainGrad(torch.autograd.Function):
    """Follows Megatron's contract with its DDP for a weight whose gradient has been added to ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        weight = ctx.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight)
