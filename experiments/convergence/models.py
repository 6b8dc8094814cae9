"""Language models up to their last hidden states: a transformer, and linear RNNs (GLA, Gated DeltaNet, KDA)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Size:
    vocab: int
    dim: int = 1024
    layers: int = 8
    heads: int = 16
    length: int = 1024  # tokens per sequence
    tied: bool = False  # the head is the embedding
    expand_k: float = 0.5  # GLA: width of all keys, relative to the model's; values are likewise
    expand_v: float = 1.0


def rotary(length: int, dim: int) -> Tensor:
    """Returns cos and sin of every position, [2, length, dim / 2]."""
    rates = 10000.0 ** (-torch.arange(0, dim, 2).float() / dim)
    angles = torch.arange(length).float()[:, None] * rates
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    cos, sin = table
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Attention(nn.Module):
    table: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.out = nn.Linear(size.dim, size.dim, bias=False)
        self.register_buffer("table", rotary(size.length, size.dim // size.heads), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, self.table), rotate(k, self.table)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, dim))  # type: ignore[no-any-return]


class LinearMixer(nn.Module):
    """A layer of flash-linear-attention that replaces attention."""

    def __init__(self, layer: str, size: Size, **options: object) -> None:
        super().__init__()
        try:
            import fla.layers
        except ImportError as error:
            raise ImportError(
                f"linear RNNs need flash-linear-attention (pip install flash-linear-attention): {error}"
            ) from error
        self.mix = getattr(fla.layers, layer)(hidden_size=size.dim, mode="chunk", **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)[0]  # type: ignore[no-any-return]


def gla(size: Size) -> nn.Module:
    heads = max(1, size.heads // 4)
    return LinearMixer("GatedLinearAttention", size, num_heads=heads, expand_k=size.expand_k, expand_v=size.expand_v)


def gated_deltanet(size: Size) -> nn.Module:
    """Makes keys of three quarters of the width and values of twice that, as the library's own models do."""
    width = min(128, size.dim // 4)
    return LinearMixer("GatedDeltaNet", size, head_dim=width, num_heads=max(1, 3 * size.dim // (4 * width)), expand_v=2)


def kda(size: Size) -> nn.Module:
    width = min(128, size.dim)
    return LinearMixer("KimiDeltaAttention", size, head_dim=width, num_heads=size.dim // width)


MIXERS: dict[str, Callable[[Size], nn.Module]] = {
    "transformer": Attention,
    "gla": gla,
    "gated_deltanet": gated_deltanet,
    "kda": kda,
}


class Block(nn.Module):
    def __init__(self, kind: str, size: Size) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(size.dim), nn.RMSNorm(size.dim)])
        self.mix = MIXERS[kind](size)
        self.up = nn.Linear(size.dim, 4 * size.dim, bias=False)
        self.down = nn.Linear(4 * size.dim, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norms[0](x))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Maps tokens [B, L] to hidden states [B, L, D]. ``head`` is the head's weight."""

    def __init__(self, kind: str, size: Size) -> None:
        super().__init__()
        if kind not in MIXERS:
            raise ValueError(f"--model: expected one of {', '.join(MIXERS)}, got {kind!r}")
        self.embedding = nn.Embedding(size.vocab, size.dim)
        self.blocks = nn.ModuleList([Block(kind, size) for _ in range(size.layers)])
        self.norm = nn.RMSNorm(size.dim)
        self.head = self.embedding.weight if size.tied else nn.Parameter(torch.empty(size.vocab, size.dim))
        for parameter in (self.embedding.weight, self.head):
            nn.init.normal_(parameter, std=0.02)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * size.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]
