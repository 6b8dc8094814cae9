"""Parallel heads: the functions of ``logitless`` where the ranks of a group hold shards of the vocabulary.

docs/distributed.md has what is exchanged, what is the same on every rank to the bit, and what is refused.
"""

from __future__ import annotations

from .group import linear_cross_entropy, linear_log_probs, linear_top_k, next_labels

__all__ = ["linear_cross_entropy", "linear_log_probs", "linear_top_k", "next_labels"]
