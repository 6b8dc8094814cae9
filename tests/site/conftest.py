import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(pathlib.Path(__file__).parent), str(ROOT / "python")]

for variable, places in {
    "LOGITLESS_LIBRARY": ("build/src/liblogitless.so", "build/test/src/liblogitless.so"),
    "LOGITLESS_CLI": ("build/cli/logitless", "build/test/cli/logitless"),
}.items():
    existing = [str(ROOT / place) for place in places if (ROOT / place).exists()]
    if existing:
        os.environ.setdefault(variable, existing[0])
