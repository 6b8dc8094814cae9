"""Tiny TRL trainers on the CPU: a random model and a toy tokenizer in a folder, data in memory, nothing from a hub."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

WORDS = [f"w{i}" for i in range(93)]
SPECIAL = ["<pad>", "<eos>", "<unk>"]
STEPS = 20


def make_tokenizer():
    vocabulary = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_model(kind: str):
    sizes = dict(vocab_size=len(SPECIAL + WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
    sizes |= dict(pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.2, dtype="float32")
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
        "cohere": (transformers.CohereConfig, transformers.CohereForCausalLM),
    }[kind]
    extra = {"gemma2": {"final_logit_softcapping": 3.0}, "cohere": {"logit_scale": 0.25}}.get(kind, {})
    if kind == "cohere":
        del sizes["head_dim"]
    torch.manual_seed(11)
    return model(config(**sizes, **extra))


def save(folder: Path, kind: str) -> str:
    """Saves model, reference model and tokenizer for trainers, and returns the folder's name."""
    make_model(kind).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def text(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choices(WORDS[:30], k=rng.randint(least, most)))


def data(columns: dict[str, str], rows: int = 24) -> Dataset:
    """Returns data with columns of "text", "more" of it after a prompt, or "label"."""
    rng = random.Random(3)
    made = {"text": lambda n: text(rng, 3, 9), "more": lambda n: " " + text(rng, 3, 9), "label": lambda n: n % 2 == 0}
    return Dataset.from_list([{name: made[kind](n) for name, kind in columns.items()} for n in range(rows)])


def reward(completions, **_):
    """Rewards words of even numbers."""
    return [sum(int(w[1:]) % 2 == 0 for w in c.split() if w[1:].isdigit()) / (1 + len(c.split())) for c in completions]


COLUMNS = {
    "SFT": {"text": "text"},
    "DPO": {"prompt": "text", "chosen": "more", "rejected": "more"},
    "CPO": {"prompt": "text", "chosen": "more", "rejected": "more"},
    "ORPO": {"prompt": "text", "chosen": "more", "rejected": "more"},
    "KTO": {"prompt": "text", "completion": "more", "label": "label"},
    "GRPO": {"prompt": "text"},
    "RLOO": {"prompt": "text"},
    "Distillation": {"prompt": "text"},
}


def trainer(name: str, model: str, output: Path, arguments=None, **options):
    """Returns TRL's trainer of that name over the saved model, tiny but for the given options."""
    import trl

    home = importlib.import_module(f"trl.experimental.{name.lower()}") if name in ("CPO", "ORPO") else trl
    shared = dict(output_dir=str(output), per_device_train_batch_size=4, max_steps=STEPS, learning_rate=1e-3, seed=5)
    shared |= dict(report_to=[], save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=1)
    shared |= dict(gradient_checkpointing=False, dataloader_pin_memory=False)
    generated = dict(num_generations=4, max_completion_length=8, beta=0.05)
    own = {"GRPO": generated, "RLOO": generated, "Distillation": {"max_completion_length": 8, "beta": 0.5}}.get(
        name, {}
    )
    kwargs = {"reward_funcs": reward} if name in ("GRPO", "RLOO") else {}
    given = {
        "model": model,
        "args": getattr(home, f"{name}Config")(**(shared | own | options)),
        "train_dataset": data(COLUMNS[name]),
        "processing_class": transformers.AutoTokenizer.from_pretrained(model),
    }
    return getattr(home, f"{name}Trainer")(**given | kwargs | (arguments or {}))
