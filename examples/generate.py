"""Generates with transformers and without logits: `generate` calls the loop below in the place of its own.

Run: python examples/generate.py --model Qwen/Qwen3-0.6B --top-p 0.9 "The capital of France is"
     python examples/generate.py --tiny     # a random model, on the CPU

The loop is for models whose logits are those of their output embeddings, with or without a softcap: Llama, Qwen, Gemma.
A sequence has its own seed, so it does not depend on the batch.
"""

import argparse
import tempfile

import logitless
import tiny_model
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# generate makes these of temperature, top_k, top_p and min_p, and applies them in the order of logitless.
KNOWN = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"}
CACHES = ("past_key_values", "cache")  # the newest name is last
READ = {"attention_mask", "position_ids", *CACHES, "use_cache", "logits_to_keep", "synced_gpus"}


@torch.no_grad()
def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, seeds, **inputs):
    """Returns tokens for ``model.generate(..., custom_generate=decode, seeds=seeds)``. seeds: int64, one a sequence."""
    config, head = generation_config, model.get_output_embeddings()
    others = {type(each).__name__ for each in logits_processor} - KNOWN
    others |= {name for name, value in inputs.items() if value is not None} - READ
    others |= {"return_dict_in_generate"} if config.return_dict_in_generate else set()
    cache = {name: inputs[name] for name in CACHES if inputs.get(name) is not None}
    others |= {"a filled cache"} if any(each.get_seq_length() for each in cache.values()) else set()
    others |= set() if cache else {"use_cache=False"}
    if others:
        raise ValueError(f"decode: expected options of sampling alone, got {', '.join(sorted(others))}")
    mask, places = inputs["attention_mask"], inputs["position_ids"]
    logits = {"bias": head.bias, "softcap": getattr(model.config, "final_logit_softcapping", None)}
    kept = {
        "temperature": config.temperature or 1.0,
        "top_k": config.top_k or None,
        "top_p": config.top_p,
        "min_p": config.min_p,
    }
    ended, new = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device), input_ids
    while not ended.all():
        states = model.base_model(input_ids=new, attention_mask=mask, position_ids=places, use_cache=True, **cache)
        hidden = states.last_hidden_state[:, -1]
        if config.do_sample:
            # A token's seed is that of its sequence and the number of tokens before it.
            seed = seeds * 0x1E3779B97F4A7C15 + places[:, -1]
            out = logitless.sample(hidden, head.weight, seed=seed, **kept, **logits)
        else:
            out = logitless.linear_top_k(hidden, head.weight, 1, **logits)
        new = out.ids.masked_fill(ended[:, None], config.pad_token_id or 0)
        input_ids = torch.cat([input_ids, new], -1)
        mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], -1)
        places = places[:, -1:] + 1
        ended = ended | stopping_criteria(input_ids, None)
    return input_ids


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
