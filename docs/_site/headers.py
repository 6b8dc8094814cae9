"""The pages of the C and the C++ header, from Doxygen's reading of them.

The headers have plain comments, which a filter turns into Doxygen's on the way: ``headers.py FILE`` is that filter.
What Doxygen finds becomes Markdown here, so that these pages look and link like all others.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include" / "logitless"
OPTIONS = """
INPUT = {include}
OUTPUT_DIRECTORY = {folder}
INPUT_FILTER = "{python} {filter}"
FILE_PATTERNS = *.h *.hpp
GENERATE_XML = YES
GENERATE_HTML = NO
GENERATE_LATEX = NO
EXTRACT_ALL = YES
MARKDOWN_SUPPORT = NO
AUTOLINK_SUPPORT = NO
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
PREDEFINED = LOGITLESS_API= __cplusplus
QUIET = YES
WARN_IF_UNDOCUMENTED = NO
WARN_IF_INCOMPLETE_DOC = NO
WARN_AS_ERROR = YES
"""


def documented(source: str) -> str:
    """Plain comments as Doxygen's: behind code they are of what is before them, else of what follows.

    The opening comment stays as it is: it is shown as it stands.
    """
    opening = len(re.match(r"(/\*[\s\S]*?\*/|(//.*\n)*)", source)[0])  # type: ignore[index]
    return source[:opening] + _documented(source[opening:])


def _documented(source: str) -> str:
    lines = []
    before = ""  # of the comment that a line of // goes on with
    for line in source.split("\n"):
        code, slashes, _ = line.partition("//")
        if slashes:
            mark = "///<" if code.strip() else before or "///"
            before = mark if mark == "///" else ""
            line = line.replace("//", mark, 1)
        else:
            before = ""
            line = re.sub(r"^(\s*)/\*(?!\*)", r"\1/**", line)
            line = re.sub(r"(\S.*?)/\*(?!\*)", r"\1/**<", line)
        lines.append(line)
    return "\n".join(lines)


def text_of(element: ElementTree.Element | None) -> str:
    """A description as one line of Markdown."""
    if element is None:
        return ""
    text = re.sub(r"\s+", " ", " ".join("".join(part.itertext()) for part in element)).strip()
    return re.sub(r"([*_<>|\[\]])", r"\\\1", text)


def description(element: ElementTree.Element) -> str:
    parts = (text_of(element.find("briefdescription")), text_of(element.find("detaileddescription")))
    return " ".join(part for part in parts if part)


def type_of(element: ElementTree.Element) -> str:
    kind = element.find("type")
    return "" if kind is None else re.sub(r"\s+([*&])", r"\1", "".join(kind.itertext()).strip())


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(r) + " |" for r in rows),
        "",
    ]


def enumeration(member: ElementTree.Element) -> list[str]:
    rows, number = [], -1
    for value in member.findall("enumvalue"):
        given = (value.findtext("initializer") or "").lstrip("= ")
        number = int(given) if re.fullmatch(r"-?\d+", given) else number + 1
        shown = given if given and not re.fullmatch(r"-?\d+", given) else str(number)
        rows.append((f"`{value.findtext('name')}`", f"`{shown}`", description(value)))
    return ["", f"### {member.findtext('name')}", "", description(member), *table(("Name", "Value", "Meaning"), rows)]


def declaration(member: ElementTree.Element) -> str:
    template = member.find("templateparamlist")
    before = ""
    if template is not None:
        before = f"template <{', '.join(type_of(param) for param in template.findall('param'))}>\n"
    kind = "" if member.get("kind") == "define" else type_of(member)
    return before + f"{kind} {member.findtext('name')}{member.findtext('argsstring') or ''}".strip() + ";"


def function(member: ElementTree.Element) -> list[str]:
    said = description(member)
    for item in member.iter("parameteritem"):  # comments of single parameters
        name, meaning = (
            "".join(item.find("parameternamelist").itertext()).strip(),
            text_of(item.find("parameterdescription")),
        )
        said = said.replace(text_of(item), "").strip() + f" `{name}`: {meaning}."
    return ["", f"### {member.findtext('name')}", "", "```signature", declaration(member), "```", "", said.strip()]


def fields(compound: ElementTree.Element) -> list[str]:
    rows = []
    for member in compound.iter("memberdef"):
        if member.get("kind") == "variable" and member.get("prot") == "public":
            what = f"{type_of(member)}{member.findtext('argsstring') or ''}"
            rows.append((f"`{member.findtext('name')}`", f"`{what}`", description(member)))
    return table(("Field", "Type", "Meaning"), rows) if rows else []


def compounds(folder: pathlib.Path, kinds: tuple[str, ...]) -> Iterator[ElementTree.Element]:
    """In the order of the header."""
    found = [ElementTree.parse(path).getroot().find("compounddef") for path in sorted(folder.glob("xml/*.xml"))]
    known = [item for item in found if item is not None and item.get("kind") in kinds]

    def line(item: ElementTree.Element) -> int:
        place = item.find("location")
        return int(place.get("line", "0")) if place is not None else 0

    return iter(sorted(known, key=line))


def members(compound: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [member for member in compound.iter("memberdef") if member.get("kind") == kind]


def opening_comment(name: str) -> str:
    """The comment that a header begins with, as it stands."""
    source = (INCLUDE / name).read_text()
    if source.startswith("/*"):
        return "\n".join(line[3:] for line in source[: source.index("*/")].split("\n"))
    return "\n".join(line[3:] for line in source[: source.index("#pragma")].split("\n"))


def page(title: str, name: str, before: str) -> list[str]:
    return [f"# {title}", "", before, "", "```text", opening_comment(name).strip("\n"), "```"]


def joined(lines: list[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def c_headers(folder: pathlib.Path) -> list[ElementTree.Element]:
    """logitless.h, then what stands beside it."""
    files = [item for item in compounds(folder, ("file",)) if (item.findtext("compoundname") or "").endswith(".h")]
    return sorted(files, key=lambda item: item.findtext("compoundname") != "logitless.h")


def c_page(folder: pathlib.Path) -> str:
    files = c_headers(folder)
    lines = page(
        "The C headers", "logitless.h", "`#include <logitless/logitless.h>`. Plain C11; link with `-llogitless`."
    )
    for file in files:
        name = file.findtext("compoundname") or ""
        lines += ["", f"## Functions of {name}", ""]
        if file is not files[0]:
            lines += ["```text", opening_comment(name).strip("\n"), "```"]
        for member in members(file, "function"):
            lines += function(member)
    lines += ["", "## Structs"]
    for compound in compounds(folder, ("struct",)):
        name = compound.findtext("compoundname") or ""
        if "::" not in name:
            lines += ["", f"### {name}", "", description(compound), *fields(compound)]
    lines += ["", "## Enumerations"]
    for member in (member for file in files for member in members(file, "enum")):
        lines += enumeration(member)
    lines += ["", "## Types and numbers"]
    for member in (member for file in files for member in members(file, "typedef")):
        if "struct" not in type_of(member) and "enum" not in type_of(member):
            declared = ["```signature", member.findtext("definition") or "", "```"]
            lines += ["", f"### {member.findtext('name')}", "", *declared, "", description(member)]
    rows = []
    for member in (member for file in files for member in members(file, "define")):
        if member.findtext("initializer") and member.findtext("name") != "LOGITLESS_API":
            rows.append((f"`{member.findtext('name')}`", f"`{member.findtext('initializer')}`", description(member)))
    return joined([*lines, *table(("Name", "Value", "Meaning"), rows)])


def cpp_page(folder: pathlib.Path) -> str:
    before = (
        "`#include <logitless/logitless.hpp>`. C++20, header-only, over the C header; all is in `namespace logitless`."
    )
    lines = page("The C++ header", "logitless.hpp", before)
    space = next(i for i in compounds(folder, ("namespace",)) if (i.findtext("compoundname") or "").endswith("v0_1"))
    lines += ["", "## Classes"]
    for compound in compounds(folder, ("struct", "class")):
        name = compound.findtext("compoundname") or ""
        short = name.rpartition("::")[2]
        if "::" not in name or compound.get("prot") == "private" or name.count("::") > space_depth(space):
            continue
        bases = ", ".join(f"`{base.text}`" for base in compound.findall("basecompoundref"))
        lines += [
            "",
            f"### {short}",
            "",
            f"Is a {bases}." if bases else "",
            "",
            description(compound),
            *fields(compound),
        ]
        for member in members(compound, "function"):
            if member.get("prot") == "public":
                lines += ["", "```signature", declaration(member), "```", "", description(member)]
    lines += ["", "## Functions"]
    for member in members(space, "function"):
        lines += function(member)
    lines += ["", "## Enumerations"]
    for member in members(space, "enum"):
        lines += enumeration(member)
    return joined(lines)


def space_depth(space: ElementTree.Element) -> int:
    return (space.findtext("compoundname") or "").count("::") + 1


def read_headers(folder: pathlib.Path) -> None:
    """Runs Doxygen into ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    folder.mkdir(parents=True)
    options = OPTIONS.format(include=INCLUDE, folder=folder, python=sys.executable, filter=__file__)
    done = subprocess.run(["doxygen", "-"], input=options, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"doxygen: {done.stderr}")


if __name__ == "__main__":
    sys.stdout.write(documented(pathlib.Path(sys.argv[1]).read_text()))
