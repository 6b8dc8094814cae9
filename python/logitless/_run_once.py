"""A forward pass of its own, of which nothing is kept: log-probabilities of ids, the largest logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from . import _c, _options, _plan
from ._flags import Flags
from ._run import Tensors, later_plans, plan_on, spec_of, stream_of
from ._torch import are_unaligned, row_stride
from .errors import InvalidTargetError


def run_once(
    tensors: Tensors,
    options: Mapping[str, Any],
    written: Tensors,
    name: str,
    flags: Flags = Flags(),
    **fields: Any,
) -> None:
    """A forward pass that writes these tensors, by the names of logitless_buffers, and keeps nothing of it.

    name: of the targets, in messages; flags: with the gradients that will be asked for; fields: of the problem, beside
    those of tensors and options."""
    hidden, weight = tensors["hidden"], tensors["classifier"]
    device, on_device = hidden.device, hidden.is_cuda
    spec = dataclasses.replace(spec_of(_c.FORWARD, tensors, options, Flags(), are_unaligned(hidden, weight)), **fields)
    plan, *_ = _plan.enough(lambda: plan_on(spec, device), *later_plans(tensors, options, flags, None))
    buffers: Any = _c.make("logitless_buffers")
    buffers.hidden_stride, buffers.classifier_stride = row_stride(hidden), row_stride(weight)
    for field, tensor in (tensors | written).items():
        setattr(buffers, field, tensor.data_ptr())
    try:
        if not on_device:
            return _plan.run_on_host(plan, buffers)
        # From PyTorch's allocator, to be used again in stream order.
        workspace = torch.empty(plan.info.workspace_bytes, dtype=torch.uint8, device=device)
        _plan.run(plan, buffers, workspace.data_ptr(), stream_of(device.index))
    except InvalidTargetError as error:
        raise InvalidTargetError(_options.target_message(str(error), tensors["targets"].shape, name)) from None
