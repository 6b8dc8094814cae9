"""Hooks of MkDocs.

They make the pages of the command line and of files in the repository's root. They have Doxygen make the pages of the
headers, and add the planner. Links to files outside of docs/ become these files' names.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import commands  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARTS = ROOT / "build" / "site-parts"  # made by scripts/site before; it has planner/ if the planner can be built
HEADERS = "reference/headers"  # folder of Doxygen's pages
MADE_OF = {
    path.relative_to(ROOT).as_posix(): f"{HEADERS}/{path.name.replace('.', '_8')}.html"
    for path in (ROOT / "include" / "logitless").glob("*.h*")
}
NO_PLANNER = "<!doctype html><title>Planner</title><p>This copy of the site was built without the planner.</p>\n"


def of_root(name: str) -> str:
    """Returns a Markdown file of the repository's root, with its links as seen from docs/.

    The site loads nothing from elsewhere, so badges are left out.
    """
    text = re.sub(r"!\[[^\]]*\]\(https://img\.shields\.io/[^)]*\) ?", "", (ROOT / name).read_text())
    return re.sub(r"\]\((?!https?:|#)(docs/)?", lambda m: "](" if m[1] else "](../", text)


def run_doxygen(folder: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # pages of an earlier run
    folder.mkdir(parents=True)
    options = (ROOT / "docs" / "_site" / "Doxyfile").read_text()
    options += f'OUTPUT_DIRECTORY = "{folder}"\nINPUT_FILTER = "{sys.executable} docs/_site/comments.py"\n'
    done = subprocess.run(["doxygen", "-"], input=options, text=True, capture_output=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"doxygen: {done.stderr}")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    run_doxygen(PARTS / HEADERS)
    made = {
        "index.md": of_root("README.md"),
        "reference/command_line.md": commands.page(),
        "changelog.md": of_root("CHANGELOG.md"),
        "contributing.md": of_root("CONTRIBUTING.md"),
    }
    if not (PARTS / "planner" / "index.html").exists():
        made["planner/index.html"] = NO_PLANNER
    for path in (path for part in ("planner", HEADERS) for path in (PARTS / part).rglob("*") if path.is_file()):
        name = path.relative_to(PARTS).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.INCLUDED))
    for name, content in made.items():
        files.append(File.generated(config, name, content=content, inclusion=InclusionLevel.INCLUDED))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces links to files that are no pages by links to the page made from the file, or by its `path`.

    The files must exist.
    """
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def shown(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            raise SystemExit(f"{page.file.src_uri}: {match[2]} is not there")
        name = target.relative_to(ROOT).as_posix()
        if name in MADE_OF:
            return f"[{match[1]}]({os.path.relpath(ROOT / 'docs' / MADE_OF[name], folder)}{match[3] or ''})"
        return f"`{name}`"

    return re.sub(r"(?<!!)\[([^\]]*)\]\((\.\.?/[^)#]*)(#[^)]*)?\)", shown, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Removes the reStructuredText of docstrings: roles before names, and the double colon before formulas."""
    return re.sub(r"::</p>", ":</p>", re.sub(r":(?:func|class|mod|meth|data):(?=<code>)", "", html))
