"""Published models, by the names that ``logitless plan --model`` knows, with the sizes of their config.json."""

from __future__ import annotations

import os
from typing import Any

from .config import Model, read_config


def _of(
    vocab: int, hidden: int, layers: int, intermediate: int, heads: int, kv_heads: int, tied: bool, **others: Any
) -> Model:
    return Model("attention", vocab, hidden, layers, intermediate, heads, kv_heads=kv_heads, tied=tied, **others)


_GEMMA: dict[str, Any] = {"head_dim": 256, "qk_norm": True, "gemma_norms": True}
_QWEN3: dict[str, Any] = {"head_dim": 128, "qk_norm": True}
_MODELS = {  # by name and repository
    ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"): _of(128256, 4096, 32, 14336, 32, 8, False),
    ("llama-3-70b", "meta-llama/Meta-Llama-3-70B"): _of(128256, 8192, 80, 28672, 64, 8, False),
    ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"): _of(128256, 4096, 32, 14336, 32, 8, False),
    ("llama-3.1-405b", "meta-llama/Llama-3.1-405B"): _of(128256, 16384, 126, 53248, 128, 8, False),
    ("llama-3.2-1b", "meta-llama/Llama-3.2-1B"): _of(128256, 2048, 16, 8192, 32, 8, True),
    ("gemma-3-1b", "google/gemma-3-1b-pt"): _of(
        262144, 1152, 26, 6912, 4, 1, True, window=512, sliding_layers=22, **_GEMMA
    ),
    ("gemma-3-4b", "google/gemma-3-4b-pt"): _of(
        262208, 2560, 34, 10240, 8, 4, True, window=1024, sliding_layers=29, **_GEMMA
    ),
    ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B"): _of(151936, 896, 24, 4864, 14, 2, True, qkv_bias=True),
    ("qwen2.5-7b", "Qwen/Qwen2.5-7B"): _of(152064, 3584, 28, 18944, 28, 4, False, qkv_bias=True),
    ("qwen3-0.6b", "Qwen/Qwen3-0.6B"): _of(151936, 1024, 28, 3072, 16, 8, True, **_QWEN3),
    ("qwen3-8b", "Qwen/Qwen3-8B"): _of(151936, 4096, 36, 12288, 32, 8, False, **_QWEN3),
    ("mistral-nemo-12b", "mistralai/Mistral-Nemo-Base-2407"): _of(131072, 5120, 40, 14336, 32, 8, False, head_dim=128),
    ("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B"): _of(49152, 2048, 24, 8192, 32, 32, True),
}


def _normalized(name: str) -> str:
    return name.rpartition("/")[2].lower().replace("_", "-")


def names() -> list[str]:
    return [name for name, _ in _MODELS]


def find_model(model: str) -> Model:
    """Returns the model of a ``config.json``, of a folder with one, or of a name.

    A name may have any case, any organization, and ``_`` for ``-``.

    Raises:
        ValueError: There is no such model, or its layers are not known here.
    """
    if os.path.exists(model):
        return read_config(model)
    for known, sizes in _MODELS.items():
        if _normalized(model) in map(_normalized, known):
            return sizes
    raise ValueError(
        f"model: expected a folder with a config.json, such a file, or one of {', '.join(names())}; got {model!r}"
    )
