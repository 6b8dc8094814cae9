"""Tests of logitless.compat; none of the other libraries needs to be installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
