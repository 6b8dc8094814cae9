"""Records of the studies: figures by cell, and the calls that measured them. ``xzcat`` shows one."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterable
from typing import Any

from record import read_json

ROOT = pathlib.Path(__file__).resolve().parents[3]
FOLDER = ROOT / "bench" / "records" / "studies"
Cell = dict[str, Any]


class Study:
    """Cells that were measured, as a whole or in part. A cell's ``session`` is an index into the calls."""

    def __init__(self, path: pathlib.Path) -> None:
        content = read_json(path)
        self.sessions: list[dict[str, str]] = content["sessions"]
        self.cells: dict[str, Cell] = {
            key: cell for key, cell in content["cells"].items() if cell["status"] in ("ok", "partial")
        }

    def under(self, prefix: str) -> dict[str, Cell]:
        """The cells whose keys begin so, by the rest of the key."""
        return {key.removeprefix(prefix): cell for key, cell in self.cells.items() if key.startswith(prefix)}

    def sources(self, cells: Iterable[Cell], compared: bool = True) -> list[str]:
        """Dates, device and versions of the calls that measured these; a warning where several are ``compared``."""
        used = {index for cell in cells for index in (*cell.get("sessions", []), cell["session"])}
        alike: dict[str, dict[str, None]] = {}
        for call in (self.sessions[index] for index in sorted(used)):
            facts = ", ".join(call[name] for name in ("device", "torch", "packages", "note") if call.get(name))
            alike.setdefault(facts, {})[call["date"]] = None
        lines = [f"{', '.join(dates)}, {facts}" for facts, dates in alike.items()]
        if compared and len(used) > 1:
            lines.append(f"Its figures are of {len(used)} calls: times compare less well than within one.")
        return ["", *(f"- {line}" for line in lines)]


@functools.cache
def study(name: str) -> Study:
    return Study(FOLDER / f"{name}.json.xz")
