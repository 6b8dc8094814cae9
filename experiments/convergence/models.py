"""Two language models up to their last hidden states: a transformer, and a gated linear RNN (GLA)."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

MODELS = ("transformer", "gla")


@dataclasses.dataclass(frozen=True)
class Size:
    vocab: int
    dim: int = 1024
    layers: int = 8
    heads: int = 16
    length: int = 1024  # tokens of a sequence


def rotary(length: int, dim: int) -> Tensor:
    """cos and sin of every position, [2, length, dim / 2]."""
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


class GatedLinear(nn.Module):
    """Gated linear attention of flash-linear-attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        try:
            from fla.layers import GatedLinearAttention
        except ImportError as error:
            raise SystemExit("--model gla needs flash-linear-attention (pip install flash-linear-attention)") from error
        self.mix = GatedLinearAttention(hidden_size=size.dim, num_heads=max(1, size.heads // 4), mode="chunk")

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)[0]  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, kind: str, size: Size) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(size.dim), nn.RMSNorm(size.dim)])
        self.mix = Attention(size) if kind == "transformer" else GatedLinear(size)
        self.up = nn.Linear(size.dim, 4 * size.dim, bias=False)
        self.down = nn.Linear(4 * size.dim, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norms[0](x))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Tokens [B, L] to hidden states [B, L, D]. ``head`` is the classifier's weight, not tied."""

    def __init__(self, kind: str, size: Size) -> None:
        super().__init__()
        if kind not in MODELS:
            raise ValueError(f"--model: expected one of {', '.join(MODELS)}, got {kind!r}")
        self.embedding = nn.Embedding(size.vocab, size.dim)
        self.blocks = nn.ModuleList([Block(kind, size) for _ in range(size.layers)])
        self.norm = nn.RMSNorm(size.dim)
        self.head = nn.Parameter(torch.empty(size.vocab, size.dim))
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

    def counts(self) -> tuple[int, int]:
        """Parameters of the blocks, and of embedding and head."""
        blocks = sum(p.numel() for p in self.blocks.parameters())
        return blocks, self.embedding.weight.numel() + self.head.numel()
