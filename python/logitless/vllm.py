"""vLLM samples from a model's head without its logits: ``vllm serve MODEL --worker-cls logitless.vllm.Worker``.

The worker is vLLM's own for CUDA. Its model runner (version 2, the default) computes the logits of a batch and samples
from them in one method, ``sample``, which :func:`attach` replaces. See docs/sampling.md for what still needs logits.
"""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
import vllm
from torch import Tensor
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu_worker import Worker as _Worker

from .errors import UnsupportedError
from .functional import linear_top_k
from .sampling import sample

__all__ = ["Worker", "attach"]

KNOWN = ("0.32.0", "0.33.0")  # versions of vLLM

# Parameters of a request that need logits, with the values that do not. None does not, either.
_NEUTRAL: dict[str, Any] = {"logprobs": None, "logprob_token_ids": None, "bad_words": [], "min_tokens": 0}
_NEUTRAL |= {"thinking_token_budget": None, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}

_STEP = 0x1E3779B97F4A7C15  # apart enough that neighboring seeds share no position's noise


class Worker(_Worker):  # type: ignore[misc]
    """vLLM's worker for GPUs, with :func:`attach`."""

    def load_model(self, **options: Any) -> None:
        if not self.use_v2_model_runner:
            raise UnsupportedError("logitless.vllm: expected vLLM's model runner 2, got 1 (VLLM_USE_V2_MODEL_RUNNER)")
        super().load_model(**options)
        attach(self.model_runner)


def attach(runner: Any) -> None:
    """Makes a model runner of vLLM sample without logits, once its model is loaded.

    Args:
        runner: vLLM's ``vllm.v1.worker.gpu.model_runner.GPUModelRunner``.

    Raises:
        UnsupportedError: vLLM's version is not a known one, or an option of the engine needs logits, or the model
            computes them in an unknown way.
    """
    if not runner.is_last_pp_rank:  # has no head
        return
    config, sampler = runner.vllm_config, runner.sampler
    _expect("vllm", KNOWN, vllm.__version__.split("+")[0])
    _expect("tensor_parallel_size", (1,), config.parallel_config.tensor_parallel_size)
    for name in ("speculative_config", "lora_config"):
        _expect(name, (None,), getattr(config, name))
    _expect("sampler", (Sampler,), type(sampler))  # watermarks and models of diffusion have others
    _expect("custom logits processors", ([],), sampler.logits_processors[3:])
    for name in ("compute_nans", "use_fp64_gumbel", "return_sampling_mask"):
        _expect(name, (False,), getattr(sampler, name))
    _expect("trace replay", (None,), sampler.trace_replay_state)
    _Sampling(runner, _head(runner))


def _expect(name: str, expected: tuple[Any, ...], got: Any) -> None:
    if got not in expected:
        raise UnsupportedError(
            f"logitless.vllm: {name}: expected {' or '.join(map(str, expected))}, got {got}; "
            "leave out --worker-cls to sample from logits"
        )


class _Head(NamedTuple):
    """A model's head: logits are scale softcap(hidden weight^T + bias)."""

    layer: Any  # whose parameters may be replaced when weights are updated
    has_bias: bool
    vocab: int  # rows of the weight before padding
    softcap: float | None
    scale: float

    def tensors(self) -> tuple[Tensor, Tensor | None]:
        return self.layer.weight[: self.vocab], self.layer.bias[: self.vocab] if self.has_bias else None


