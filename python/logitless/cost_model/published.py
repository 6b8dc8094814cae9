"""Published models by the names that ``logitless plan --model`` knows. Sizes are those of their config.json."""

from __future__ import annotations

import os
from typing import Any

from .config import Model, read_config

_GEMMA: dict[str, Any] = {"head_dim": 256, "qk_norm": True, "gemma_norms": True}
_QWEN3: dict[str, Any] = {"head_dim": 128, "qk_norm": True}

# name and repository: vocab, hidden, layers, intermediate, heads, kv_heads, tied, and what else there is
_SIZES: dict[tuple[str, str], tuple[int, int, int, int, int, int, bool, dict[str, Any]]] = {
    ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"): (128256, 4096, 32, 14336, 32, 8, False, {}),
    ("llama-3-70b", "meta-llama/Meta-Llama-3-70B"): (128256, 8192, 80, 28672, 64, 8, False, {}),
    ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"): (128256, 4096, 32, 14336, 32, 8, False, {}),
    ("llama-3.1-405b", "meta-llama/Llama-3.1-405B"): (128256, 16384, 126, 53248, 128, 8, False, {}),
    ("llama-3.2-1b", "meta-llama/Llama-3.2-1B"): (128256, 2048, 16, 8192, 32, 8, True, {}),
    ("gemma-3-1b", "google/gemma-3-1b-pt"): (
        *(262144, 1152, 26, 6912, 4, 1, True),
        _GEMMA | {"window": 512, "sliding_layers": 22},
    ),
    ("gemma-3-4b", "google/gemma-3-4b-pt"): (
        *(262208, 2560, 34, 10240, 8, 4, True),
        _GEMMA | {"window": 1024, "sliding_layers": 29},
    ),
    ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B"): (151936, 896, 24, 4864, 14, 2, True, {"qkv_bias": True}),
    ("qwen2.5-7b", "Qwen/Qwen2.5-7B"): (152064, 3584, 28, 18944, 28, 4, False, {"qkv_bias": True}),
    ("qwen3-0.6b", "Qwen/Qwen3-0.6B"): (151936, 1024, 28, 3072, 16, 8, True, _QWEN3),
    ("qwen3-8b", "Qwen/Qwen3-8B"): (151936, 4096, 36, 12288, 32, 8, False, _QWEN3),
    ("mistral-nemo-12b", "mistralai/Mistral-Nemo-Base-2407"): (
        *(131072, 5120, 40, 14336, 32, 8, False),
        {"head_dim": 128},
    ),
    ("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B"): (49152, 2048, 24, 8192, 32, 32, True, {}),
}


def _normalized(name: str) -> str:
    return name.rpartition("/")[2].lower().replace("_", "-")


def names() -> list[str]:
    return [name for name, _ in _SIZES]


def find_model(model: str) -> Model:
    """The model of a folder with a ``config.json``, of such a file, or of a name. A name's case, organization and ``_``
    for ``-`` do not matter.

    Raises:
        ValueError: neither; or a model whose layers the model of cost does not know.
    """
    if os.path.exists(model):
        return read_config(model)
    for known, (vocab, hidden, layers, intermediate, heads, kv_heads, tied, others) in _SIZES.items():
        if _normalized(model) in map(_normalized, known):
            sizes = {"intermediate": intermediate, "heads": heads, "kv_heads": kv_heads, "tied": tied}
            return Model("attention", vocab, hidden, layers, **sizes | others)
    raise ValueError(
        f"model: expected a folder with a config.json, such a file, or one of {', '.join(names())}; got {model!r}"
    )
