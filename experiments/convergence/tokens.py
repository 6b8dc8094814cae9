"""The tokenizer, trained on the given documents, and the token files of ``prepare``.

A token file is a numpy array of uint32 ids under xz. It takes about one and a half bytes per token.
"""

from __future__ import annotations

import json
import lzma
import pathlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from text import Documents

END_OF_DOCUMENT = "<|end|>"  # id 0
BATCH = 512  # documents encoded at once

# Ids are words of 4 bytes, and LZMA's contexts follow the position within the word.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 2, "lp": 2, "pb": 2}]


class Data(NamedTuple):
    """Token ids of one ``prepare``."""

    train: NDArray[np.uint32]
    validation: NDArray[np.uint32]
    vocab: int


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise SystemExit(
            "prepare needs the package tokenizers (pip install tokenizers), which is not installed; training from a "
            "folder that was prepared elsewhere does not"
        ) from error
    return tokenizers


def train_tokenizer(documents: list[str], vocab: int) -> Any:
    """Trains a byte-level BPE of at most ``vocab`` entries."""
    t = _tokenizers()
    tokenizer = t.Tokenizer(t.models.BPE())
    tokenizer.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = t.decoders.ByteLevel()
    trainer = t.trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=t.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    return tokenizer


def encode(tokenizer: Any, documents: list[str], most: int) -> NDArray[np.uint32]:
    """Encodes the documents one after another, each followed by an end token, up to ``most`` ids."""
    parts: list[NDArray[np.uint32]] = []
    count = 0
    for start in range(0, len(documents), BATCH):
        if count >= most:
            break
        for encoding in tokenizer.encode_batch(documents[start : start + BATCH]):
            parts.append(np.asarray([*encoding.ids, 0], np.uint32))
            count += len(parts[-1])
    return np.concatenate(parts)[:most]


def save_tokens(path: pathlib.Path, ids: NDArray[np.uint32]) -> None:
    with lzma.open(path, "wb", filters=_FILTERS) as file:
        np.save(file, ids)


def load_tokens(path: pathlib.Path) -> NDArray[np.uint32]:
    if not path.is_file():
        raise SystemExit(f"--data: expected a folder that prepare made, got one without {path.name}: {path.parent}")
    with lzma.open(path) as file:
        ids: NDArray[np.uint32] = np.load(file)
    return ids


def prepare(folder: pathlib.Path, documents: Documents, vocab: int, train: int, validation: int) -> dict[str, Any]:
    """Trains the tokenizer, encodes, and writes the folder. Returns a summary of its contents."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(documents.train, vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    sets = {"train": (documents.train, train), "validation": (documents.validation, validation)}
    about: dict[str, Any] = {"vocab": vocab, "entries": tokenizer.get_vocab_size(), "text": documents.summary()}
    for name, (pieces, most) in sets.items():
        ids = encode(tokenizer, pieces, most)
        file = folder / f"{name}.npy.xz"
        save_tokens(file, ids)
        about[name] = {"tokens": len(ids), "bytes": file.stat().st_size}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    return about


def load(folder: pathlib.Path) -> Data:
    """Loads the output of ``prepare``.

    ``vocab`` is the requested size; a small text's tokenizer may have fewer entries.
    """
    train, validation = (load_tokens(folder / f"{name}.npy.xz") for name in ("train", "validation"))
    return Data(train, validation, json.loads((folder / "about.json").read_text())["vocab"])


def prepare_instructions(folder: pathlib.Path, path: pathlib.Path) -> dict[str, Any]:
    """Tokenizes questions and answers in sequence, with id 0 behind each.

    ``answered`` is 1 at tokens to be predicted.
    """
    tokenizer = _tokenizers().Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = []
    answered: list[int] = []
    for line in path.read_text().splitlines():
        item = json.loads(line)
        question = tokenizer.encode(f"Question: {item['question']}\nAnswer: ").ids
        answer = [*tokenizer.encode(item["answer"]).ids, 0]
        ids += question + answer
        answered += [0] * len(question) + [1] * len(answer)
    save_tokens(folder / "instructions.npy.xz", np.asarray(ids, np.uint32))
    save_tokens(folder / "answered.npy.xz", np.asarray(answered, np.uint32))
    return {"tokens": len(ids), "of answers": round(sum(answered) / len(ids), 3)}


def load_instructions(folder: pathlib.Path) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Loads ids, and which of them belong to answers."""
    return load_tokens(folder / "instructions.npy.xz"), load_tokens(folder / "answered.npy.xz")
