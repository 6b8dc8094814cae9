"""The tables of docs/studies: each stands between two comments that name it, and is made of the records."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from studies import PAGES, PLOTS, fine_tables, paper_tables, rnn_tables, seed_tables

Table = Callable[[], list[str]]
TABLES: dict[str, dict[str, Table]] = {
    "papers.md": paper_tables.TABLES,
    "linear_rnn.md": rnn_tables.TABLES,
    "accumulation.md": rnn_tables.ACCUMULATION,
    "fine_tuning.md": fine_tables.TABLES | seed_tables.TABLES,
}


def with_tables(page: pathlib.Path, text: str) -> str:
    for name, table in TABLES[page.name].items():
        before, after = f"<!-- {name} -->\n\n", f"\n\n<!-- /{name} -->"
        head, _, rest = text.partition(before)
        _, found, tail = rest.partition(after)
        if not found:
            raise SystemExit(f"{page}: expected {before.strip()} and {after.strip()}")
        text = head + before + "\n".join(table()).strip() + after + tail
    return text


def write(check: bool) -> None:
    for name in TABLES:
        page = PAGES / name
        text = page.read_text()
        made = with_tables(page, text)
        if check and made != text:
            raise SystemExit(f"{page}: tables differ from the records; python experiments/study.py pages writes them")
        if not check:
            page.write_text(made)
    if not check:
        for path in [*fine_tables.draw(PLOTS), *rnn_tables.draw(PLOTS)]:
            print(f"plot: {path}")
