"""What a study found: one cell a key, written again after each, so that a run that is cut off goes on from there."""

from __future__ import annotations

import json
import os
import pathlib
import threading
from typing import Any

Cell = dict[str, Any]
FINAL = ("ok", "out of memory", "refused")  # what else a cell may be is tried again by the next call


class StudyRecord:
    """``sessions`` say when, where and how the cells were measured; a cell's ``session`` is an index into them."""

    def __init__(self, study: str, path: pathlib.Path | None = None) -> None:
        self.study, self.path = study, path
        self.sessions: list[dict[str, str]] = []
        self.cells: dict[str, Cell] = {}
        self._lock = threading.Lock()
        if path is not None and path.is_file():
            content = json.loads(path.read_text())
            if content["study"] != study:
                raise ValueError(f"--record: expected a record of {study}, got one of {content['study']}: {path}")
            self.sessions, self.cells = content["sessions"], content["cells"]

    def begin(self, about: dict[str, str]) -> None:
        self.sessions.append(about)

    def final(self, key: str) -> bool:
        return self.cells.get(key, {}).get("status") in FINAL

    def ok(self, key: str) -> Cell | None:
        """The cell, if it was measured."""
        cell = self.cells.get(key)
        return cell if cell is not None and cell["status"] == "ok" else None

    def put(self, key: str, cell: Cell) -> None:
        self.cells[key] = cell | {"session": len(self.sessions) - 1}
        self.save()

    def save(self) -> None:
        if self.path is None:
            return
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_name(self.path.name + ".part")
            content = {"study": self.study, "sessions": self.sessions, "cells": dict(self.cells)}
            partial.write_text(json.dumps(content, indent=1) + "\n")
            os.replace(partial, self.path)

    def about(self) -> list[str]:
        """A line a session: date, device, versions and command."""
        names = ("date", "device", "torch", "packages")
        used = {cell.get("session") for cell in self.cells.values()}
        return [
            ", ".join(session[name] for name in names if session.get(name)) + f": `{session.get('command', '')}`"
            for index, session in enumerate(self.sessions)
            if index in used
        ]
