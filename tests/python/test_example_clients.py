"""The examples over transformers, PEFT and TRL, each run as a script at its tiny size."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example for some steps, checks its table, and returns the line before it."""

    def run(name, steps, *words):
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [name, "--tiny", "--steps", str(steps), *words])
        torch.manual_seed(0)
        torch.set_num_threads(1)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        *_, line, names, seconds, memory = capsys.readouterr().out.strip().splitlines()
        assert re.fullmatch(r"one step, forward and backward +logitless +\w.*", names)
        assert re.fullmatch(r"time, ms( +[\d.]+){2}", seconds)
        assert re.fullmatch(r"peak memory, MiB \(resident set\)( +[\d.]+| +-){2}", memory)
        return line

    yield run
    if "logitless.trl" in sys.modules:
        sys.modules["logitless.trl"].unpatch()


@pytest.mark.parametrize(
    ("name", "needed", "steps"),
    [
        ("transformers_trainer.py", ("transformers", "accelerate"), 8),
        ("peft_lora.py", ("transformers", "peft"), 8),
        ("trl_sft.py", ("transformers", "accelerate", "datasets", "trl"), 8),
    ],
)
def test_the_loss_falls(run, name, needed, steps):
    skip_without(needed)
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", run(name, steps)).groups())
    assert last < first - 0.5


def test_grpo(run):
    skip_without(("transformers", "accelerate", "datasets", "trl"))
    assert re.fullmatch(r"reward [\d.]+ -> [\d.]+, entropy [\d.]+", run("trl_grpo.py", 2))


def test_policy_gradient(run):
    """Every client's functions give the same first step, and a reward that rises."""
    skip_without(("transformers", "tokenizers"))
    lines = {run("policy_gradient.py", 1, "--client", client) for client in ("verl", "prime_rl", "openrlhf")}
    assert len(lines) == 1
    first, last = map(float, re.match(r"reward ([\d.]+) -> ([\d.]+), entropy", run("policy_gradient.py", 30)).groups())
    assert last > first + 3


def test_generate(monkeypatch, capsys, tmp_path):
    """Greedy tokens are transformers' own. A sequence has the same ones alone and in a batch."""
    skip_without(("transformers", "tokenizers"))
    from transformers import AutoModelForCausalLM

    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["generate.py", "--tiny", "--tokens", "6", "--top-p", "0.9"])
    torch.manual_seed(0)
    example = runpy.run_path(str(EXAMPLES / "generate.py"))
    example["main"]()
    lines = capsys.readouterr().out.splitlines()[-3:]  # DeepSpeed may print one before
    assert [line[1 : 1 + len(text)] for line, text in zip(lines, TEXTS)] == TEXTS
    example["tiny_model"].save(str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompts = torch.tensor([[0, 0, 5, 9], [7, 3, 5, 200]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])

    def tokens(prompts, mask, **options):
        return model.generate(prompts, attention_mask=mask, max_new_tokens=9, pad_token_id=0, **options)

    ours = {"custom_generate": example["decode"], "seeds": torch.tensor([4, 4])}
    stock = tokens(prompts, mask, do_sample=False)
    assert torch.equal(tokens(prompts, mask, do_sample=False, **ours), stock)
    whole = {"do_sample": True, "top_k": 0, "temperature": 0.7, "top_p": 0.9}
    both = tokens(prompts, mask, **whole, **ours)
    assert not torch.equal(both[0, 4:], both[1, 4:])
    ours["seeds"] = ours["seeds"][:1]
    alone = [tokens(prompts[:1, 2:], mask[:1, 2:], **whole, **ours), tokens(prompts[1:], mask[1:], **whole, **ours)]
    assert torch.equal(alone[0][0], both[0, 2:]) and torch.equal(alone[1][0], both[1])
    ours["seeds"] = torch.tensor([5])
    assert not torch.equal(tokens(prompts[1:], mask[1:], **whole, **ours)[0], both[1])
    eos = int(both[1, 5])
    ended = tokens(prompts[1:], mask[1:], **whole, eos_token_id=eos, **(ours | {"seeds": torch.tensor([4])}))
    assert ended[0].tolist() == both[1, : both[1, 4:].tolist().index(eos) + 5].tolist()
    for more, named in (({"repetition_penalty": 1.5}, "RepetitionPenalty"), ({"use_cache": False}, "use_cache=False")):
        with pytest.raises(ValueError, match=f"decode: expected options of sampling alone, got {named}"):
            tokens(prompts, mask, **whole, **more, **ours)


@pytest.fixture
def decoded(monkeypatch):
    """Returns generate of a model by the example's loop; sequences have the seeds 0, 1 and so on."""
    skip_without(("transformers", "tokenizers"))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    decode = runpy.run_path(str(EXAMPLES / "generate.py"))["decode"]

    def decoded(model, prompts=PROMPTS, seeds=None, **options):
        given = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 6, "eos_token_id": None} | options
        seeds = torch.arange(len(prompts)) if seeds is None else seeds
        return model.generate(input_ids=prompts, custom_generate=decode, seeds=seeds, **given)

    return decoded


