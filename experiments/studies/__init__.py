"""Studies of whole training runs: what ``experiments/study.py`` runs, keeps as records and writes into docs/studies.

The files of bench/gpu (clocks, methods, tables) and of experiments/convergence (models, training) are used as they are.
"""

from __future__ import annotations

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDS = ROOT / "bench" / "records" / "studies"
PAGES = ROOT / "docs" / "studies"
PLOTS = ROOT / "docs" / "plots"

for folder in (ROOT / "experiments" / "convergence", ROOT / "bench" / "gpu"):  # of two run.py the latter's
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
if os.environ.get("LOGITLESS_LIBRARY") and str(ROOT / "python") not in sys.path:
    sys.path.insert(0, str(ROOT / "python"))
