"""The models whose whole training steps are timed: built from a configuration, with random weights."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

TINY = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}
TINY_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
TINY_SEQUENCES, TINY_LENGTH = 2, 24


@dataclasses.dataclass(frozen=True)
class Spec:
    """A model from its published configuration, as far as a step's time depends on it."""

    name: str
    config_class: str  # class in transformers or fla.models
    config: dict[str, Any]
    tiny: dict[str, Any]  # changes for a trial on the CPU
    sequences: int = 4
    length: int = 4096
    fla: bool = False  # flash-linear-attention's: its first call tunes kernels for a long time
    by_name: bool = False  # runs only if named


WIDE = {"vocab_size": 128000, "hidden_size": 2048, "num_hidden_layers": 24}  # shared by models that are compared
SPECS = [
    Spec(
        "llama-1b",
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        TINY | TINY_ATTENTION,
    ),
    Spec(
        "gemma-270m",
        "Gemma3TextConfig",
        {
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "tie_word_embeddings": True,
        },
        TINY | TINY_ATTENTION | {"sliding_window": 8},
    ),
    Spec(
        "qwen3-4b",
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        TINY | TINY_ATTENTION,
        sequences=2,  # with four, the layers' activations alone are 100 GB
    ),
    Spec("gla-1.3b", "GLAConfig", WIDE | {"num_heads": 4}, TINY, fla=True),
    Spec(
        "transformer-1.3b",
        "LlamaConfig",
        WIDE
        | {"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}
        | {"tie_word_embeddings": False},
        TINY | TINY_ATTENTION,
        by_name=True,
    ),
]
BY_NAME = {spec.name: spec for spec in SPECS}


def chosen(argument: str, text: str, known: Collection[str]) -> list[str]:
    """Parses comma-separated names; ``all`` gives an empty list."""
    names = [] if text == "all" else [word.strip() for word in text.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"{argument}: expected all or names out of {', '.join(known)}; got {name!r}")
    return names


def chosen_specs(text: str) -> list[Spec]:
    """Parses comma-separated names, or all; flash-linear-attention's models come last."""
    names = chosen("--models", text, BY_NAME)
    return sorted((s for s in SPECS if s.name in names or not (names or s.by_name)), key=lambda spec: spec.fla)


def sized(
    spec: Spec, tiny: bool, layers: int | None = None, sequences: int | None = None, length: int | None = None
) -> Spec:
    """Returns the model with another depth and batch, or small enough for a trial on the CPU."""
    config = spec.config | (spec.tiny if tiny else {})
    if layers is not None:
        config = config | {"num_hidden_layers": layers}
    return dataclasses.replace(
        spec,
        config=config,
        sequences=sequences or (TINY_SEQUENCES if tiny else spec.sequences),
        length=length or (TINY_LENGTH if tiny else spec.length),
    )


def make_config(spec: Spec) -> Any:
    if spec.fla:
        import fla.models as library  # registers its classes with transformers
    else:
        import transformers as library
    config = getattr(library, spec.config_class)(**spec.config)
    config.use_cache = False
    return config


def import_model(spec: Spec) -> None:
    """Imports the packages that building the model needs."""
    import transformers

    transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(make_config(spec))]


def build_model(spec: Spec, device: str) -> nn.Module:
    """Builds it in bf16 and training mode, from the same seed every time."""
    import transformers

    config = make_config(spec)
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.to(device).train()


def random_tokens(spec: Spec, device: str) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(1)
    size = (spec.sequences, spec.length)
    return torch.randint(0, spec.config["vocab_size"], size, device=device, generator=generator)


def last_hidden(model: Any, tokens: Tensor) -> Tensor:
    """Returns the head's input."""
    hidden: Tensor = model.base_model(input_ids=tokens, use_cache=False)[0]
    return hidden


class Training:
    """A model and its optimizer.

    The learning rate is 0: a step does all of its work, and every head sees the same weights in every round.
    """

    def __init__(self, spec: Spec, device: str) -> None:
        self.spec = spec
        self.model = build_model(spec, device)
        self.tokens = random_tokens(spec, device)
        fused = {"fused": True} if device.startswith("cuda") else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0, **fused)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def optimizer_bytes(self) -> int:
        tensors = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def finish_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def forget(self) -> None:
        """Drops gradients and state after a failed step."""
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