TEXTS = ["A tale of", "In the beginning", "Once"]
PROMPTS = torch.tensor([[7, 3, 5, 20], [9, 8, 7, 6]])
SIZES = {"vocab_size": 120, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def made(name="Llama", suffix="ForCausalLM", **options):
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, name + suffix)(getattr(transformers, name + "Config")(**options or SIZES)).eval()
    model.get_output_embeddings().weight.data *= 20
    return model


def gemma4(softcap):
    text = SIZES | {"head_dim": 16, "global_head_dim": 16, "final_logit_softcapping": softcap}
    text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 120, "num_kv_shared_layers": 0}
    ids = dict(zip(("image", "boi", "eoi", "audio", "video", "boa", "eoa"), range(113, 120)))
    ids = {f"{name}_token_id": value for name, value in ids.items()}
    return made("Gemma4", "ForConditionalGeneration", text_config=text, vision_config=None, audio_config=None, **ids)


@pytest.mark.parametrize("kind", ["granite", "cohere", "gemma4"])
def test_generate_knows_scale_and_softcap(decoded, kind):
    model = {
        "granite": lambda: made("Granite", **SIZES, logits_scaling=8.0),
        "cohere": lambda: made("Cohere", **SIZES, logit_scale=0.0625),
        "gemma4": lambda: gemma4(3.0),
    }[kind]()
    prompts = PROMPTS[:1].repeat(4000, 1)
    got = decoded(model, prompts, max_new_tokens=1, do_sample=True, top_k=0)[:, 4].bincount(minlength=120) / 4000
    with torch.no_grad():
        expected = model(PROMPTS[:1]).logits[0, -1].softmax(-1)
    assert (got - expected).abs().sum() / 2 < 1.5 * (expected / 4000 / 6).sqrt().sum()


@pytest.mark.parametrize("change", ["in place", "scaled", "nan"])
def test_generate_compares_all_logits_with_the_models_own(decoded, change):
    model = made()
    edit = {
        "in place": lambda z: z.index_fill(-1, torch.tensor([77]), -1e30),
        "scaled": lambda z: z * 1.01,
        "nan": lambda z: z * torch.nan,
    }[change]
    model.register_forward_hook(lambda module, args, out: setattr(out, "logits", edit(out.logits)))
    with pytest.raises(ValueError, match="logits of Llama.*: expected those of its output embeddings within .*, got"):
        decoded(model, do_sample=False)


def test_generate_refuses_models_that_it_cannot_call_alike(decoded):
    model = made()

    def change(module, args, kwargs):
        return args, kwargs | {"position_ids": kwargs["position_ids"].clone()}

    hook = model.model.register_forward_pre_hook(change, with_kwargs=True)
    with pytest.raises(ValueError, match="LlamaModel: expected those of generate, got other .'position_ids'"):
        decoded(model, do_sample=False)
    hook.remove()
    model.get_output_embeddings = torch.nn.Identity
    with pytest.raises(ValueError, match=r"weight of Identity: expected \[V, D\], got None"):
        decoded(model, do_sample=False)
    model = made("OPT", vocab_size=120, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2)
    with pytest.raises(ValueError, match="OPTForCausalLM: expected one call of its base_model, got 0"):
        decoded(model, do_sample=False)


