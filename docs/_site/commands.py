"""Makes the page of the command line from the ``--help`` of every command."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def executable() -> str:
    """Returns LOGITLESS_CLI, or the command line of a build in this folder."""
    for place in (os.environ.get("LOGITLESS_CLI"), ROOT / "build/cli/logitless", ROOT / "build/test/cli/logitless"):
        if place and shutil.which(place):
            return str(place)
    raise SystemExit("no logitless command line: build it, or name it in LOGITLESS_CLI")


def help_of(command: list[str], **more: str) -> str:
    environment = os.environ | more
    done = subprocess.run([*command, "--help"], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def page() -> str:
    first = help_of([executable()])
    names = re.findall(r"^  ([a-z]+) {2,}", first[first.index("Subcommands:") :].split("\n\n")[0], re.MULTILINE)
    helps = {"logitless": first}
    # The command `model` is Python's, which comes last.
    helps |= {f"logitless {name}": help_of([executable(), name]) for name in names if name != "model"}
    sections = "\n".join(f"## {title}\n\n```text\n{text}\n```\n" for title, text in helps.items())
    model = help_of([sys.executable, "-m", "logitless.cost_model"], PYTHONPATH=str(ROOT / "python"), COLUMNS="110")
    return f"""# The command line

A build has it as `build/cli/logitless`, a wheel as `logitless` and `python -m logitless`.
Every command takes `--json`. Sizes are written `256MiB` or `1GB`.
[C, C++ and the command line](../c_and_cpp.md) shows examples.

{sections}
## logitless model

Part of the Python package; also `python -m logitless.cost_model`:
[a model of cost](../cost_model.md).

```text
{model}
```
"""
