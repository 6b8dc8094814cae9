"""Tiles of logits within a budget of bytes."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..errors import BudgetTooSmallError

# Of a tile that is as large as is useful: products of more rows read the operands less often, which no product of these
# sizes waits for.
MOST_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
# In a chunk of rows whose gradients are made at once. For each chunk the sum of the weight's gradient is read and
# written, which takes longer than the product itself where the chunk has few rows.
LEAST_ROWS = {"cpu": 64, "cuda": 1024}


# Rows of tiles begin at multiples of so many columns, lines of 128 bytes in 16 bits: products take longer over others,
# several times as long where rows are no whole 16 bytes.
ALIGNED = 64


def padded(columns: int) -> int:
    return -(-columns // ALIGNED) * ALIGNED


class Costs(NamedTuple):
    """Bytes of one pass beside its outputs, in tiles of some rows and of whole rows or windows of columns."""

    fixed: int
    row: int  # of a row in a tile: copies of hidden states, sums
    column: int  # of a column in a window: copies of weights, sums
    element: int  # of a tile: products of both heads, gradients

    def bytes(self, rows: int, window: int, columns: int) -> int:
        """Of tiles of so many columns, of whose weights a window is copied at once."""
        return self.fixed + self.row * rows + self.column * window + self.element * rows * padded(columns)


class Tile(NamedTuple):
    rows: int
    window: int


LEAST_TILE = Tile(16, 64)  # smaller ones would take more calls than products


def _text(size: int) -> str:
    """As the library writes bytes: "27050240 bytes (25.8 MiB)", rounded up, so that so many MiB are enough."""
    text = f"{size} byte{'' if size == 1 else 's'}"
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{text} ({math.ceil(10 * size / unit) / 10:.1f} {name})"
    return text


def check(budget: int, least: int) -> None:
    """Refuses a budget below the least that works."""
    if 0 < budget < least:
        message = f"max_workspace_bytes: expected at least {_text(least)} for this problem, got {_text(budget)}"
        raise BudgetTooSmallError(message, required_bytes=least)


def _limit(budget: int, device: str, costs: Costs, least: int) -> int:
    """Bytes that a pass may have."""
    check(budget, least)
    return budget or max(least, costs.fixed + MOST_BYTES[device])


def least_of_whole_rows(costs: Costs, columns: int) -> int:
    return costs.bytes(1, 1, columns)


def least_of_windows(costs: Costs, rows: int, columns: int, all_rows: bool = False) -> int:
    """all_rows: of tiles of all of them."""
    window = min(columns, LEAST_TILE.window)
    return costs.bytes(rows if all_rows else min(rows, LEAST_TILE.rows), window, window)


def least_of_kept_logits(costs: Costs, rows: int, columns: int, device: str) -> int:
    """The least for gradients made with the values, from whole rows of kept logits."""
    return costs.bytes(min(rows, LEAST_ROWS[device]), 1, columns)


def whole_rows(costs: Costs, rows: int, columns: int, budget: int, device: str) -> Tile:
    """Tiles of whole rows, as many as fit. budget: 0 for as much as is useful."""
    limit = _limit(budget, device, costs, least_of_whole_rows(costs, columns))
    window = columns
    if costs.column > 0:  # a quarter for copies of weights: the rows have the rest
        left = limit - costs.bytes(1, 0, columns)
        window = max(1, min(columns, left // costs.column, (limit - costs.fixed) // (4 * costs.column)))
    fitting = (limit - costs.fixed - costs.column * window) // (costs.row + costs.element * padded(columns))
    return Tile(max(1, min(rows, fitting)), window)


def _half(size: int, unit: int) -> int:
    """In whole units."""
    return -(-size // (2 * unit)) * unit


def windows(costs: Costs, rows: int, columns: int, budget: int, device: str, all_rows: bool = False) -> Tile:
    """Tiles of windows of columns, with about as many rows or all of them. all_rows: with all in any case.

    On CUDA as few windows as fit, all alike, since each of them reads and writes the sums of the hidden states'
    gradient once; on the CPU that gains nothing.
    """
    limit = _limit(budget, device, costs, least_of_windows(costs, rows, columns, all_rows))
    least_rows = rows if all_rows else LEAST_TILE.rows
    found = Tile(rows, columns)
    while costs.bytes(found.rows, found.window, found.window) > limit:
        if found.rows > least_rows and (found.rows > found.window or found.window <= LEAST_TILE.window):
            found = Tile(_half(found.rows, LEAST_TILE.rows), found.window)
        else:
            found = Tile(found.rows, _half(found.window, LEAST_TILE.window))
    if device == "cpu" or found.window == columns:
        return found
    unit = LEAST_TILE.window
    most = (limit - costs.fixed - costs.row * found.rows) // (costs.column + costs.element * found.rows) // unit * unit
    count = -(-columns // most)
    return Tile(found.rows, min(columns, -(-columns // (count * unit)) * unit))
