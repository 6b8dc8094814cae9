"""Parameters that DeepSpeed's ZeRO-3 partitions, where a loss reads them outside of their module's call.

DeepSpeed's hooks of a module gather its parameters for its call, free them after it, and gather them again before its
backward pass. They see the module's output, so a module that returns a loss, such as FusedHead, needs nothing else.
Losses that are made later run under the same hooks here, so a step has as many collectives as without the fused head.
Nothing here imports DeepSpeed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UnsupportedError


def is_partitioned(tensor: Any) -> bool:
    """Whether ZeRO-3 owns the tensor, gathered or not."""
    return hasattr(tensor, "ds_id")


Late = list[tuple[nn.Module, Callable[..., Any]]]  # modules, and their hooks that are put off


@contextlib.contextmanager
def kept_whole(model: nn.Module, layers: Sequence[nn.Module], kind: type, late: Late) -> Iterator[None]:
    """Puts DeepSpeed's hooks after calls off to the end of the block, if the output is of this kind.

    Args:
        model: A model that may have such hooks.
        layers: Its layers that make the outputs. Modules around them pass these on.
        kind: The outputs' class.
        late: Receives what is put off.
    """
    own = [
        (module, key, hook)
        for module in _around(model, layers)
        for key, hook in module._forward_hooks.items()
        if str(getattr(hook, "__module__", "")).startswith("deepspeed.")
    ]

    def put_off(hook: Callable[..., Any]) -> Callable[..., Any]:
        def after(module: nn.Module, inputs: Any, output: Any) -> Any:
            if not isinstance(output, kind):
                return hook(module, inputs, output)
            if _running()[-1] is module:  # DeepSpeed gives parameters that are read next to the innermost module
                _running().pop()
            late.append((module, hook))
            return None

        return after

    for module, key, hook in own:
        module._forward_hooks[key] = put_off(hook)
    try:
        yield
    finally:
        for module, key, hook in own:
            module._forward_hooks[key] = hook
        for module, hook in late:
            outer = len(_running())
            _running().append(module)
            hook(module, (), None)
            del _running()[outer:]


_DEEPSPEED = "deepspeed.runtime.zero.parameter_offload"


def _running() -> list[nn.Module]:
    """Returns DeepSpeed's list of the modules whose calls have begun and not ended, the innermost last."""
    modules: list[nn.Module] = getattr(sys.modules.get(_DEEPSPEED), "FWD_MODULE_STACK", [])
    return modules


def _around(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the layers and the modules inside the model that have them, or nothing without ZeRO-3."""
    if not any(hasattr(layer, _AGAIN) for layer in layers):
        return []
    paths = [name.split(".") for name, module in model.named_modules(remove_duplicate=False) if module in layers]
    names = {".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)}
    return list({id(module): module for module in map(model.get_submodule, sorted(names))}.values())


_AGAIN = "pre_bwd_fn"  # DeepSpeed's autograd function of a module for its outputs


def gathered_again(loss: Tensor, late: Late) -> Tensor:
    """Returns the loss. Its backward pass begins by gathering parameters again, those of the outermost module first."""
    if loss.requires_grad:
        for module in dict.fromkeys(module for module, _ in late):
            loss = getattr(module, _AGAIN).apply(loss)
    return loss


def gather_again_with_running_module(hidden: Tensor, *head: Tensor | None) -> None:
    """Has the running module gather tensors of a head again before its backward pass.

    DeepSpeed has done so where the tensors were not whole when they were read.

    Raises:
        UnsupportedError: No forward pass of DeepSpeed's engine is running.
    """
    tensors = [tensor for tensor in head if is_partitioned(tensor)]
    if not tensors or not torch.is_grad_enabled() or not any(t.requires_grad for t in (hidden, *head) if t is not None):
        return
    running = _running()
    if not running or not getattr(running[-1]._parameters, "_in_forward", False):
        raise UnsupportedError(
            "weight: it is partitioned by DeepSpeed ZeRO-3, which gathers it again for the backward pass of a forward "
            "pass of its engine; expected a loss inside of one, got a loss outside"
        )
    for tensor in tensors:
        if not any(id(tensor) in getattr(module, "_external_params", ()) for module in running):
            sys.modules[_DEEPSPEED].register_external_parameter(running[-1], tensor)
