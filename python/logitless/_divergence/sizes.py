"""Chooses tiles of logits within a budget of bytes."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..errors import BudgetTooSmallError

# Bytes of the largest useful tile. With more rows, products would read the operands less often, but products of these
# sizes do not wait for their operands.
MOST_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
# Rows of a chunk whose gradients are made with its values. Each chunk reads and writes the sum of the weight's
# gradient, which takes longer than the product itself where the chunk has few rows.
LEAST_ROWS = {"cpu": 64, "cuda": 1024}


# A tile's rows begin at multiples of this number of columns, which is a line of 128 bytes in 16 bits. Products with
# other strides take longer, several times as long where rows are not a multiple of 16 bytes.
ALIGNED = 64


def padded(columns: int) -> int:
    return -(-columns // ALIGNED) * ALIGNED


class Costs(NamedTuple):
    """Bytes of one pass beyond its outputs; its tiles have some rows, and all columns or a window of them."""

    fixed: int
    row: int  # for each row of a tile: copies of hidden states, sums
    column: int  # for each column of a window: copies of weights, sums
    element: int  # for each element of a tile: products of both heads, gradients

    def bytes(self, rows: int, window: int, columns: int) -> int:
        """Returns the bytes for tiles of rows x columns; a window of these columns' weights is copied at once."""
        return self.fixed + self.row * rows + self.column * window + self.element * rows * padded(columns)


class Tile(NamedTuple):
    rows: int
    window: int


LEAST_TILE = Tile(16, 64)  # calls of smaller ones would take longer than their products


def _text(size: int) -> str:
    """Returns bytes as the library writes them, such as "27050240 bytes (25.8 MiB)", with the MiB rounded up."""
    text = f"{size} byte{'' if size == 1 else 's'}"
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{text} ({math.ceil(10 * size / unit) / 10:.1f} {name})"
    return text


def check(budget: int, least: int) -> None:
    """Raises BudgetTooSmallError for a budget below the least that works."""
    if 0 < budget < least:
        message = f"max_workspace_bytes: expected at least {_text(least)} for this problem, got {_text(budget)}"
        raise BudgetTooSmallError(message, required_bytes=least)


def _limit(budget: int, device: str, costs: Costs, least: int) -> int:
    """Returns the bytes that a pass may take."""
    check(budget, least)
    return budget or max(least, costs.fixed + MOST_BYTES[device])


def least_of_whole_rows(costs: Costs, columns: int) -> int:
    return costs.bytes(1, 1, columns)


def least_of_windows(costs: Costs, rows: int, columns: int, all_rows: bool = False) -> int:
    """Returns the least bytes for tiles of windows. all_rows: whether tiles have all rows."""
    window = min(columns, LEAST_TILE.window)
    return costs.bytes(rows if all_rows else min(rows, LEAST_TILE.rows), window, window)


def least_of_kept_logits(costs: Costs, rows: int, columns: int, device: str) -> int:
    """Returns the least bytes for gradients that are made with the values, from whole rows of kept logits."""
    return costs.bytes(min(rows, LEAST_ROWS[device]), 1, columns)


def whole_rows(costs: Costs, rows: int, columns: int, budget: int, device: str) -> Tile:
    """Returns tiles of as many whole rows as fit. budget: 0 allows as much as is useful."""
    limit = _limit(budget, device, costs, least_of_whole_rows(costs, columns))
    window = columns
    if costs.column > 0:  # a quarter is for copies of weights, the rest for rows
        left = limit - costs.bytes(1, 0, columns)
        window = max(1, min(columns, left // costs.column, (limit - costs.fixed) // (4 * costs.column)))
    fitting = (limit - costs.fixed - costs.column * window) // (costs.row + costs.element * padded(columns))
    return Tile(max(1, min(rows, fitting)), window)


def _half(size: int, unit: int) -> int:
    """Returns half of a size, rounded up to whole units."""
    return -(-size // (2 * unit)) * unit


def windows(costs: Costs, rows: int, columns: int, budget: int, device: str, all_rows: bool = False) -> Tile:
    """Returns tiles of windows of columns, with about as many rows as columns. all_rows: whether tiles have all rows.

    On CUDA there are as few windows as fit, of equal size: each window reads and writes the sums of the hidden states'
    gradient once. On the CPU that gains nothing.
    """
    limit = _limit(budget, device, costs, least_of_windows(costs, rows, columns, all_rows))
    least_rows = rows if all_rows else LEAST_TILE.rows
    tile = Tile(rows, columns)
    while costs.bytes(tile.rows, tile.window, tile.window) > limit:
        if tile.rows > least_rows and (tile.rows > tile.window or tile.window <= LEAST_TILE.window):
            tile = Tile(_half(tile.rows, LEAST_TILE.rows), tile.window)
        else:
            tile = Tile(tile.rows, _half(tile.window, LEAST_TILE.window))
    if device == "cpu" or tile.window == columns:
        return tile
    unit = LEAST_TILE.window
    most = (limit - costs.fixed - costs.row * tile.rows) // (costs.column + costs.element * tile.rows) // unit * unit
    count = -(-columns // most)
    return Tile(tile.rows, min(columns, -(-columns // (count * unit)) * unit))
