"""Documents from the user's own files, or the Python sources of the installed packages."""

from __future__ import annotations

import hashlib
import lzma
import pathlib
import random
import site
import sys
from collections.abc import Iterator

SUFFIXES = (".py", ".pyi", ".txt", ".md", ".rst", ".c", ".h", ".cpp", ".cu", ".js", ".java", ".rs", ".go")
MOST_BYTES = 1_000_000  # larger source files are data, not text
PIECE_BYTES = 65536  # a book is cut into documents of about this size
VALIDATION_SHARE = 50  # one document in this many, chosen by its content


def default_folders() -> list[pathlib.Path]:
    """Returns the standard library and the packages of this interpreter."""
    folders = [*site.getsitepackages(), str(pathlib.Path(random.__file__).parent)]
    return [path for path in dict.fromkeys(map(pathlib.Path, folders)) if path.is_dir()]


def _files(path: pathlib.Path) -> Iterator[pathlib.Path]:
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise ValueError(f"--text: expected a file or a folder, got {path}")
    suffixes = SUFFIXES if path not in default_folders() else (".py",)
    for file in sorted(path.rglob("*")):
        if file.suffix in suffixes and file.is_file() and file.stat().st_size <= MOST_BYTES:
            yield file


def _pieces(text: str) -> Iterator[str]:
    """Cuts text at ends of lines."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE_BYTES) + 1 or len(text)
        yield text[start:end]
        start = end


def _read(file: pathlib.Path) -> str | None:
    """Returns a file's text, or None if it is not UTF-8."""
    data = lzma.open(file).read() if file.suffix == ".xz" else file.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class Documents:
    """Documents without duplicates, in an order given by the seed, with the validation set apart."""

    def __init__(self, paths: list[pathlib.Path], megabytes: float, seed: int) -> None:
        seen: set[bytes] = set()
        pieces: list[tuple[bytes, str]] = []
        for path in paths or default_folders():
            for file in _files(path):
                text = _read(file)
                for piece in _pieces(text) if text else ():
                    digest = hashlib.sha256(piece.encode()).digest()
                    if digest not in seen:
                        seen.add(digest)
                        pieces.append((digest, piece))
        pieces.sort(key=lambda item: hashlib.sha256(item[0] + seed.to_bytes(8, "little")).digest())
        self.train: list[str] = []
        self.validation: list[str] = []
        size = 0
        for digest, piece in pieces:
            if size >= megabytes * 1e6:
                break
            size += len(piece.encode())
            chosen = int.from_bytes(digest[:8], "little") % VALIDATION_SHARE == 0
            (self.validation if chosen else self.train).append(piece)
        self.size = size
        if not self.train or not self.validation:
            raise ValueError(f"--text: expected some megabytes of text, got {size} bytes in {len(pieces)} documents")

    def summary(self) -> str:
        counts = f"{len(self.train)} documents to train on, {len(self.validation)} to validate"
        return f"{counts}, {self.size / 1e6:.1f} MB (Python {sys.version.split()[0]})"
