"""Parallel heads: the functions of ``logitless`` for groups whose ranks hold shards of the vocabulary.

docs/distributed.md lists what ranks exchange, which results have the same bits on all ranks, and which calls raise.
"""

from __future__ import annotations

from ._candidates import linear_candidates
from ._divergence import linear_divergence
from ._retrieval import info_nce
from ._sampling import sample
from .group import linear_cross_entropy, linear_log_probs, linear_top_k, next_labels

__all__ = [
    "info_nce",
    "linear_candidates",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "linear_top_k",
    "next_labels",
    "sample",
]
