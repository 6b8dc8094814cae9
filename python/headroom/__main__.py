"""The command line, as ``python -m headroom`` and as the script ``headroom``."""

from __future__ import annotations

import os
import sys

from . import _c


def main() -> int:
    """Becomes the program of this package's folder ``bin``; ``headroom model`` is Python's own."""
    if sys.argv[1:2] == ["model"]:
        from .cost_model.command import main as model

        return model(sys.argv[2:])
    name = "headroom.exe" if sys.platform == "win32" else "headroom"
    for folder in _c.package_folders():
        program = folder / "bin" / name
        if program.is_file():
            os.execv(program, ["headroom", *sys.argv[1:]])
    print(
        "headroom: this package was built without the command line: install CLI11 and nlohmann-json "
        "(Debian: libcli11-dev, nlohmann-json3-dev) and the package again",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
