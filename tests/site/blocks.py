"""The code blocks of a page."""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
# Fences that hold no program. Pseudo-signatures are `signature`, output and trees are `text`.
NO_PROGRAM = {"text", "signature"}
KNOWN = {"python", "sh", "cpp", "diff", "cmake", *NO_PROGRAM}


class Block(NamedTuple):
    page: pathlib.Path
    line: int
    language: str
    text: str


def blocks(page: pathlib.Path) -> list[Block]:
    source = page.read_text()
    matches = re.finditer(r"^(`{3,})([^\n]*)\n(.*?)^\1 *$", source, re.MULTILINE | re.DOTALL)
    return [Block(page, source[: m.start()].count("\n") + 1, m[2].strip(), m[3]) for m in matches]


def of(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def name(block: Block) -> str:
    return f"{block.page.relative_to(ROOT)}:{block.line}"
