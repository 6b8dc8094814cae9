"""examples/sglang_engine.py by contract, with stand-ins for SGLang's modules, and with an installed SGLang.

SGLang's engine runs on a CPU here. It imports functions of sgl_kernel, which has no CPU build, and calls none.
"""

import importlib.util
import inspect
import runpy
import sys
import types

import logitless
import pytest
import torch
from support import EXAMPLES, process, stand_in_module

VOCAB, PADDED, WIDTH, ALL = 300, 320, 16, 1 << 30
SEED_STEP = 0x1E3779B97F4A7C15
VERIFY = types.SimpleNamespace(name="TARGET_VERIFY", is_decode=lambda: False)
DECODE = types.SimpleNamespace(name="DECODE", is_decode=lambda: True)


@pytest.fixture
def hooks(monkeypatch):
    """Returns the hooks over stand-ins for SGLang's modules."""
    stand_in_module(monkeypatch, "sglang", __version__="0.5.23")
    engine = types.SimpleNamespace(Engine=object)
    stand_in_module(monkeypatch, "sglang.srt.entrypoints", engine=engine)
    stand_in_module(monkeypatch, "sglang.srt.managers.scheduler", run_scheduler_process=None)
    kinds = types.SimpleNamespace(AROUND=1)
    stand_in_module(monkeypatch, "sglang.srt.plugins.hook_registry", HookRegistry=Registry, HookType=kinds)
    stand_in_module(monkeypatch, "sglang.srt.sampling.sampling_params", TOP_K_ALL=ALL)
    return runpy.run_path(str(EXAMPLES / "sglang_engine.py"))["Hooks"]()


class Registry:
    targets: dict = {}

    @classmethod
    def register(cls, target, hook, kind):
        cls.targets[target] = hook


class Processor:
    """As SGLang's: the scale comes before the softcap."""

    def __init__(self, scale=None, softcap=None, ranks=False):
        self.logit_scale, self.final_logit_softcapping, self.do_tensor_parallel_all_gather = scale, softcap, ranks
        self.vocab_size, self.made = VOCAB, 0

    def get_logits(self, hidden, lm_head, metadata, bias=None, use_logits_buffer=True):
        self.made += 1
        z = (hidden @ lm_head.weight.T + (0 if bias is None else bias))[:, :VOCAB] * (self.logit_scale or 1)
        cap = self.final_logit_softcapping
        return cap * torch.tanh(z / cap) if cap else z


def made_head(vocab=PADDED, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return types.SimpleNamespace(weight=torch.randn(vocab, WIDTH, generator=generator)), torch.randn(vocab)


def metadata_of(**more):
    plain = {"extend_return_logprob": False, "is_prefill_only": False, "forward_mode": DECODE}
    return types.SimpleNamespace(**plain | more)


def states_of(number):
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))


def batch_of(requests, seeds=True, **more):
    """requests: pairs of a number, from which hidden states are made, and (temperature, top_k, top_p, min_p, seed)."""
    columns = list(zip(*(params for _, params in requests)))
    temperatures, top_ks, top_ps, min_ps = (torch.tensor(column) for column in columns[:4])
    info = types.SimpleNamespace(
        temperatures=temperatures[:, None],
        top_ks=top_ks,
        top_ps=top_ps,
        min_ps=min_ps,
        need_top_k_sampling=bool((top_ks != ALL).any()),
        need_top_p_sampling=bool((top_ps != 1).any()),
        need_min_p_sampling=bool((min_ps > 0).any()),
        sampling_seed=torch.tensor(columns[4]) if seeds else None,
        **dict.fromkeys(("grammars", "penalizer_orchestrator", "acc_additive_penalties", "acc_scaling_penalties")),
        **dict.fromkeys(("logit_bias", "sampling_mask_batch_indices")),
        has_custom_logit_processor=False,
        has_watermark_candidates=False,
    )
    vars(info).update({name: value for name, value in more.items() if name in vars(info)})
    positions = torch.full((len(requests) + 2,), 9)  # of a padded batch
    return types.SimpleNamespace(
        sampling_info=info, positions=positions, forward_mode=DECODE, return_logprob=more.get("return_logprob", False)
    )


def runner_of(**more):
    ignore = types.SimpleNamespace(update_after_decode=lambda **_: None)
    return types.SimpleNamespace(**{"ngram_embedding_manager": ignore, "sampling_observer": None} | more)


def step(hooks, processor, lm_head, bias, requests, **more):
    """Returns the tokens of a step, or the logits that SGLang's own sampler gets."""
    metadata = metadata_of()
    hidden = torch.stack([states_of(number) for number, _ in requests])
    got = hooks.get_logits(Processor.get_logits, processor, hidden, lm_head, metadata, bias)
    output = types.SimpleNamespace(next_token_logits=got)
    runner = runner_of(sampling_observer=more.get("sampling_observer"))
    return hooks.sample(
        lambda runner, output, batch: output.next_token_logits, runner, output, batch_of(requests, **more)
    )


