"""Passes that sample from a head's softmax, and their operator of PyTorch, ``torch.ops.logitless.sample``.

In eager mode sampling.py calls a SampleRun itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import native
from .. import options as _options
from ..native import NAMESPACE, Cache
from ..passes import Result, stats_of
from ..run import CODES, PlannedRun, Tensors, are_unaligned, device_key, layouts, rows, stats_dtype

SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor? row_temperature, Tensor seed, float[] numbers, "
    "int num_samples, bool entropy, SymInt[] shard, int compute_dtype, int budget, Tensor? mask=None, int largest=0) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class Pass(NamedTuple):
    """A pass without its tensors, with the operator's names.

    Attributes:
        merges: Whether keys and lse are wanted, by which the samples of several sets of ids are merged.
    """

    numbers: tuple[float, ...]
    num_samples: int
    entropy: bool
    shard: tuple[int, ...]
    compute_dtype: int
    budget: int
    largest: int = 0
    merges: bool = True


def reads(
    of: Pass,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    seed: Tensor,
    mask: Tensor | None,
) -> Tensors:
    """Returns the tensors that the library reads, in layouts that it supports."""
    read = {"hidden": rows(hidden), "weight": rows(weight)}
    if bias is not None:
        read["bias"] = bias.contiguous()
    if row_temperature is not None:
        read["temperature"] = row_temperature.to(stats_dtype(hidden)).contiguous()
    if mask is not None:
        read["sample_mask"] = mask.contiguous()
    if of.num_samples > 0:
        read["sample_seed" if seed.dim() > 0 else "seed"] = seed.contiguous()
    else:
        read["targets"] = torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    return read


class SampleRun(PlannedRun):
    """One pass over tensors of one layout."""

    def __init__(self, of: Pass, read: Tensors) -> None:
        hidden, weight = read["hidden"], read["weight"]
        (tokens, width), stats = hidden.shape, stats_of(hidden)
        of_ids, of_row = (tokens, of.num_samples + of.largest), Result((tokens,), stats)
        samples = {"sampled_ids": Result(of_ids, "int64"), "sampled_keys": Result(of_ids, stats)}
        self._shard = of.shard
        if of.shard:
            ids, log_probs = "sampled_ids", "sampled_logits"
            written = samples | dict.fromkeys(("max", "sum_exp", "target_logit"), of_row)
            written |= {"sum_exp_logit": of_row} if of.entropy else {}
        else:
            kind = "top" if of.num_samples == 0 else "sampled"
            ids, log_probs = f"{kind}_ids", f"{kind}_log_probs"
            written = {ids: samples["sampled_ids"]}
            if of.merges:
                written |= (samples if of.num_samples > 0 else {}) | {"lse": of_row}
            written |= {"entropy": of_row} if of.entropy else {}
        written |= {log_probs: Result(of_ids, stats)}
        if of.num_samples + of.largest == 0:
            written = {name: result for name, result in written.items() if name not in (ids, log_probs)}
        self._names = (ids, log_probs, "sampled_keys", "lse", "entropy")
        tensors = {name: CODES[tensor.dtype] for name, tensor in read.items()}
        tensors |= {name: _options.CODES[result.dtype] for name, result in written.items()}
        tensors |= {"targets": _options.I64} | ({"entropy": _options.CODES[stats]} if of.entropy else {})
        options: dict[str, Any] = dict(zip(_options.LOGIT_NUMBERS, of.numbers))
        options |= dict(zip(_options.COUNTS_OF_IDS, (of.num_samples, of.largest)))
        options |= {"vocab_start": of.shard[0], "vocab_total": of.shard[1]} if of.shard else {}
        spec = native.spec(
            (tokens, weight.shape[0], width),
            tensors,
            pass_=_options.FORWARD,
            compute_dtype=of.compute_dtype,
            max_workspace_bytes=of.budget,
            unaligned_rows=are_unaligned(hidden, weight),
            **options,
        )
        super().__init__(spec, read)
        self._set_writes(written)

    def __call__(self, read: Tensors) -> tuple[Tensor | None, ...]:
        """Returns the results of the operator, None for those that are not wanted."""
        buffers, written = self._filled(read)
        self._launch(buffers, written)
        if self._shard:
            lse = written["lse"] = written["max"] + written["sum_exp"].log()
            if "sampled_logits" in written:
                written["sampled_logits"] -= lse[:, None]
            if "sum_exp_logit" in written:
                written["entropy"] = lse - written["sum_exp_logit"] / written["sum_exp"]
        return tuple(map(written.get, self._names))


_runs: Cache[Any, SampleRun] = Cache(256)


def find(of: Pass, read: Tensors) -> SampleRun:
    """Returns the run of tensors with these names and layouts."""
    hidden, weight = read["hidden"], read["weight"]
    key = (of, hidden.device, device_key(hidden, weight), *read, *layouts(read.values()))
    run = _runs.get(key)
    if run is None:
        run = SampleRun(of, read)
        _runs.put(key, run)
    return run


def _results(hidden: Tensor, num_samples: int, entropy: bool, largest: int) -> list[tuple[Any, torch.dtype]]:
    """Returns shapes and dtypes."""
    tokens, stats = hidden.shape[0], stats_dtype(hidden)
    of_ids = (tokens, num_samples + largest)
    return [
        (of_ids, torch.int64),
        (of_ids, stats),
        ((tokens, num_samples), stats),
        ((tokens,), stats),
        ((tokens if entropy else 0,), stats),
    ]


@torch.library.custom_op(f"{NAMESPACE}::sample", mutates_args=(), schema=SCHEMA)
def sample(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    seed: Tensor,
    numbers: list[float],
    num_samples: int,
    entropy: bool,
    shard: list[int],
    compute_dtype: int,
    budget: int,
    mask: Tensor | None = None,
    largest: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns ids, log-probabilities and keys ``[N, S]``, and lse and entropy ``[N]`` (or none).

    seed: a scalar, or one of each row. numbers: LOGIT_NUMBERS. shard: empty, or the first id of the weight's rows and
    the number of all ids; log-probabilities, lse and entropy are then those of the shard's columns alone. mask: bits of
    the ids that rows consist of. largest: without samples, the number of the largest logits, which come in their place.
    """
    of = Pass(tuple(numbers), num_samples, entropy, tuple(shard), compute_dtype, budget, largest)
    read = reads(of, hidden, weight, bias, row_temperature, seed, mask)
    results = zip(find(of, read)(read), _results(hidden, num_samples, entropy, largest))
    return tuple(  # type: ignore[return-value]
        hidden.new_empty(shape, dtype=dtype) if result is None else result for result, (shape, dtype) in results
    )


@sample.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any, largest: int = 0, **_: Any) -> tuple[Tensor, ...]:
    num_samples, entropy = rest[4:6]
    results = _results(hidden, num_samples, entropy, rest[10] if len(rest) > 10 else largest)
    return tuple(hidden.new_empty(shape, dtype=dtype) for shape, dtype in results)


@register_flop_formula(getattr(torch.ops, NAMESPACE).sample)
def _(hidden: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * int(hidden[0]) * int(hidden[1]) * int(weight[0])
