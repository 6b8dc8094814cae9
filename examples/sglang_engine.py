"""An offline engine of SGLang 0.5.23 that samples from the head without logits, by SGLang's own hooks.

Run: python examples/sglang_engine.py --model Qwen/Qwen3-0.6B

The hook on the logits processor returns hidden states in the place of logits. The hook on the model runner samples from
them, or makes the logits after all for a batch that needs them. The first batch has logits, to compare the head with
the model's output. It has run on a CPU, never on a GPU.
"""

import argparse
import warnings

import logitless
import sglang
import torch
from sglang.srt.entrypoints import engine
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sampling.sampling_params import TOP_K_ALL

KNOWN = "0.5.23"
STEP = 0x1E3779B97F4A7C15  # apart enough that neighboring seeds share no position's noise


# Options of the server, with their only values: others sample elsewhere, or from other heads.
PLAIN = {"speculative_algorithm": None, "enable_lora": False, "lora_paths": None, "dllm_algorithm": None}
PLAIN |= {"tp_size": 1, "pp_size": 1, "attn_dp_size": 1}


def expect(name, expected, got) -> None:
    if got != expected and (got or expected):
        raise ValueError(f"{name}: expected {expected}, got {got}")


class Hooks:
    head = None  # the last call of the logits processor, with its class's own function
    checked = None  # the logits processor whose model gives the logits of a plain head
    probe = None  # hidden states and logits of a batch before it

    def register(self) -> None:
        if sglang.__version__ != KNOWN:
            raise RuntimeError(f"sglang: expected {KNOWN}, got {sglang.__version__}")
        logits = "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits"
        runner = "sglang.srt.model_executor.model_runner.ModelRunner"
        HookRegistry.register(f"{runner}.load_model", self.load_model, HookType.AROUND)
        HookRegistry.register(logits, self.get_logits, HookType.AROUND)
        HookRegistry.register(f"{runner}.sample", self.sample, HookType.AROUND)
        HookRegistry.register(f"{runner}.compute_logprobs_only", self.logprobs, HookType.AROUND)
        beams = "sglang.srt.beam_search.logits_capture.capture_pre_sample_logits"
        HookRegistry.register(beams, self.capture_beams, HookType.AROUND)

    def load_model(self, original, runner, *args, **options):
        for name, expected in PLAIN.items():
            expect(name, expected, getattr(runner.server_args, name))
        if runner.device == "cuda" and not cuda_graph_fully_disabled():
            raise ValueError("disable_cuda_graph: expected True, got False, by which graphs make the logits")
        return original(runner, *args, **options)

    def get_logits(self, original, processor, hidden, lm_head, metadata, bias=None, use_logits_buffer=True):
        is_plain = metadata.forward_mode.name in ("DECODE", "EXTEND", "MIXED") and not metadata.is_prefill_only
        if metadata.extend_return_logprob or not is_plain:
            return original(processor, hidden, lm_head, metadata, bias, use_logits_buffer)
        self.head = (original, processor, lm_head, metadata, bias)
        if self.checked is processor:
            return hidden
        logits = original(processor, hidden, lm_head, metadata, bias, False)
        self.probe = (hidden, logits.clone())  # which a model may edit in place
        return logits

    def check(self, hidden, logits, output) -> bool:
        """Raises an error unless the model's output is the logits of a plain head. Returns False where all are 0."""
        _, processor, lm_head, _, bias = self.head
        weight = getattr(lm_head, "weight", None)
        if weight is None or not weight.is_floating_point() or weight.shape[-1] != hidden.shape[-1]:
            got = "none" if weight is None else f"{weight.dtype} {list(weight.shape)}"
            raise ValueError(f"{type(lm_head).__name__}.weight: expected float [V, {hidden.shape[-1]}], got {got}")
        gathers = processor.do_tensor_parallel_all_gather or processor.do_tensor_parallel_all_gather_dp_attn
        expect("logits gathered from several ranks", False, gathers)
        weight, options = self.options(processor, lm_head, bias)
        scale, cap, bias = options["scale"], options["softcap"], options["bias"]
        expect("a hidden size that is the vocabulary's", False, weight.shape[0] == weight.shape[1])
        if not scale > 0:
            raise ValueError(f"logit_scale: expected a positive number, got {scale}")
        if not torch.equal(output.next_token_logits, logits):
            raise ValueError("logits: expected those of the logits processor, got others that the model made of them")
        some = hidden[:4].float()  # each id of a few rows
        z = scale * torch.cat([some @ part.float().T for part in weight.split(8192)], -1)
        z = z if bias is None else z + bias.float()
        z = cap * torch.tanh(z / cap) if cap else z
        error, largest = (logits[:4].float() - z).abs().max(), z.abs().max()
        if not error <= 2.0**-6 * largest:  # 16-bit logits are off by 2^-8
            raise ValueError(
                f"logits: expected those of {type(lm_head).__name__}.weight within {2.0**-6 * largest:.2g}, got a "
                f"difference of {error:.2g}"
            )
        return bool(largest > 0)

    @staticmethod
    def options(processor, lm_head, bias):
        weight, scale = lm_head.weight[: processor.vocab_size], float(processor.logit_scale or 1.0)
        bias = None if bias is None else scale * bias[: processor.vocab_size]
        return weight, {"scale": scale, "bias": bias, "softcap": processor.final_logit_softcapping}

    def is_deferred(self, output) -> bool:
        logits = output.next_token_logits
        return self.head is not None and logits is not None and logits.shape[-1] != self.head[1].vocab_size

    def make_logits(self, output) -> None:
        original, processor, *rest = self.head
        output.next_token_logits = original(processor, output.next_token_logits, *rest, False)

    def logprobs(self, original, runner, output, batch):
        if self.is_deferred(output):
            self.make_logits(output)
        return original(runner, output, batch)

    def capture_beams(self, original, batch, forward_batch, output):
        has_beams = batch is not None and (batch.beam_tail is not None or any(each.beam_group for each in batch.reqs))
        if has_beams and output is not None and self.is_deferred(output):
            self.make_logits(output)
        return original(batch, forward_batch, output)

    def sample(self, original, runner, output, batch):
        probe, self.probe = self.probe, None
        if probe is None and not self.is_deferred(output):
            return original(runner, output, batch)
        kept, needs = self.needs_logits(runner, batch)
        if needs:
            warnings.warn(f"SGLang samples from logits in a batch with {', '.join(needs)}")
            if probe is None:
                self.make_logits(output)
            return original(runner, output, batch)
        if probe is not None:
            if not self.check(*probe, output):
                return original(runner, output, batch)
            self.checked, output.next_token_logits = self.head[1], probe[0]
        output.auxiliary_device_output = None
        ids = self.ids(output.next_token_logits, batch, kept)
        runner.ngram_embedding_manager.update_after_decode(next_token_ids=ids, forward_batch=batch)
        return ids

    def needs_logits(self, runner, batch):
        """Returns top_k, top_p and min_p of each row, or None for all alike, and what needs logits."""
        info, kept = batch.sampling_info, None
        needs = {
            "logprobs": batch.return_logprob,
            "grammars": info.grammars is not None and any(info.grammars),
            "penalties": info.penalizer_orchestrator is not None and info.penalizer_orchestrator.is_required,
            "accumulated penalties": not (info.acc_additive_penalties is info.acc_scaling_penalties is None),
            "logit_bias": info.logit_bias is not None,
            "custom logit processors": info.has_custom_logit_processor,
            "sampling masks": info.sampling_mask_batch_indices is not None,
            "watermarks": info.has_watermark_candidates,
            "an observer": runner.sampling_observer is not None,
        }
        if info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling:
            kept = torch.stack([info.top_ks.double(), info.top_ps.double(), info.min_ps.double()], -1).tolist()
            # SGLang's top_p is a share of all ids, that of logitless one of what top_k left.
            needs["top_k with top_p"] = any(1 < k < TOP_K_ALL and p < 1 for k, p, _ in kept)
        return kept, [name for name, given in needs.items() if given]

    def ids(self, hidden, batch, kept):
        info, (_, processor, lm_head, _, bias) = batch.sampling_info, self.head
        weight, options = self.options(processor, lm_head, bias)
        seed, temperature = info.sampling_seed, info.temperatures[:, 0]
        if seed is not None:
            at = batch.positions if batch.forward_mode.is_decode() else batch.seq_lens - 1
            seed = seed * STEP + at[: len(seed)]
        places: dict = {}
        for row in range(len(hidden)):
            places.setdefault(None if kept is None else tuple(kept[row]), []).append(row)
        out = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        for given, rows in places.items():
            top_k, top_p, min_p = given or (TOP_K_ALL, 1.0, 0.0)
            if top_k == 1:  # a temperature of 0 becomes this
                out[rows] = logitless.linear_top_k(hidden[rows], weight, 1, **options).ids[:, 0]
                continue
            sets = {"top_k": int(top_k), "top_p": top_p, "min_p": min_p, "temperature": temperature[rows]}
            seeds = None if seed is None else seed[rows]
            out[rows] = logitless.sample(hidden[rows], weight, seed=seeds, **sets, **options).ids[:, 0]
        return out.clamp_(min=0)  # a row with NaN has -1, which no embedding has


def scheduler(server_args, *args, **options) -> None:
    """Runs SGLang's scheduler, a process of its own, with the hooks."""
    Hooks().register()
    run_scheduler_process(server_args, *args, **options)


class Engine(engine.Engine):
    run_scheduler_process_func = staticmethod(scheduler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=["A tale of", "In the beginning"], help="texts to go on with")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="name or folder of a model")
    options = parser.parse_args()
    model = Engine(model_path=options.model, disable_cuda_graph=True)
    for answer in model.generate(options.prompts, {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 32}):
        print(repr(answer["text"]))
    model.shutdown()


if __name__ == "__main__":
    main()
