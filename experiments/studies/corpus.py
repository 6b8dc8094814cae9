"""The text of the studies, tokenized without a GPU: text to train on, WikiText-2 to validate, GSM8K to fine-tune on."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from text import Documents
from tokens import Data, encode, load, load_tokens, save_tokens
from tokens import prepare as prepare_tokens

VOCAB = 32768  # of the minimum viable experiment
Ids = NDArray[np.uint32]


class Instructions(NamedTuple):
    """Questions and answers, one after the other; ``answered`` is 1 where a token is to be predicted."""

    ids: Ids
    answered: Ids


def prepare(
    folder: pathlib.Path,
    text: list[pathlib.Path],
    wikitext: pathlib.Path | None,
    instructions: pathlib.Path | None,
    vocab: int = VOCAB,
    tokens: int = 1000 * 16384 + 1,
    megabytes: float = 180.0,
) -> dict[str, Any]:
    """A byte-level BPE of that many entries, trained on the text, and all token files."""
    about = prepare_tokens(folder, Documents(text, megabytes, seed=0), vocab, tokens, 16 * 16384 + 1)
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if wikitext is not None:
        ids = encode(tokenizer, [wikitext.read_text()], 1 << 30)
        save_tokens(folder / "wikitext2.npy.xz", ids)
        about["wikitext2"] = {"tokens": len(ids)}
    if instructions is not None:
        found = encode_instructions(tokenizer, instructions)
        save_tokens(folder / "instructions.npy.xz", found.ids)
        save_tokens(folder / "answered.npy.xz", found.answered)
        share = float(found.answered.mean())
        about["instructions"] = {"tokens": len(found.ids), "of answers": round(share, 3)}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    return about


def encode_instructions(tokenizer: Any, path: pathlib.Path) -> Instructions:
    """Lines of JSON with ``question`` and ``answer``; id 0 ends each."""
    ids: list[int] = []
    answered: list[int] = []
    for line in path.read_text().splitlines():
        item = json.loads(line)
        question = tokenizer.encode(f"Question: {item['question']}\nAnswer: ").ids
        answer = [*tokenizer.encode(item["answer"]).ids, 0]
        ids += question + answer
        answered += [0] * len(question) + [1] * len(answer)
    return Instructions(np.asarray(ids, np.uint32), np.asarray(answered, np.uint32))


@functools.cache
def load_data(folder: pathlib.Path | None) -> Data:
    if folder is None:
        raise SystemExit("--data: expected a folder that prepare wrote, got none")
    return load(folder)


def load_wikitext(folder: pathlib.Path) -> Ids:
    return load_tokens(folder / "wikitext2.npy.xz")


def load_instructions(folder: pathlib.Path) -> Instructions:
    return Instructions(*(load_tokens(folder / f"{name}.npy.xz") for name in ("instructions", "answered")))