@torch.inference_mode()
def _head(runner: Any) -> _Head:
    """Returns the head by which a model makes logits, after a comparison with the model's own of random states."""
    model, calls, hooks = runner.model, [], []
    for module in model.modules():
        if isinstance(module, LogitsProcessor):  # whose result a model may edit in place
            hook = module.register_forward_hook(lambda *call: calls.append((*call, call[3].clone())), with_kwargs=True)
            hooks.append(hook)
    generator = torch.Generator(runner.device).manual_seed(0)
    sizes, dtype = (4, runner.model_config.get_hidden_size()), runner.model_config.dtype
    hidden = torch.randn(sizes, dtype=dtype, device=runner.device, generator=generator)
    logits = model.compute_logits(hidden)
    for hook in hooks:
        hook.remove()
    unknown = UnsupportedError(
        f"logitless.vllm: {type(model).__name__}.compute_logits: expected the result of one LogitsProcessor from "
        "hidden states and lm_head, got others; leave out --worker-cls to sample from logits"
    )
    if len(calls) != 1 or calls[0][3] is not logits or not torch.equal(logits, calls[0][4]):
        raise unknown
    processor, args, kwargs, _, _ = calls[0]
    given = inspect.signature(processor.forward).bind(*args, **kwargs).arguments
    layer, bias = given["lm_head"], given.get("embedding_bias")
    dtype = getattr(getattr(layer, "weight", None), "dtype", None)
    _expect("lm_head.weight", (torch.float32, torch.bfloat16, torch.float16), dtype)
    head = _Head(layer, bias is not None, processor.org_vocab_size, processor.soft_cap, float(processor.scale))
    is_own = bias is None or bias is getattr(layer, "bias", None)
    if given["hidden_states"] is not hidden or not is_own or head.scale <= 0 or processor.logits_as_input:
        raise unknown
    weight, bias = head.tensors()
    expected = torch.cat([hidden.float() @ part.float().T for part in torch.split(weight, 8192)], -1)
    expected += 0 if bias is None else bias.float()
    if head.softcap:
        expected = head.softcap * torch.tanh(expected / head.softcap)
    expected *= head.scale
    if logits.shape != expected.shape:
        raise unknown
    largest, error = float(expected.abs().max()), float((logits - expected).abs().max())
    if not (0 < largest < math.inf and error <= 2.0**-6 * largest):  # 16-bit logits are off by 2^-8
        raise unknown
    return head


class _Request(NamedTuple):
    needs_logits: str  # the parameter that does, or ""
    is_fixed: bool  # has the same tokens in any batch: it is greedy or has a seed
    kept: tuple[int | None, float, float] | None = None  # top_k, top_p and min_p; None if greedy
    allowed: tuple[int, ...] = ()  # the only ids that may be sampled; none: all
    added: tuple[tuple[int, float], ...] = ()  # ids, and numbers added to their logits


def _request(params: Any) -> _Request:
    names = [name for name, value in _NEUTRAL.items() if getattr(params, name) not in (None, value)]
    edits = {"allowed": tuple(params.allowed_token_ids or ()), "added": tuple((params.logit_bias or {}).items())}
    if params.temperature == 0:
        return _Request(", ".join(names), True, **edits)
    if params.min_p > 0 and params.top_p < 1:
        names.append("min_p with top_p")  # vLLM's top_p is of what min_p left, logitless's of what top_k left
    kept = (params.top_k if params.top_k > 0 else None, params.top_p, params.min_p)
    return _Request(", ".join(names), params.seed is not None, kept, **edits)


_UNKNOWN = _Request("a request without sampling parameters", False)


