"""Samples of a head's softmax as an operator of PyTorch, ``torch.ops.logitless.sample``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import native
from .. import options as _options
from ..native import NAMESPACE
from ..run import CODES, are_unaligned, device_key, plan_on, row_stride, rows, stats_dtype, stream_of

SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor? row_temperature, Tensor seed, float[] numbers, "
    "int num_samples, bool entropy, SymInt[] shard, int compute_dtype, int budget, Tensor? mask=None, int largest=0) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@functools.lru_cache(maxsize=256)
def _plan(spec: native.Spec, device: torch.device, key: Any) -> native.Plan:
    return plan_on(spec, device)


def _outputs(hidden: Tensor, num_samples: int, entropy: bool, largest: int) -> tuple[Tensor, ...]:
    tokens, stats = hidden.shape[0], stats_dtype(hidden)
    of_ids = functools.partial(hidden.new_empty, (tokens, num_samples + largest))
    of_rows = functools.partial(hidden.new_empty, dtype=stats)
    return (
        of_ids(dtype=torch.int64),
        of_ids(dtype=stats),
        of_rows((tokens, num_samples)),
        of_rows((tokens,)),
        of_rows((tokens if entropy else 0,)),
    )


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
    outputs = _outputs(hidden, num_samples, entropy, largest)
    ids, log_probs, keys, lse, entropies = outputs
    (tokens, width), stats = hidden.shape, stats_dtype(hidden)
    read = {"hidden": rows(hidden), "weight": rows(weight)}
    read |= {} if bias is None else {"bias": bias.contiguous()}
    read |= {} if row_temperature is None else {"temperature": row_temperature.to(stats).contiguous()}
    read |= {} if mask is None else {"sample_mask": mask.contiguous()}
    written: dict[str, Tensor] = {}
    if num_samples > 0:
        read["sample_seed" if seed.dim() > 0 else "seed"] = seed.contiguous()
        written = {"sampled_ids": ids, "sampled_keys": keys}
    else:
        read["targets"] = torch.zeros(tokens, dtype=torch.int64, device=hidden.device)
    more: dict[str, Tensor] = {}
    if shard:
        names = ("max", "sum_exp", "target_logit", *(["sum_exp_logit"] if entropy else []))
        more = {name: torch.empty_like(lse) for name in names}
        written |= {"sampled_logits": log_probs, **more}
    else:
        if num_samples > 0:
            written["sampled_log_probs"] = log_probs
        elif largest > 0:
            written |= {"top_ids": ids, "top_log_probs": log_probs}
        written |= {"lse": lse} | ({"entropy": entropies} if entropy else {})
    tensors = {name: CODES[tensor.dtype] for name, tensor in (read | written).items()}
    tensors |= {"targets": _options.I64} | ({"entropy": CODES[stats]} if entropy else {})
    options: dict[str, Any] = dict(zip(_options.LOGIT_NUMBERS, numbers))
    options |= dict(zip(_options.COUNTS_OF_IDS, (num_samples, largest)))
    options |= {"vocab_start": shard[0], "vocab_total": shard[1]} if shard else {}
    options |= {"unaligned_rows": are_unaligned(read["hidden"], read["weight"])}
    spec = native.spec(
        (tokens, weight.shape[0], width),
        tensors,
        pass_=_options.FORWARD,
        compute_dtype=compute_dtype,
        max_workspace_bytes=budget,
        **options,
    )
    plan = _plan(spec, hidden.device, device_key(read["hidden"], read["weight"]))
    buffers: Any = native.schema().buffers()
    buffers.hidden_stride, buffers.weight_stride = row_stride(read["hidden"]), row_stride(read["weight"])
    for name, tensor in (read | written).items():
        setattr(buffers, name, tensor.data_ptr() or None)
    if hidden.device.type == "cpu":
        native.run_on_host(plan, buffers)
    else:
        workspace = torch.empty(plan.info.workspace_bytes, dtype=torch.uint8, device=hidden.device)
        native.run(plan, buffers, workspace.data_ptr(), stream_of(hidden.device.index))
    if shard:
        lse.copy_(more["max"] + more["sum_exp"].log())
        log_probs.sub_(lse[:, None])
        if entropy:
            entropies.copy_(lse - more["sum_exp_logit"] / more["sum_exp"])
    return outputs  # type: ignore[return-value]


@sample.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any, largest: int = 0, **_: Any) -> tuple[Tensor, ...]:
    num_samples, entropy = rest[4:6]
    return _outputs(hidden, num_samples, entropy, rest[10] if len(rest) > 10 else largest)


@register_flop_formula(getattr(torch.ops, NAMESPACE).sample)
def _(hidden: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * int(hidden[0]) * int(hidden[1]) * int(weight[0])
