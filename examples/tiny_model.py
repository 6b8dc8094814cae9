"""A random language model with a byte tokenizer, saved like a model on a hub, for the examples with --tiny."""

import argparse

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>"]


def parser(steps: int) -> argparse.ArgumentParser:
    """Returns a parser of the arguments that these examples share."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="Qwen/Qwen3-0.6B")
    options.add_argument("--steps", type=int, default=steps)
    options.add_argument("--tiny", action="store_true")
    return options


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per byte, so that any text has tokens."""
    symbols = SPECIAL + sorted(ByteLevel.alphabet())
    bytes_only = Tokenizer(BPE({symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    bytes_only.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def save(folder: str) -> str:
    """Saves the model and its tokenizer. Returns the folder, which serves as the model's name."""
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
