"""Problems to measure: heads of public models and the grids of two papers, as (N tokens, V vocabulary, D hidden)."""

from __future__ import annotations

import random
from typing import NamedTuple


class Shape(NamedTuple):
    name: str
    tokens: int
    vocab: int
    hidden: int

    @property
    def flop(self) -> float:
        """Returns the operations of one bare product of input and weight."""
        return 2.0 * self.tokens * self.vocab * self.hidden

    @property
    def gradient_bytes(self) -> int:
        """Returns the size of the two gradients in bf16."""
        return 2 * self.hidden * (self.tokens + self.vocab)


HEADS = [
    Shape("gemma-2-2b", 8192, 256000, 2304),
    Shape("llama-3-8b", 8192, 128256, 4096),
    Shape("linear-rnn-1.3b", 16384, 128000, 2048),
    Shape("gemma-e2b", 8192, 262144, 1536),
    Shape("mistral-nemo", 8192, 131072, 5120),
    Shape("llama-3-8b-4k", 4096, 128256, 4096),
    Shape("1k-262k", 1024, 262144, 4096),
    Shape("32k-32k", 32768, 32768, 4096),
    Shape("32k-262k", 32768, 262144, 4096),
    Shape("qwen-d1024", 16384, 151936, 1024),
]
BY_NAME = {shape.name: shape for shape in HEADS}

NVIDIA = [
    Shape(f"nv-{n // 1024}k-{v // 1024}k", n, v, 4096)
    for n in (1024, 2048, 4096, 8192, 16384, 32768)
    for v in (32768, 65536, 131072, 262144)
]
GRIDS = {"heads": HEADS, "nvidia": NVIDIA}


def random_shapes(count: int, seed: int) -> list[Shape]:
    """Returns untuned shapes: any N and V; D is a multiple of 64 or, one time in four, arbitrary."""
    draw = random.Random(seed)

    def size(least: int, most: int) -> int:
        return round(least * (most / least) ** draw.random())

    shapes = []
    for _ in range(count):
        tokens, vocab, hidden = size(700, 20000), size(20000, 262144), size(768, 5120)
        hidden = hidden if draw.random() < 0.25 else hidden // 64 * 64
        shapes.append(Shape(f"{tokens}x{vocab}x{hidden}", tokens, vocab, hidden))
    return shapes


def parse_shapes(text: str) -> list[Shape]:
    """Parses names of heads and N,V,D triples, separated by spaces, colons or commas.

    An example is ``gemma-2-2b,8192x131072x1024``.
    """
    shapes = []
    for word in text.replace(":", " ").replace(",", " ").split():
        if word in BY_NAME:
            shapes.append(BY_NAME[word])
            continue
        sizes = word.lower().split("x")
        if len(sizes) != 3 or not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise ValueError(f"expected NxVxD or one of {', '.join(BY_NAME)}; got {word!r}")
        shapes.append(Shape(word.lower(), *(int(size) for size in sizes)))
    if not shapes:
        raise ValueError("expected at least one shape, got none")
    return shapes


def parse_budgets(text: str) -> list[int | None]:
    """Parses a comma-separated list of MiB, ``unlimited`` (None) or ``default`` (0, a call without a budget)."""
    named, words = {"unlimited": None, "default": 0}, text.split(",")
    for word in words:
        if word not in named and not (word.isdigit() and int(word) > 0):
            raise ValueError(f"expected MiB (a positive integer), 'unlimited' or 'default', got {word!r}")
    return [named[word] if word in named else int(word) for word in words]


def checked_share(text: str | float) -> float:
    """Parses the share of tokens without a target."""
    share = float(text)
    if not 0 <= share < 1:
        raise ValueError(f"expected a share of at least 0 and below 1, got {share}")
    return share
