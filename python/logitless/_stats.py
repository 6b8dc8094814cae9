"""The statistics of rows that a forward pass can return, as a list: all other modules go through it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Statistic(NamedTuple):
    """One of each row."""

    name: str  # of return_stats, and the field of logitless_buffers
    dtype: str = ""  # of its array; "": that of the loss
    want: str = ""  # the flag of logitless_problem that it needs; "": none
    differentiable: bool = False  # then logitless_problem has has_grad_<name>, and logitless_buffers grad_<name>
    is_default: bool = False  # whether return_stats=True asks for it


ALL = (
    Statistic("nll", differentiable=True, is_default=True),
    Statistic("lse", differentiable=True, is_default=True),
    Statistic("entropy", want="want_entropy", differentiable=True, is_default=True),
    Statistic("argmax", dtype="int64", want="want_argmax", is_default=True),
    Statistic("target_logit", differentiable=True),
    Statistic("mean_logit", want="want_mean_logit"),
    Statistic("log_sum_sq_probs", want="want_log_sum_sq_probs"),
    Statistic("is_top1", dtype="bool", want="want_argmax"),
    Statistic("max_logit"),
)
COUNTS = {"correct_count": "want_argmax", "valid_count": ""}  # scalars, and the flags that they need
DRAW_STATS = ("kept_count", "draw_variance")  # of thinned gradients

OF_ROWS = tuple(statistic.name for statistic in ALL)
DIFFERENTIABLE = tuple(statistic.name for statistic in ALL if statistic.differentiable)
CONSTANT = tuple(statistic.name for statistic in ALL if not statistic.differentiable)
GRADIENTS = tuple(f"grad_{name}" for name in DIFFERENTIABLE)  # fields of logitless_buffers
DEFAULT = (*(statistic.name for statistic in ALL if statistic.is_default), *COUNTS)
NAMES = (*DEFAULT, *(name for name in OF_ROWS if name not in DEFAULT), *DRAW_STATS)


def of_rows(names: Iterable[str]) -> tuple[str, ...]:
    """Those of rows among them, in the order of the list."""
    asked = set(names)
    return tuple(name for name in OF_ROWS if name in asked)


def wants(names: Iterable[str]) -> tuple[str, ...]:
    """The flags of logitless_problem that statistics need."""
    asked = set(names)
    flags = {statistic.want for statistic in ALL if statistic.name in asked}
    flags |= {want for name, want in COUNTS.items() if name in asked}
    return tuple(sorted(flags - {""}))
