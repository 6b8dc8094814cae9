"""Heads alone over the vocabulary, at the width and the tokens of the scale study's steps: from where on each pays."""

from __future__ import annotations

from shapes import Shape
from studies import grids
from studies.session import Session

VOCABS = (131072, 16384, 32768, 65536, 262144)
TOKENS, WIDTH = 16384, 2048
GRID = grids.Grid(
    "crossover",
    tuple(Shape(f"v-{vocab // 1024}k", TOKENS, vocab, WIDTH) for vocab in VOCABS),
    (None, 160),
    "torch-compile,liger,apple-kahan",
    rounds=3,
    seconds=25.0,
)


def run(session: Session) -> None:
    for shape in GRID.shapes:
        if session.options.tiny:
            shape = shape._replace(tokens=64, vocab=shape.vocab // 256, hidden=32)
        grids.measured(session, shape.name, GRID, shape)
