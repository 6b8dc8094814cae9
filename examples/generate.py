"""Generates with transformers and without logits: `generate` calls the loop below in the place of its own.

Run: python examples/generate.py --model Qwen/Qwen3-0.6B --top-p 0.9 "The capital of France is"
     python examples/generate.py --tiny     # a random model, on the CPU

The loop is for models whose logits are those of their output embeddings, with or without a scale and a softcap: Llama,
Qwen, Gemma, Granite, Cohere. The first step compares them with the model's own.
A sequence has its own seed, so it does not depend on the batch.
"""

import argparse
import inspect
import tempfile

import logitless
import tiny_model
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# generate makes these of its options, and applies them in this order, which is that of logitless.
WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
CACHES = ("past_key_values", "cache")  # the newest name is last
READ = {"attention_mask", "position_ids", *CACHES, "use_cache", "logits_to_keep"}
# Options of other loops, with their values that mean none
LOOPS = {"num_beams": 1, "penalty_alpha": 0, "dola_layers": None, "prompt_lookup_num_tokens": None}
LOOPS |= {"assistant_early_exit": None, "return_dict_in_generate": False}


@torch.no_grad()
def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, seeds, **inputs):
    """Returns tokens for ``model.generate(..., custom_generate=decode, seeds=seeds)``.

    seeds: int64, one for each sequence that is returned.
    """
    config, rows = generation_config, len(input_ids)
    cache = {name: inputs[name] for name in CACHES if inputs.get(name) is not None}
    others = unknown_options(model, logits_processor, config, inputs, cache)
    if others:
        raise ValueError(f"decode: expected options of sampling alone, got {', '.join(sorted(others))}")
    expect("seeds", f"int64 [{rows}]", seeds, [rows])
    if seeds.dtype != torch.int64:
        raise ValueError(f"decode: seeds: expected int64 [{rows}], got {seeds.dtype}")
    mask, places = inputs.get("attention_mask"), inputs.get("position_ids")
    expect("position_ids of the model", list(input_ids.shape), places, list(input_ids.shape))
    kept = {WARPERS[type(each)]: getattr(each, WARPERS[type(each)]) for each in logits_processor}
    # Ended rows are filled as transformers does: with the pad id, else an end's id, and not where no id is an end.
    ends = next((each.eos_token_id for each in stopping_criteria if hasattr(each, "eos_token_id")), None)
    pad = config.pad_token_id if config.pad_token_id is not None or ends is None else int(ends.flatten()[0])
    ended = torch.zeros(rows, dtype=torch.bool, device=input_ids.device)
    step = {"attention_mask": mask, "position_ids": places, "use_cache": True, **cache}
    keep = {name: inputs[name] for name in ("logits_to_keep",) if inputs.get(name) is not None}
    hidden, weight, logits = first_step(model, {"input_ids": input_ids, **step}, keep)
    while True:
        if config.do_sample:
            # A token's seed is that of its sequence and the number of tokens before it.
            seed = seeds.to(places.device) * 0x1E3779B97F4A7C15 + places[:, -1]
            out = logitless.sample(hidden, weight, seed=seed, **kept, **logits)
            bad = out.ids < 0
        else:
            out = logitless.linear_top_k(hidden, weight, 1, **logits)
            bad = out.log_probs.isnan()
        bad = (bad[:, 0] & ~ended).nonzero()[:, 0].tolist()
        if bad:
            raise ValueError(f"decode: logits: expected finite numbers, got NaN or infinity in rows {bad}")
        new = out.ids if ends is None else out.ids.masked_fill(ended[:, None], pad)
        input_ids = torch.cat([input_ids, new], -1)
        try:
            ended = ended | stopping_criteria(input_ids, None)
        except (TypeError, AttributeError) as error:
            raise ValueError("decode: stopping_criteria: expected ones that read tokens, got one of scores") from error
        if ended.all():
            return input_ids
        mask = None if mask is None else torch.cat([mask, mask.new_ones(rows, 1)], -1)
        places = places[:, -1:] + 1
        step |= {"attention_mask": mask, "position_ids": places}
        hidden = model.base_model(input_ids=new, **step).last_hidden_state[:, -1]


