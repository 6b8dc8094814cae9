"""The command line, as ``python -m logitless`` and as the script ``logitless``."""

from __future__ import annotations

import os
import sys

from . import native


def main() -> int:
    """Replaces this process by the program in this package's folder ``bin``; ``logitless model`` runs in Python."""
    if sys.argv[1:2] == ["model"]:
        from .cost_model.command import main as model

        return model(sys.argv[2:])
    name = "logitless.exe" if sys.platform == "win32" else "logitless"
    for folder in native.package_folders():
        program = folder / "bin" / name
        if program.is_file():
            os.execv(program, ["logitless", *sys.argv[1:]])
    print(
        "logitless: this package was built without the command line: install CLI11 and nlohmann-json "
        "(Debian: libcli11-dev, nlohmann-json3-dev) and the package again",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
