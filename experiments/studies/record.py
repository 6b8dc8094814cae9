"""Records of a study: one cell a key, written again after each, so that a run that is cut off goes on from there.

A record is JSON, compressed where its name ends in .xz: ``xzcat`` shows it.
"""

from __future__ import annotations

import json
import lzma
import os
import pathlib
import re
import threading
from collections.abc import Iterable
from typing import Any

Cell = dict[str, Any]
FINAL = ("ok", "out of memory", "refused")  # what else a cell may be is tried again by the next call
MINUTES = re.compile(r" --minutes \S+")
STARVED = ("no time left", "StepTimeout")  # how the reason of a row begins that had too little time


class SettingsDiffer(ValueError):
    """The record's figures were measured with other settings than those that are asked for."""


def plain(value: Any) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(value))


def read(path: pathlib.Path) -> dict[str, Any]:
    content = path.read_bytes()
    found: dict[str, Any] = json.loads(lzma.decompress(content) if path.suffix == ".xz" else content)
    return found


def write(path: pathlib.Path, content: dict[str, Any]) -> None:
    """As a whole or not at all. The bytes follow from the content alone."""
    text = (json.dumps(content, indent=1) + "\n").encode()
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME) if path.suffix == ".xz" else text)
    os.replace(partial, path)


def with_status(rows: list[dict[str, Any]], name: str) -> Cell:
    """Of a cell of rows, which ``name`` names: one that had too little time is measured again by the next call."""
    starved = [row[name] for row in rows if row["reason"].startswith(STARVED) and row["status"] != "ok"]
    names = ", ".join(dict.fromkeys(starved))
    return {"status": "partial", "reason": f"too little time for {names}"} if names else {"status": "ok"}


class StudyRecord:
    """``sessions`` say when, where and how the cells were measured; a cell's ``session`` is an index into them.
    ``settings`` are those of all cells."""

    def __init__(self, study: str, path: pathlib.Path | None = None) -> None:
        self.study, self.path = study, path
        self.settings: dict[str, Any] = {}
        self.sessions: list[dict[str, str]] = []
        self.cells: dict[str, Cell] = {}
        self._lock = threading.Lock()
        if path is not None and path.is_file():
            content = read(path)
            if content["study"] != study:
                raise ValueError(f"--record: expected a record of {study}, got one of {content['study']}: {path}")
            self.sessions, self.cells = content["sessions"], content["cells"]
            self.settings = content.get("settings", {})

    def begin(self, about: dict[str, str], settings: dict[str, Any] | None = None) -> None:
        """Raises SettingsDiffer where there are cells of other settings."""
        if self.cells:
            self.same(str(self.path), self.settings, settings or {})
        self.settings |= plain(settings or {})
        self.sessions.append(about)

    @staticmethod
    def same(what: str, found: dict[str, Any], asked: dict[str, Any]) -> None:
        asked = plain(asked)
        other = {name: value for name, value in found.items() if name in asked and asked[name] != value}
        if other:
            wanted = ", ".join(f"{name} {asked[name]}" for name in other)
            had = ", ".join(f"{name} {value}" for name, value in other.items())
            raise SettingsDiffer(f"{what}: expected {wanted}, got {had}: another --record keeps them apart")

    def check(self, key: str, settings: dict[str, Any]) -> None:
        """Raises SettingsDiffer where the cell holds figures of other settings."""
        if self.final(key) or self.holds(key):
            self.same(f"{self.path}: {key}", self.cells[key].get("settings", {}), settings)

    def final(self, key: str) -> bool:
        return self.cells.get(key, {}).get("status") in FINAL

    def ok(self, key: str) -> Cell | None:
        """The cell, if it was measured."""
        cell = self.cells.get(key)
        return cell if cell is not None and cell["status"] == "ok" else None

    def holds(self, key: str) -> Cell | None:
        """The cell, if it was measured as a whole or in part."""
        cell = self.cells.get(key)
        return cell if cell is not None and cell["status"] in ("ok", "partial") else None

    def keep(self, key: str, reason: str) -> None:
        """A cell that was measured in part, when going on with it failed."""
        self.cells[key] |= {"reason": reason}
        self.save()

    def put(self, key: str, cell: Cell) -> None:
        """With the call that measured it and, where it goes on from what others had (its ``sessions``), with all."""
        now = len(self.sessions) - 1
        calls = [*dict.fromkeys([*cell.get("sessions", []), now])]
        self.cells[key] = {name: value for name, value in cell.items() if name != "sessions"} | {"session": now}
        if len(calls) > 1:
            self.cells[key]["sessions"] = calls
        self.save()

    def save(self) -> None:
        if self.path is None:
            return
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = {"study": self.study, "settings": self.settings, "sessions": self.sessions}
            content["cells"] = dict(self.cells)
            write(self.path, content)

    def noted(self, key: str) -> bool:
        """Has a call that measured the cell a note?"""
        cell = self.cells[key]
        calls = (*cell.get("sessions", []), cell.get("session"))
        return any(call is not None and bool(self.sessions[call].get("note")) for call in calls)

    def about(self, keys: Iterable[str] | None = None, compared: bool = True) -> list[str]:
        """What measured cells of these keys (default: all): date, device, versions, a note of whoever ran it, and
        command. Calls that differ in their date and --minutes alone have one line, with the command of the last; and
        a warning where cells of several calls are ``compared``."""
        names = ("device", "torch", "packages", "note")
        cells = [self.cells[key] for key in (self.cells if keys is None else keys)]
        used = {index for cell in cells for index in (*cell.get("sessions", []), cell.get("session"))}
        calls = [session for index, session in enumerate(self.sessions) if index in used]
        alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for call in calls:
            facts = ", ".join(call[name] for name in names if call.get(name))
            alike.setdefault((facts, MINUTES.sub("", call.get("command", ""))), []).append(call)
        lines = [
            f"{', '.join([*(call.get('date', '') for call in group), facts])}: `{group[-1].get('command', '')}`"
            for (facts, _), group in alike.items()
        ]
        if compared and len(calls) > 1:
            lines.append(f"Its figures are of {len(calls)} calls: times compare less well than within one.")
        return lines
