"""Parallel heads: ``headroom.linear_cross_entropy`` where the ranks of a group hold shards of the vocabulary.

docs/parallel.md has what is exchanged, what is the same on every rank to the bit, and what is refused.
"""

from __future__ import annotations

from ._function import linear_cross_entropy
from ._labels import next_labels

__all__ = ["linear_cross_entropy", "next_labels"]
