"""Finds the package for tests, when it is imported.

With LOGITLESS_LIBRARY set, it is this tree's Python over that library. Otherwise it is the installed package, even an
editable one. Without either it is this tree's Python over a library built here.
"""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not os.environ.get("LOGITLESS_LIBRARY") and importlib.util.find_spec("logitless") is None:
    builds = [ROOT / "build" / name / "src" / "liblogitless.so" for name in ("test", "dev", "quick")]
    newest = max((path for path in builds if path.exists()), key=lambda path: path.stat().st_mtime, default=None)
    if newest is not None:
        os.environ["LOGITLESS_LIBRARY"] = str(newest)
if os.environ.get("LOGITLESS_LIBRARY"):
    sys.path.insert(0, str(ROOT / "python"))
