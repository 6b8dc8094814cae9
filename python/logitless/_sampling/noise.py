"""The noise of lists of ids, which the library makes, and its operator, ``torch.ops.logitless.sample_noise``.

So a sample of a truncated softmax is that of the whole one where this is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import call, native
from ..native import NAMESPACE
from ..run import stream_of


def noise(seed: Tensor, rows: Tensor, sample: int, ids: Tensor) -> Tensor:
    """Returns -log E of rows' ids ``[R, K]`` for one sample, in float32.

    seed: a scalar, or one of each of these rows. rows: ``[R]``, their numbers in the call.
    """
    if call.are_off() and call.are_plain((seed, rows, ids)):
        return _noise(seed, rows, sample, ids)
    made: Tensor = _operator(seed, rows, sample, ids)
    return made


def _noise(seed: Tensor, rows: Tensor, sample: int, ids: Tensor) -> Tensor:
    made = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    if ids.numel() == 0:
        return made
    seed, rows, ids = seed.contiguous(), rows.contiguous(), ids.contiguous()
    given = native.SampleNoise(
        rows=ids.shape[0],
        columns=ids.shape[1],
        sample=sample,
        has_seeds_of_rows=int(seed.dim() > 0),
        seed=seed.data_ptr(),
        row_numbers=rows.data_ptr(),
        ids=ids.data_ptr(),
        noise=made.data_ptr(),
    )
    if ids.device.type == "cpu":
        native.run_sample_noise(given, torch.get_num_threads(), native.HOST)
    else:
        native.run_sample_noise(given, 1, ids.device.index, stream_of(ids.device.index))
    return made


_operator = torch.library.custom_op(f"{NAMESPACE}::sample_noise", _noise, mutates_args=())


@_operator.register_fake
def _(seed: Tensor, rows: Tensor, sample: int, ids: Tensor) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.float32)
