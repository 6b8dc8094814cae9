"""Doxygen's filter for the public headers, whose comments have no Doxygen marks: comments.py FILE

A comment behind code describes that code, any other comment the code that follows. The opening comment describes the
file and is shown verbatim; that of logitless.h is also the first page.
"""

import pathlib
import re
import sys

FIRST_PAGE = "logitless.h"
GUIDE = 'Programs are in <a href="../../c_and_cpp.html">C, C++ and the command line</a>.'


def documented(name: str, source: str) -> str:
    opening = re.match(r"/\*([\s\S]*?)\*/|((?://.*\n)*)", source)
    assert opening
    comment = re.sub(r"^ ?(\*|//)? ?", "", opening[1] or opening[2], flags=re.MULTILINE).strip("\n")
    text = f"\\verbatim\n{comment}\n\\endverbatim"
    first = f"/** \\mainpage {name}\n{GUIDE}\n{text} */\n" if name == FIRST_PAGE else ""
    return f"{first}/** \\file\n{text} */\n{_marked(source[opening.end() :])}"


def _marked(source: str) -> str:
    lines = []
    before = ""  # the mark of the comment that the next line of // continues
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
    # Doxygen 1.9 would link to private structs, whose pages it does not make.
    return re.sub(
        r"^ private:\n([\s\S]*?)(?=^};)", r"/** \\cond */\n\1/** \\endcond */\n", "\n".join(lines), flags=re.M
    )


if __name__ == "__main__":
    path = pathlib.Path(sys.argv[1])
    sys.stdout.write(documented(path.name, path.read_text()))
