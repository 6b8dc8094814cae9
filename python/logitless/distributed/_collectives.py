"""The collectives of torch.distributed by the names that this version of it has."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_functions: Any = vars(dist)

# (output, input, group=): all ranks' inputs one after another; the rank's part of their sum.
all_gather = _functions.get("all_gather_single") or dist.all_gather_into_tensor
reduce_scatter = _functions.get("reduce_scatter_single") or dist.reduce_scatter_tensor
