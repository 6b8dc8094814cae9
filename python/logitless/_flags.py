"""What is asked of an operator, as one of its arguments: PyTorch spends time on each, in eager mode squared."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _stats

# Of the operators' schemas and of the flags, to be raised when one of them changes. Packed flags hold it, so that code
# which PyTorch compiled for another version of this package is not found in its caches on disk: these know neither.
SCHEMAS = 11
_SCHEMAS_BIT = 40
_STATS_BIT = 16


class Wants(NamedTuple):
    """Which gradients."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    scale: bool = False
    temperature: bool = False


class Flags(NamedTuple):
    """Gradients, statistics, and what becomes of draws."""

    want_d_hidden: bool = False
    want_d_weight: bool = False
    want_d_bias: bool = False
    want_d_scale: bool = False
    want_d_temperature: bool = False
    keeps_draws: bool = False
    want_draw_stats: bool = False
    want_counts: bool = False
    stats: tuple[str, ...] = ()  # of rows, in the order of _stats.ALL

    def wants(self) -> Wants:
        return Wants(*map(bool, self[: len(Wants._fields)]))

    def with_gradients(self, wants: Wants) -> Flags:
        fields: dict[str, Any] = dict(zip(Flags._fields, wants))
        return self._replace(**fields)

    def learns_numbers(self) -> bool:
        return self.want_d_scale or self.want_d_temperature

    def packed(self) -> int:
        """A bit for each, the first is 1, then one for each statistic, and behind them the number of the schemas."""
        stats = sum([1 << _STATS_BIT + _stats.OF_ROWS.index(name) for name in self.stats])
        return sum([1 << bit for bit, flag in enumerate(self[:-1]) if flag], stats | SCHEMAS << _SCHEMAS_BIT)


def unpacked(bits: int) -> Flags:
    stats = [name for bit, name in enumerate(_stats.OF_ROWS, _STATS_BIT) if bits >> bit & 1]
    flags = {name: bool(bits >> bit & 1) for bit, name in enumerate(Flags._fields[:-1])}
    return Flags()._replace(**flags, stats=tuple(stats))
