"""A model of cost: it predicts FLOP, memory and time of one training step, and the head's share of them.

All predictions come from a model's sizes. They need the native library, whose planner predicts Logitless's own heads,
but neither PyTorch nor a GPU. The command line is ``python -m logitless.cost_model``.
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
