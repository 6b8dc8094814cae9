"""The page of the command line: what ``--help`` of every command says."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def executable() -> str:
    """LOGITLESS_CLI, or the command line of a build in this folder."""
    for place in (os.environ.get("LOGITLESS_CLI"), ROOT / "build/cli/logitless", ROOT / "build/test/cli/logitless"):
        if place and shutil.which(place):
            return str(place)
    raise SystemExit("no logitless command line: build it, or name it in LOGITLESS_CLI")


def help_of(*words: str) -> str:
    done = subprocess.run([executable(), *words, "--help"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def help_of_model() -> str:
    """Of the one command that is Python's."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "python"), COLUMNS="110")
    command = [sys.executable, "-m", "logitless.cost_model", "--help"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def page() -> str:
    first = help_of()
    names = re.findall(r"^  ([a-z]+) {2,}", first[first.index("Subcommands:") :].split("\n\n")[0], re.MULTILINE)
    lines = [
        "# The command line",
        "",
        "After a build it is `build/cli/logitless`; a wheel brings it as `logitless` and `python -m logitless`.",
        "Every command takes `--json`; sizes are written `256MiB` or `1GB`.",
        "[C, C++ and the command line](../c_and_cpp.md) shows uses.",
    ]
    for words in [(), *((name,) for name in names if name != "model")]:  # Python's, below
        lines += ["", f"## {' '.join(('logitless', *words))}", "", "```text", help_of(*words), "```"]
    lines += [
        "",
        "## logitless model",
        "",
        "Of the Python package alone, there also as `python -m logitless.cost_model`:",
    ]
    lines += ["[a model of cost](../cost_model.md).", "", "```text", help_of_model(), "```"]
    return "\n".join(lines) + "\n"
