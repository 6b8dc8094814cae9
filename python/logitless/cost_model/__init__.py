"""A model of cost: what one training step computes, holds and takes, and how much of it the head is.

Everything here is a prediction from a model's sizes. It needs the native library, whose planner predicts Logitless's
own heads, and neither PyTorch nor a GPU. ``python -m logitless.cost_model`` is the command line of it.
"""

from __future__ import annotations

from .config import Model, from_config, read_config
from .devices import DEVICES, Device
from .heads import KINDS, Head, HeadCost
from .step import OPTIMIZERS, Step, largest_batch, parameters, predict
from .sweep import Point, draw, sweep
from .work import Batch

__all__ = [
    "DEVICES",
    "KINDS",
    "OPTIMIZERS",
    "Batch",
    "Device",
    "Head",
    "HeadCost",
    "Model",
    "Point",
    "Step",
    "draw",
    "from_config",
    "largest_batch",
    "parameters",
    "predict",
    "read_config",
    "sweep",
]
