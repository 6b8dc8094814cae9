"""The sizes of a model on which a step's cost depends, from fields or from a config.json of Hugging Face."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

MIXERS = ("attention", "gla", "gated_deltanet", "kda")
MOST = 1 << 40  # the largest size: far beyond all models, and products of several sizes still fit a float64


def check_number(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}: expected a number of at least {least}, got {value}")
    if value > MOST:
        raise ValueError(f"{name}: expected a number of at most 2^40, got one of {len(str(value))} digits")


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model of equal layers, each a mixer of tokens and a gated MLP.

    Attributes:
        mixer: ``attention``, ``gla``, ``gated_deltanet`` or ``kda``.
        vocab: V, rows of the head's weight.
        hidden: D.
        layers: Number of layers.
        intermediate: Width of the MLP.
        heads: Heads of queries and keys.
        head_dim: Columns of a head's queries and keys; 0 is hidden / heads.
        kv_heads: Heads of attention's keys and values; 0 is ``heads``.
        value_heads: Heads of a linear RNN's values; 0 is ``heads``.
        value_dim: Columns of a head's values in a linear RNN; 0 is ``head_dim``.
        conv_size: Taps of a linear RNN's short convolutions; 0 is none.
        qkv_bias: Whether attention's queries, keys and values have biases.
        qk_norm: Whether attention's queries and keys are normalized.
        gemma_norms: Whether norms are Gemma 3's, which are in float32 and also come after attention and MLP.
        sliding_layers: Layers of attention whose window is ``window`` tokens, given as a mask.
        window: Tokens of that window; 0 is none.
        softcap: Whether the logits are capped.
        tied: Whether the head's weight is the embedding's.
    """

    mixer: str
    vocab: int
    hidden: int
    layers: int
    intermediate: int
    heads: int
    head_dim: int = 0
    kv_heads: int = 0
    value_heads: int = 0
    value_dim: int = 0
    conv_size: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    gemma_norms: bool = False
    sliding_layers: int = 0
    window: int = 0
    softcap: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        if self.mixer not in MIXERS:
            raise ValueError(f"mixer: expected one of {', '.join(MIXERS)}, got {self.mixer!r}")
        for name in ("vocab", "hidden", "layers", "intermediate", "heads"):
            check_number(name, getattr(self, name), 1)
        for name in ("head_dim", "kv_heads", "value_heads", "value_dim", "conv_size", "sliding_layers", "window"):
            check_number(name, getattr(self, name), 0)
        if self.sliding_layers > self.layers:
            raise ValueError(f"sliding_layers: expected at most the {self.layers} layers, got {self.sliding_layers}")
        if self.head_dim == 0 and self.hidden % self.heads != 0:
            raise ValueError(
                f"head_dim: expected a number, got none (hidden {self.hidden} is no multiple of heads {self.heads})"
            )
        defaults = {"head_dim": self.head_dim or self.hidden // self.heads}
        defaults |= {"kv_heads": self.kv_heads or self.heads, "value_heads": self.value_heads or self.heads}
        defaults["value_dim"] = self.value_dim or defaults["head_dim"]
        for name, value in defaults.items():
            object.__setattr__(self, name, value)


# Defaults of entries that a file lacks, from the classes of transformers 5.17 and flash-linear-attention 0.6.0.
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
_ATTENTION = (*_SIZES, "intermediate_size", "num_attention_heads", "num_key_value_heads")
_MISSING: dict[str, dict[str, int]] = {
    "llama": dict(zip(_ATTENTION, (32000, 4096, 32, 11008, 32))),
    "mistral": dict(zip(_ATTENTION, (32000, 4096, 32, 14336, 32, 8))),
    "qwen2": dict(zip(_ATTENTION, (151936, 4096, 32, 22016, 32, 32))),
    "qwen3": dict(zip(_ATTENTION, (151936, 4096, 32, 22016, 32, 32))),
    "gemma3_text": dict(zip(_ATTENTION, (262208, 2304, 26, 9216, 8, 4))),
    "gla": dict(zip(_SIZES, (32000, 2048, 24))),
    "gated_deltanet": dict(zip(_SIZES, (32000, 2048, 21))),
    "kda": dict(zip(_SIZES, (32000, 2048, 24))),
}


class _Entries:
    """Entries of a configuration; an error names the entry and the expected value."""

    def __init__(self, entries: Mapping[str, Any], model_type: str) -> None:
        self.entries, self.model_type = entries, model_type

    def get(self, name: str, default: Any = None) -> Any:
        value = self.entries.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"config: {name}: expected a whole number, got {value!r} (model type {self.model_type!r})")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ValueError(f"config: {name}: expected a number, got {value!r} (model type {self.model_type!r})")
        return float(value)

    def expect(self, **expected: Any) -> None:
        """Raises for entries with unknown values. ``expected`` has known values by name, with the default first."""
        for name, values in expected.items():
            got = self.get(name, values[0])
            if got not in values:
                known = " or ".join(repr(value) for value in values)
                raise ValueError(f"config: {name}: expected {known}, got {got!r} (model type {self.model_type!r})")

    def size(self, name: str) -> int:
        """Returns a size; null raises.

        Files only hold entries that differ from the configuration class's, so a missing entry has that class's default.
        """
        return self.whole(name) if name in self.entries else _MISSING[self.model_type][name]

    def sizes(self) -> dict[str, Any]:
        names = {"vocab": "vocab_size", "hidden": "hidden_size", "layers": "num_hidden_layers"}
        return {name: self.size(entry) for name, entry in names.items()}