MIXED = [
    (0, (1.0, 1, 1.0, 0.0, 3)),  # greedy
    (1, (1.0, ALL, 1.0, 0.0, 5)),
    (2, (0.7, ALL, 0.5, 0.0, 5)),
    (3, (1.5, 7, 1.0, 0.125, 6)),
    (4, (1.0, ALL, 0.75, 0.0625, 7)),
]


@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "softcap": 4.0}])
def test_tokens_are_those_of_sample_in_any_batch(hooks, options):
    processor, (lm_head, bias) = Processor(**options), made_head()
    tokens = step(hooks, processor, lm_head, bias, MIXED).tolist()
    assert processor.made == 1  # to compare with the head once
    for (number, (temperature, top_k, top_p, min_p, seed)), token in zip(MIXED, tokens):
        logits = processor.get_logits(states_of(number)[None], lm_head, None, bias)
        if top_k == 1:
            assert token == int(logits.argmax())
            continue
        number = torch.tensor((seed * SEED_STEP + 9 + (1 << 63)) % (1 << 64) - (1 << 63))
        kept = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
        assert token == int(logitless.sample(logits, torch.eye(VOCAB), seed=number, **kept).ids)
    assert [step(hooks, processor, lm_head, bias, [request]).item() for request in MIXED] == tokens
    assert step(hooks, processor, lm_head, bias, MIXED, seeds=False).shape == (5,)


CASES = {
    "logprobs": {"return_logprob": True},
    "grammars": {"grammars": [None, object()]},
    "penalties": {"penalizer_orchestrator": types.SimpleNamespace(is_required=True)},
    "accumulated penalties": {"acc_scaling_penalties": torch.ones(1)},
    "logit_bias": {"logit_bias": torch.ones(1)},
    "custom logit processors": {"has_custom_logit_processor": True},
    "sampling masks": {"sampling_mask_batch_indices": torch.ones(1)},
    "watermarks": {"has_watermark_candidates": True},
    "an observer": {"sampling_observer": object()},
    "top_k with top_p": {},
}


@pytest.mark.parametrize("named", CASES)
def test_what_needs_logits_goes_to_sglang_by_name(hooks, named):
    processor, (lm_head, bias) = Processor(), made_head()
    requests = [*MIXED, (5, (1.0, 5, 0.5, 0.0, 1))] if named == "top_k with top_p" else MIXED
    with pytest.warns(UserWarning, match=f"SGLang samples from logits in a batch with {named}$"):
        logits = step(hooks, processor, lm_head, bias, requests, **CASES[named])
    hidden = torch.stack([states_of(number) for number, _ in requests])
    torch.testing.assert_close(logits, processor.get_logits(hidden, lm_head, None, bias))


def test_passes_that_want_logits_get_them(hooks):
    processor, (lm_head, bias) = Processor(), made_head()
    hidden = states_of(0)[None]
    logits = processor.get_logits(hidden, lm_head, None, bias)
    for more in ({"extend_return_logprob": True}, {"is_prefill_only": True}, {"forward_mode": VERIFY}):
        metadata = metadata_of(**more)
        assert torch.equal(hooks.get_logits(Processor.get_logits, processor, hidden, lm_head, metadata, bias), logits)
    step(hooks, processor, lm_head, bias, MIXED)
    output = types.SimpleNamespace(next_token_logits=hidden)
    hooks.logprobs(lambda *_: None, runner_of(), output, None)
    assert torch.equal(output.next_token_logits, logits)
    for beam, expected in ((None, hidden), (object(), logits)):
        output = types.SimpleNamespace(next_token_logits=hidden)
        reqs = [types.SimpleNamespace(beam_group=beam)]
        hooks.capture_beams(lambda *_: None, types.SimpleNamespace(beam_tail=None, reqs=reqs), None, output)
        assert torch.equal(output.next_token_logits, expected)