def unknown_options(model, logits_processor, config, inputs, cache):
    """Returns names of what needs another loop, or logits."""
    others = {type(each).__name__ for each in logits_processor if type(each) not in WARPERS}
    kinds = [type(each) for each in logits_processor if type(each) in WARPERS]
    others |= {"logits processors in another order"} if kinds != [kind for kind in WARPERS if kind in kinds] else set()
    for each in logits_processor:  # of the user's own making
        plain = getattr(each, "filter_value", -torch.inf) == -torch.inf and getattr(each, "min_tokens_to_keep", 1) == 1
        others |= set() if plain else {f"{type(each).__name__} with filter_value or min_tokens_to_keep"}
    others |= {name for name, none in LOOPS.items() if getattr(config, name, None) not in (None, none)}
    given = {name for name, value in inputs.items() if not (value is None or value is False or value == {})}
    others |= given - READ
    others |= {"a filled cache"} if any(each.get_seq_length() for each in cache.values()) else set()
    others |= set() if cache else {"use_cache=False"}
    # PEFT puts its own method here, which adds virtual tokens.
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    adapter = None if owner is model else getattr(owner, "active_peft_config", None)
    others |= {f"an adapter {adapter.peft_type}"} if getattr(adapter, "is_prompt_learning", False) else set()
    head = model.get_output_embeddings()
    if hasattr(head, "base_layer") and not (head.merged or head.disable_adapters):
        others |= {"an adapter of the output embeddings"}
    return others


def first_step(model, inputs, keep):
    """Returns hidden states, the head's weight and options, by which logits are the model's own."""
    base, head, calls = model.base_model, model.get_output_embeddings(), []
    hook = base.register_forward_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    try:
        own = model(**inputs, **keep).logits[:, -1]
    finally:
        hook.remove()
    if len(calls) != 1 or not hasattr(calls[0][2], "last_hidden_state"):
        raise ValueError(f"decode: {type(model).__name__}: expected one call of its base_model, got {len(calls)}")
    args, kwargs, states = calls[0]
    given = inspect.signature(base.forward).bind(*args, **kwargs).arguments
    for more in [each for each in given.values() if type(each) is dict]:  # of any name, such as kwargs
        given = given | more
    changed = [name for name, value in given.items() if torch.is_tensor(value) and value is not inputs.get(name)]
    if changed:  # which later steps would lack
        raise ValueError(f"decode: inputs of {type(base).__name__}: expected those of generate, got other {changed}")
    hidden, weight = states.last_hidden_state[:, -1], getattr(head, "weight", None)
    expect(f"weight of {type(head).__name__}", "[V, D]", weight, [own.shape[-1], hidden.shape[-1]])
    config, bias = model.config.get_text_config(), getattr(head, "bias", None)
    cap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    logits = {"bias": None if bias is None else scale * bias, "scale": scale, "softcap": cap}
    some = hidden[:4].float()  # each id of a few rows
    z = scale * torch.cat([some @ part.float().T for part in weight.split(8192)], -1)
    z = z if bias is None else z + scale * bias.float()
    z = cap * torch.tanh(z / cap) if cap else z
    # 16-bit logits are off by 2^-8, float32 ones of TensorFloat-32 by 2^-10.
    bound = (2.0**-6 if own.dtype.itemsize == 2 else 2.0**-9) * z.abs().max()
    error = (own[:4].float() - z).abs().max()
    if not error <= bound:
        raise ValueError(
            f"decode: logits of {type(model).__name__}: expected those of its output embeddings within {bound:.2g}, "
            f"got a difference of {error:.2g}; leave out custom_generate"
        )
    return hidden, weight, logits


def expect(name, expected, got, shape):
    if not torch.is_tensor(got) or list(got.shape) != shape:
        raise ValueError(f"decode: {name}: expected {expected}, got {list(got.shape) if torch.is_tensor(got) else got}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "prompts", nargs="*", default=["A tale of", "In the beginning", "Once"], help="texts to go on with"
    )
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="name or folder of a model")
    parser.add_argument("--tiny", action="store_true", help="use a random model on the CPU")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=1.0, help="divisor of the logits")
    parser.add_argument("--top-p", type=float, default=1.0, help="share of the probability that is kept")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first prompt; others count up")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        name = tiny_model.save(folder) if options.tiny else options.model
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(name).to(device)
    prompts = tokenizer(options.prompts, return_tensors="pt", padding=True).to(device)
    tokens = model.generate(
        **prompts,
        custom_generate=decode,
        seeds=options.seed + torch.arange(len(options.prompts), device=device),
        do_sample=True,
        temperature=options.temperature,
        top_k=0,
        top_p=options.top_p,
        max_new_tokens=options.tokens,
    )
    for text in tokenizer.batch_decode(tokens, skip_special_tokens=True):
        print(repr(text))


if __name__ == "__main__":
    main()