class _Sampling:
    """Replaces two methods of a runner, and keeps what it needs of each request."""

    def __init__(self, runner: Any, head: _Head) -> None:
        self.runner, self.head, self.requests = runner, head, dict[int, _Request]()
        self.from_logits, self.add_to_sampler = runner.sample, runner.sampler.add_request
        runner.sample, runner.sampler.add_request = self.sample, self.add_request

    def add_request(self, index: int, params: Any) -> Any:
        self.requests[index] = _request(params)
        return self.add_to_sampler(index, params)

    def sample(self, hidden_states: Tensor, batch: Any, grammar: Any) -> tuple[Any, Tensor, Tensor]:
        requests = [self.requests.get(index, _UNKNOWN) for index in batch.idx_mapping_np.tolist()]
        reasons = {request.needs_logits for request in requests} - {""}
        bits: dict[int, Any] = {}  # of rows with a grammar
        if grammar is not None:
            row_of = {request: row for row, request in enumerate(batch.req_ids)}
            bits = {row_of[id]: of for id, of in zip(grammar.structured_output_request_ids, grammar.grammar_bitmask)}
        if not reasons:
            return self.output(self.ids(hidden_states, batch, requests, list(range(len(requests))), bits), batch)
        warnings.warn(f"logitless.vllm: vLLM samples from logits in a batch with {', '.join(sorted(reasons))}")
        result: tuple[Any, Tensor, Tensor] = self.from_logits(hidden_states, batch, grammar)
        # Tokens that do not depend on the batch are drawn without logits here, too.
        rows = [row for row, request in enumerate(requests) if request.is_fixed and not request.needs_logits]
        if rows:
            result[0].sampled_token_ids[rows, 0] = self.ids(hidden_states, batch, requests, rows, bits)
        return result

    def output(self, ids: Tensor, batch: Any) -> tuple[Any, Tensor, Tensor]:
        sampled, rejected = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.runner.req_states.prefill_len.gpu,
        )
        output = SamplerOutput(
            sampled_token_ids=ids[:, None],
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=sampled,
            num_rejected=rejected,
        )
        return output, sampled, rejected

    def edits(self, requests: list[_Request], bits: list[Any], device: Any) -> dict[str, Any]:
        """Returns a mask and penalties of requests; bits: of their grammars, or None."""
        words = -(-self.head.vocab // 32)
        mask = np.full((len(requests), words), 0xFFFFFFFF, np.uint32)
        for of_row, request, of_grammar in zip(mask, requests, bits):
            if request.allowed:
                of_row[:] = 0
                ids = np.array(request.allowed)
                np.bitwise_or.at(of_row, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
            if of_grammar is not None:
                of_row &= np.asarray(of_grammar).view(np.uint32)[:words]
        given: dict[str, Any] = {"mask": torch.from_numpy(mask.view(np.int32)).to(device)}
        longest = max(len(request.added) for request in requests)
        if longest > 0:
            added = [[*request.added, *[(-1, 0.0)] * (longest - len(request.added))] for request in requests]
            table = torch.tensor(added, dtype=torch.float64, device=device)
            given["penalties"] = table[..., 0].long(), table[..., 1] / self.head.scale
        return given

    def ids(
        self, hidden_states: Tensor, batch: Any, requests: list[_Request], rows: list[int], bits: dict[int, Any]
    ) -> Tensor:
        """Returns a token of each of these rows. Requests that keep the same sets share a pass over the head."""
        weight, bias = self.head.tensors()
        logits: dict[str, Any] = {"bias": bias, "softcap": self.head.softcap}
        hidden, states = hidden_states[batch.logits_indices], self.runner.sampler.sampling_states
        temperature = states.temperature.gpu[batch.idx_mapping] / self.head.scale
        seed = states.seeds.gpu[batch.idx_mapping] * _STEP + batch.positions[batch.logits_indices]
        places: dict[Any, list[int]] = {}
        for place, row in enumerate(rows):
            request = requests[row]
            is_edited = row in bits or bool(request.allowed or request.added)
            places.setdefault((request.kept, is_edited), []).append(place)
        out = torch.empty(len(rows), dtype=torch.int64, device=hidden.device)
        for (kept, is_edited), some in places.items():
            of = [rows[place] for place in some]
            given: dict[str, Any] = dict(logits)
            if is_edited:
                given |= self.edits([requests[row] for row in of], [bits.get(row) for row in of], hidden.device)
            if kept is not None:
                given |= dict(zip(("top_k", "top_p", "min_p"), kept), temperature=temperature[of], seed=seed[of])
                ids = sample(hidden[of], weight, **given).ids
            elif is_edited:
                ids = sample(hidden[of], weight, top_k=1, seed=0, **given).ids
            else:
                ids = linear_top_k(hidden[of], weight, 1, **given).ids
            out[some] = ids[:, 0]
        return out.clamp_(min=0)  # vLLM looks up any id, also that of a row with NaN