def test_generate_refuses_adapters_that_it_would_drop(decoded):
    skip_without(("peft",))
    import peft

    head = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(made(), head)
    with pytest.raises(ValueError, match="sampling alone, got an adapter of the output embeddings"):
        decoded(model, do_sample=False)
    with model.disable_adapter():
        assert torch.equal(decoded(model, do_sample=False), decoded(made(), do_sample=False))
    model.merge_adapter()
    stock = model.generate(input_ids=PROMPTS, max_new_tokens=6, eos_token_id=None, do_sample=False)
    assert torch.equal(decoded(model, do_sample=False), stock)
    for config in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        model = peft.get_peft_model(made(), config(task_type="CAUSAL_LM", num_virtual_tokens=4))
        with pytest.raises(ValueError, match="sampling alone, got an adapter P.*_TUNING"):
            decoded(model, do_sample=False)


def test_generate_wants_a_seed_of_each_returned_sequence(decoded):
    model, sampled = made(), {"do_sample": True, "top_k": 0, "num_return_sequences": 3}
    for seeds, got in ((torch.tensor([4]), r"\[1\]"), (4, "4"), (torch.arange(3).int(), "torch.int32")):
        with pytest.raises(ValueError, match=rf"seeds: expected int64 \[3\], got {got}"):
            decoded(model, PROMPTS[:1], seeds, **sampled)
    rows = decoded(model, PROMPTS[:1], torch.arange(3), **sampled)
    assert len({tuple(row) for row in rows.tolist()}) == 3


def test_generate_names_what_it_would_drop(decoded):
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

    model = made()
    cases = [({"num_beams": 3}, "num_beams"), ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha")]
    cases += [({"dola_layers": "high"}, "dola_layers"), ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens")]
    for options, named in cases:
        with pytest.raises(ValueError, match=f"sampling alone, got {named}$"):
            decoded(model, PROMPTS[:1], torch.arange(3 if "num_beams" in options else 1), do_sample=False, **options)
    greedy = decoded(model, do_sample=False)
    for warper in (TemperatureLogitsWarper(1e-4), TopKLogitsWarper(1)):
        given = LogitsProcessorList([warper])
        assert torch.equal(decoded(model, do_sample=True, top_k=0, logits_processor=given), greedy)
    odd = LogitsProcessorList([TopKLogitsWarper(1, filter_value=-5.0)])
    with pytest.raises(ValueError, match="TopKLogitsWarper with filter_value"):
        decoded(model, do_sample=True, top_k=0, logits_processor=odd)
    swapped = LogitsProcessorList([TopKLogitsWarper(1), TemperatureLogitsWarper(0.5)])
    with pytest.raises(ValueError, match="logits processors in another order"):
        decoded(model, do_sample=True, top_k=0, logits_processor=swapped)
    with pytest.raises(ValueError, match="stopping_criteria: expected ones that read tokens, got one of scores"):
        decoded(model, do_sample=False, stopping_criteria=[lambda ids, scores: scores[-1] > 0])


def test_generate_fills_ended_rows_as_transformers_does(decoded):
    model = made(**SIZES | {"pad_token_id": None})
    eos = int(decoded(model, do_sample=False)[0, 5])
    options = {"do_sample": False, "eos_token_id": [eos, 119], "max_new_tokens": 6}
    stock = model.generate(input_ids=PROMPTS, attention_mask=torch.ones_like(PROMPTS), **options)
    assert stock[0, -1] == eos and torch.equal(decoded(model, **options), stock)


def test_generate_refuses_other_positions_and_nan(decoded):
    model = made("Bloom", vocab_size=120, hidden_size=32, n_layer=2, n_head=2)
    with pytest.raises(ValueError, match=r"position_ids of the model: expected \[2, 4\], got None"):
        decoded(model, do_sample=False)
    model = made()
    with pytest.raises(ValueError, match=r"position_ids of the model: expected \[2, 4\], got \[4, 2, 4\]"):
        decoded(model, do_sample=False, position_ids=torch.arange(4).expand(4, 2, 4))
    first = decoded(model, do_sample=False)[:, 4]
    model.get_input_embeddings().weight.data[first] = torch.nan
    for do_sample in (False, True):
        with pytest.raises(ValueError, match=r"logits: expected finite numbers, got NaN or infinity in rows \[0, 1\]"):
            decoded(model, do_sample=do_sample, top_k=1 if do_sample else None)


def skip_without(needed):
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