def test_other_heads_and_versions_are_refused(hooks, monkeypatch):
    lm_head, bias = made_head()
    with pytest.raises(RuntimeError, match="logits: expected those of one rank"):
        step(hooks, Processor(ranks=True), lm_head, bias, MIXED)
    with pytest.raises(RuntimeError, match="positive scale, got -1.0"):
        step(hooks, Processor(scale=-1.0), lm_head, bias, MIXED)
    processor = Processor()
    hidden, metadata = states_of(0)[None], metadata_of()
    with pytest.raises(RuntimeError, match="lm_head: expected a plain weight"):
        hooks.get_logits(lambda *_: torch.ones(1, VOCAB), processor, hidden, lm_head, metadata, bias)
    hooks.register()
    names = ["_get_logits", "sample", "compute_logprobs_only", "capture_pre_sample_logits"]
    assert [target.rsplit(".", 1)[1] for target in Registry.targets] == names
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.5.24")
    with pytest.raises(RuntimeError, match="sglang: expected 0.5.23, got 0.5.24"):
        hooks.register()
    scheduler = hooks.get_logits.__func__.__globals__["scheduler"]
    plain = dict.fromkeys(("speculative_algorithm", "enable_lora", "lora_paths", "dllm_algorithm"))
    with pytest.raises(ValueError, match="speculative_algorithm: expected None, got EAGLE"):
        scheduler(types.SimpleNamespace(**plain | {"speculative_algorithm": "EAGLE"}))


ENGINE = """
import sys
sys.path.insert(0, sys.argv[2])
import sglang_engine
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def scheduler(*args, **options):
    from sglang.srt.layers.logits_processor import LogitsProcessor
    product = LogitsProcessor._compute_lm_head
    def counted(*given, **more):
        print("logits", flush=True)
        return product(*given, **more)
    LogitsProcessor._compute_lm_head = counted
    sglang_engine.scheduler(*args, **options)

class Engine(sglang_engine.Engine):
    run_scheduler_process_func = staticmethod(scheduler)

def main():
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=64, initializer_range=0.1, **sizes))
    model.save_pretrained(sys.argv[1])
    engine = Engine(model_path=sys.argv[1], device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
                    skip_tokenizer_init=True, dtype="float32", disable_cuda_graph=True, max_total_tokens=8192,
                    mem_fraction_static=0.1, context_length=64, disable_radix_cache=True, log_level="error")
    limits = {"max_new_tokens": 5, "ignore_eos": True}
    prompts = [[5, 6, 7], [9, 8], [100, 3, 4, 2]]
    given = [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.7}, {"top_k": 9, "min_p": 0.01}]
    greedy = model.generate(torch.tensor(prompts[:1]), max_new_tokens=5, do_sample=False, eos_token_id=None)
    for more in ({}, {"frequency_penalty": 0.5}):
        params = [limits | given[0], *(limits | one | more for one in given[1:])]
        outs = engine.generate(input_ids=prompts, sampling_params=params)
        assert outs[0]["output_ids"] == greedy[0, 3:].tolist() and all(len(out["output_ids"]) == 5 for out in outs)
        print("with", more, flush=True)
    beams = engine.generate(input_ids=prompts[0], sampling_params=limits | {"beam_width": 2, "n": 1})
    expected = model.generate(torch.tensor(prompts[:1]), max_new_tokens=5, num_beams=2, eos_token_id=None)
    assert (beams[0] if isinstance(beams, list) else beams)["output_ids"] == expected[0, 3:].tolist(), beams
    engine.shutdown()
    print("passed")

if __name__ == "__main__":
    main()
"""


KERNELS = """
__path__ = []

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def never(*args, **options):
        raise NotImplementedError(name)

    return never
"""


def installed():
    return importlib.util.find_spec("sglang") is not None


@pytest.mark.skipif(not installed(), reason="not installed: sglang")
def test_names_of_the_installed_sglang():
    from sglang.srt.beam_search.logits_capture import capture_pre_sample_logits
    from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    def parameters(function):
        return list(inspect.signature(function).parameters)

    given = ["hidden_states", "lm_head", "logits_metadata", "embedding_bias", "use_logits_buffer"]
    assert parameters(LogitsProcessor._get_logits)[1:] == given
    assert parameters(ModelRunner.sample) == ["self", "logits_output", "forward_batch"]
    assert parameters(ModelRunner.compute_logprobs_only) == ["self", "logits_output", "forward_batch"]
    assert parameters(capture_pre_sample_logits) == ["batch", "forward_batch", "logits_output"]
    assert {"extend_return_logprob", "is_prefill_only", "forward_mode"} <= set(LogitsMetadata.__dataclass_fields__)
    assert set(vars(batch_of(MIXED).sampling_info)) <= set(SamplingBatchInfo.__dataclass_fields__)


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="not installed: sglang")
def test_an_engine_on_the_cpu(tmp_path):
    (tmp_path / "engine.py").write_text(ENGINE)
    if importlib.util.find_spec("sgl_kernel") is None:
        (tmp_path / "sgl_kernel.py").write_text(KERNELS)
    done = process(str(tmp_path / "engine.py"), str(tmp_path / "model"), str(EXAMPLES), SGLANG_USE_CPU_ENGINE="1")
    assert done.stdout.endswith("passed\n"), done.stderr[-3000:]
    first, second, *_ = done.stdout.split("with ")
    assert first.count("logits") == 1 and second.count("logits") == 5  # one comparison, and a batch of SGLang's own
