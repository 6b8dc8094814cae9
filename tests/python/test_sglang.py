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
    graphs = "sglang.srt.model_executor.cuda_graph_config"
    stand_in_module(monkeypatch, graphs, cuda_graph_fully_disabled=lambda: False)
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
        self.vocab_size, self.made, self.do_tensor_parallel_all_gather_dp_attn = VOCAB, 0, False

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


def step(hooks, processor, lm_head, bias, requests, edit=lambda logits: logits, scale=1, **more):
    """Returns the tokens of a step, or the logits that SGLang's own sampler gets. edit: what the model does to them."""
    metadata = metadata_of()
    hidden = scale * torch.stack([states_of(number) for number, _ in requests])
    got = hooks.get_logits(Processor.get_logits, processor, hidden, lm_head, metadata, bias)
    output = types.SimpleNamespace(next_token_logits=edit(got))
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
    expected = processor.get_logits(hidden, lm_head, None, bias)
    torch.testing.assert_close(logits, expected)
    assert step(hooks, processor, lm_head, bias, MIXED).shape == (5,)  # the head is known from here on
    with pytest.warns(UserWarning, match=f"SGLang samples from logits in a batch with {named}$"):
        torch.testing.assert_close(step(hooks, processor, lm_head, bias, requests, **CASES[named]), expected)


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


def test_other_heads_are_refused(hooks):
    lm_head, bias = made_head()
    with pytest.raises(ValueError, match="logits gathered from several ranks: expected False, got True"):
        step(hooks, Processor(ranks=True), lm_head, bias, MIXED)
    with pytest.raises(ValueError, match="logit_scale: expected a positive number, got -1.0"):
        step(hooks, Processor(scale=-1.0), lm_head, bias, MIXED)
    packed = types.SimpleNamespace(weight=lm_head.weight.char())
    for head, got in ((types.SimpleNamespace(), "none"), (packed, r"torch.int8 \[320, 16\]")):
        hooks.get_logits(lambda *_: torch.ones(5, VOCAB), Processor(), torch.ones(5, WIDTH), head, metadata_of(), bias)
        output = types.SimpleNamespace(next_token_logits=torch.ones(5, VOCAB))
        with pytest.raises(ValueError, match=rf"SimpleNamespace.weight: expected float \[V, 16\], got {got}"):
            hooks.sample(None, runner_of(), output, batch_of(MIXED))
    for value in (1.0, torch.nan):
        processor = Processor()
        processor.get_logits = Processor.get_logits
        logits = torch.full((5, VOCAB), value)
        hooks.get_logits(lambda *_: logits.clone(), processor, torch.ones(5, WIDTH), lm_head, metadata_of(), bias)
        output = types.SimpleNamespace(next_token_logits=logits)
        with pytest.raises(ValueError, match="logits: expected those of "):
            hooks.sample(None, runner_of(), output, batch_of(MIXED))


@pytest.mark.parametrize("masked", [3, 250])
def test_models_that_edit_logits_are_refused(hooks, masked):
    """As gemma4_unified does, in place."""
    lm_head, bias = made_head()
    ids = torch.tensor([masked])
    for edit in (lambda z: z.index_fill_(1, ids, -1e30), lambda z: z.index_fill(1, ids, -1e30)):
        with pytest.raises(ValueError, match="logits: expected those of the logits processor, got others"):
            step(hooks, Processor(), lm_head, bias, MIXED, edit=edit)


def test_states_of_zero_prove_no_head(hooks):
    lm_head, _ = made_head()
    processor = Processor()
    logits = step(hooks, processor, lm_head, None, MIXED, scale=0)
    assert torch.equal(logits, torch.zeros(5, VOCAB))
    assert step(hooks, processor, lm_head, None, MIXED).shape == (5,) and processor.made == 2
    assert step(hooks, processor, lm_head, None, MIXED).shape == (5,) and processor.made == 2


def test_other_servers_are_refused(hooks, monkeypatch):
    Registry.targets.clear()
    hooks.register()
    names = ["load_model", "_get_logits", "sample", "compute_logprobs_only", "capture_pre_sample_logits"]
    assert [target.rsplit(".", 1)[1] for target in Registry.targets] == names
    load = next(iter(Registry.targets.values()))
    plain = dict.fromkeys(("speculative_algorithm", "enable_lora", "lora_paths", "dllm_algorithm"))
    plain |= {"tp_size": 1, "pp_size": 1, "attn_dp_size": 1}

    def loaded(device="cpu", **more):
        args = types.SimpleNamespace(**plain | more)
        return load(lambda runner: "loaded", types.SimpleNamespace(server_args=args, device=device))

    assert loaded() == loaded(enable_lora=False, lora_paths=[]) == "loaded"
    others = {"speculative_algorithm": "EAGLE", "enable_lora": True, "lora_paths": ["a"], "tp_size": 2, "pp_size": 2}
    for name, value in others.items():
        with pytest.raises(ValueError, match=f"{name}: expected (None|False|1), got "):
            loaded(**{name: value})
    with pytest.raises(ValueError, match="disable_cuda_graph: expected True, got False"):
        loaded("cuda")
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.5.24")
    with pytest.raises(RuntimeError, match="sglang: expected 0.5.23, got 0.5.24"):
        hooks.register()


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
    from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.server_args import ServerArgs

    def parameters(function):
        return list(inspect.signature(function).parameters)

    given = ["hidden_states", "lm_head", "logits_metadata", "embedding_bias", "use_logits_buffer"]
    assert parameters(LogitsProcessor._get_logits)[1:] == given
    given = [
        "speculative_algorithm",
        "enable_lora",
        "lora_paths",
        "dllm_algorithm",
        "tp_size",
        "pp_size",
        "attn_dp_size",
    ]
    args = ServerArgs(model_path="none")
    assert [getattr(args, name) for name in given] == [None, None, None, None, 1, 1, 1]
    assert not cuda_graph_fully_disabled() and parameters(ModelRunner.load_model)[:1] == ["self"]
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