def _sliding_layers(entries: _Entries, layers: int, window: int, default: int) -> int:
    types = entries.get("layer_types")
    if window == 0:
        return 0
    if types is None:
        return default
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"config: layer_types: expected 'full_attention' or 'sliding_attention', got {kind!r} "
                f"(model type {entries.model_type!r})"
            )
    return int(sum(kind == "sliding_attention" for kind in types[:layers]))


def _attention(entries: _Entries) -> Model:
    kind, sizes = entries.model_type, entries.sizes()
    gemma = kind == "gemma3_text"
    activations = ("gelu_pytorch_tanh",) if gemma else ("silu",)
    entries.expect(attention_dropout=(0.0, 0), mlp_bias=(False,))
    entries.expect(**{"hidden_activation" if gemma else "hidden_act": activations})
    if kind != "qwen2":
        entries.expect(attention_bias=(False,))
    window, default = 0, sizes["layers"]
    if gemma or kind == "mistral" or (kind in ("qwen2", "qwen3") and entries.get("use_sliding_window", False)):
        window = entries.whole("sliding_window", 0 if "sliding_window" in entries.entries else 4096)
    if gemma:
        default -= sizes["layers"] // max(entries.whole("sliding_window_pattern", 6), 1)
    elif kind != "mistral":
        default -= entries.whole("max_window_layers", 28)
    heads = entries.size("num_attention_heads")
    kv_heads = entries.whole("num_key_value_heads", heads)
    if "num_key_value_heads" not in entries.entries:
        kv_heads = _MISSING[kind].get("num_key_value_heads", heads)
    return Model(
        "attention",
        **sizes,
        intermediate=entries.size("intermediate_size"),
        heads=heads,
        head_dim=entries.whole("head_dim", {"qwen3": 128, "gemma3_text": 256}.get(kind, 0)),
        kv_heads=kv_heads,
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "gemma3_text"),
        gemma_norms=gemma,
        sliding_layers=_sliding_layers(entries, sizes["layers"], window, max(default, 0)),
        window=window,
        softcap=entries.get("final_logit_softcapping") is not None,
        tied=bool(entries.get("tie_word_embeddings", gemma)),
    )


def _linear_rnn(entries: _Entries) -> Model:
    """Returns a linear RNN; missing entries have the defaults of flash-linear-attention 0.6.0."""
    kind, sizes = entries.model_type, entries.sizes()
    hidden = sizes["hidden"]
    entries.expect(attn=(None,), attnres_block_size=(None,), fuse_norm=(True,), fuse_swiglu=(True,))
    entries.expect(hidden_act=("swish",), attn_mode=("chunk",))
    width = entries.whole("intermediate_size", 0)
    if width == 0:  # as in GatedMLP of modules/mlp.py: 2/3 of hidden_ratio D, rounded up to a multiple of 256
        width = -(-int(hidden * entries.number("hidden_ratio", 4) * 2 / 3) // 256) * 256
    heads = entries.whole("num_heads", {"gla": 4, "gated_deltanet": 6, "kda": 16}[kind])
    if kind == "gla":
        entries.expect(use_output_gate=(True,), feature_map=(None,), num_kv_heads=(None, heads), use_gk=(True,))
        dims = [round(hidden * entries.number(f"expand_{x}", y)) // max(heads, 1) for x, y in (("k", 0.5), ("v", 1.0))]
        short = entries.get("use_short_conv", False)
    else:
        entries.expect(use_gate=(True,))
        dim = entries.whole("head_dim", 256 if kind == "gated_deltanet" else 128)
        dims = [dim, int(dim * entries.number("expand_v", 2.0 if kind == "gated_deltanet" else 1.0))]
        short = entries.get("use_short_conv", True)
    return Model(
        kind,
        **sizes,
        intermediate=width,
        heads=heads,
        head_dim=dims[0],
        value_heads=entries.whole("num_v_heads", heads) if kind != "gla" else heads,
        value_dim=dims[1],
        conv_size=entries.whole("conv_size", 4) if short else 0,
        tied=bool(entries.get("tie_word_embeddings", False)),
    )


_READERS = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma3_text"), _attention)
_READERS |= dict.fromkeys(("gla", "gated_deltanet", "kda"), _linear_rnn)


def from_config(config: Mapping[str, Any]) -> Model:
    """Returns the model of a configuration's entries.

    Raises:
        ValueError: The model type or an entry is not known here; the message names it.
    """
    # Models of text and images have an inner configuration of the language model.
    while isinstance(config.get("text_config"), Mapping) or config.get("model_type") == "gemma3":
        outer = {key: value for key, value in config.items() if key == "tie_word_embeddings"}
        inner = {"model_type": "gemma3_text"} if config.get("model_type") == "gemma3" else {}
        config = outer | inner | dict(config.get("text_config") or {})
    kind = config.get("model_type")
    if kind not in _READERS:
        raise ValueError(
            f"config: model_type: expected one of {', '.join(_READERS)}, got {kind!r}; a Model takes fields"
        )
    return _READERS[kind](_Entries(config, kind))


def read_config(path: str | os.PathLike[str]) -> Model:
    """Returns the model of a ``config.json``, or of a folder with one."""
    path = os.fspath(path)
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    try:
        with open(file, encoding="utf-8") as stream:
            config = json.load(stream)
    except (OSError, ValueError) as error:
        raise ValueError(f"config: {file}: expected a JSON file that can be read, got {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"config: {file}: expected a JSON object, got {type(config).__name__}")
    return from_config(config)
