"""Checks the words of pages and comments: check_words.py ROOT [FILE...]

Prose is a page without code blocks, tables, HTML and link targets. With files, only these are checked, and their words
are printed.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

README_WORDS = 450
README_MEAN = 17  # words of a sentence
README_LONGEST = 35
GUIDE_LONGEST = 45
GUIDE_WORDS = 25_000  # in docs/ and CONTRIBUTING.md, without the glossary and the generated reference
PAGE = re.compile(r"docs/.*\.md|(?!CHANGELOG)[^/]*\.md")
NO_GUIDE = re.compile(r"docs/glossary\.md|docs/reference/|README\.md|SECURITY\.md")
SOURCES = (".c", ".cc", ".cpp", ".h", ".hpp", ".cu", ".cuh", ".def", ".py", ".js", ".cmake", "CMakeLists.txt")

# A comment on its own line or behind code that begins without its subject.
HEADLESS = re.compile(
    r"(?:^\s*(?://+|/\*\*?|\*|#|\"\"\")|\s\s(?://|#))\s?"
    r"(?:Of|What|The same|(?:Those|That) (?:of|that|which|in)) (?!.*\?)"
)
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
DATED = ("docs/results.md", "docs/limits.md", "docs/studies/")  # pages of figures, which date their measurements
# Words that no page has, and their replacements.
RULES = {
    r"\bas ever\b": "always",
    r"\bas a rule\b": "usually",
    r"\bat hand\b": "available",
    r"\btold\b": "reported, or output",
    r"\bby our reading\b": "the source, with a link",
    r", too[.,;:)]": "also, before the verb",
    r"\balso of\b": "including",
    r"\brefused by name\b": "raises an error, or is not supported",
    r"\basked for\b": "requested, wanted, or a target",
    r"\bthinn(?:ed|ing)\b": "sparsified",
    r"\bclassifier\b": "weight",
    r"\bbursts?\b": "after idle",
    r"\bsustained\b": "steady",
    r"\b3F\b|\b3 F\b": "three matmuls",
    r"\bof the order of\b": "about",
    r"(?:^|[.:] )(?:Of|What|The same) (?![^.]*\?)": "subject and verb first",
}


def prose(text: str) -> list[str]:
    """Returns the paragraphs of a page's prose."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^(```|~~~).*?^\1 *$", "\n", text, flags=re.S | re.M)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.S)
    lines = []
    for line in text.splitlines():
        bare = line.strip()
        if bare.startswith(("|", "#", "!!!", "???")) or (line.startswith("    ") and not lines[-1:] == ["item"]):
            lines.append("")
            continue
        item = re.match(r"(?:[-*+]|\d+\.) +", bare)
        if item:
            lines.append("")
            bare = bare[item.end() :]
        bare = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", bare)
        bare = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", bare)
        bare = re.sub(r"`[^`]*`", "CODE", bare)
        bare = re.sub(r"<[^>]+>", "", bare).replace("**", "").replace("*", "")
        lines.append(bare)
    return [p for p in (" ".join(part.split("\n")) for part in re.split(r"\n\s*\n", "\n".join(lines))) if p.strip()]


def sentences(paragraph: str) -> list[str]:
    return [s.strip() for s in re.split(r"(?<=[.!?:])\s+(?=[A-Z(])", paragraph) if re.search(r"\w", s)]


def words(text: str) -> list[str]:
    return re.findall(r"[\w'’./+-]*\w[\w'’./+-]*", text)


def check_page(name: str, text: str) -> tuple[list[str], int]:
    """Returns a page's problems and its number of words."""
    wrong, lengths = [], []
    for paragraph in prose(text):
        for sentence in sentences(paragraph):
            count = len(words(sentence))
            lengths.append(count)
            most = README_LONGEST if name == "README.md" else GUIDE_LONGEST
            if count > most:
                wrong.append(f"{name}: expected sentences of at most {most} words, got {count}: {sentence[:70]}...")
        for rule, instead in RULES.items():
            match = re.search(rule, paragraph)
            if match:
                around = paragraph[max(0, match.start() - 30) : match.end() + 30]
                wrong.append(f"{name}: expected {instead}, got {match[0].strip()!r}: {around}")
        if not name.startswith(DATED) and DATE.search(paragraph) and name != "README.md":
            wrong.append(f"{name}: expected no date in a guide, got {DATE.search(paragraph)[0]}")  # type: ignore[index]
    total = sum(lengths)
    if name == "README.md":
        mean = total / max(len(lengths), 1)
        if total > README_WORDS:
            wrong.append(f"{name}: expected at most {README_WORDS} words, got {total}")
        if mean > README_MEAN:
            wrong.append(f"{name}: expected at most {README_MEAN} words a sentence, got {mean:.1f}")
    return wrong, total


def check_comments(name: str, text: str) -> list[str]:
    return [
        f"{name}:{number}: expected a comment that begins with its subject, got {line.strip()[:70]}"
        for number, line in enumerate(text.splitlines(), 1)
        if HEADLESS.search(line)
    ]


def names_of(root: pathlib.Path) -> list[str]:
    """Returns files that git tracks or would add, or all files without git."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=root, text=True, capture_output=True)
    if done.returncode == 0:
        return done.stdout.splitlines()
    return [path.relative_to(root).as_posix() for path in root.rglob("*")]


def main() -> int:
    root, given = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    wrong: list[str] = []
    total = 0
    for name in given or names_of(root):
        path = root / name
        if not path.is_file():
            continue
        if name.endswith(SOURCES) or name.startswith("scripts/"):
            wrong += check_comments(name, path.read_text())
        elif PAGE.fullmatch(name):
            problems, count = check_page(name, path.read_text())
            wrong += problems
            total += 0 if NO_GUIDE.match(name) else count
            if given:
                print(f"{name}: {count} words")
    if not given and total > GUIDE_WORDS:
        wrong.append(f"docs: expected at most {GUIDE_WORDS} words of guides, got {total}")
    print(*wrong, sep="\n")
    print(f"{total} words of guides, {len(wrong)} findings")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
