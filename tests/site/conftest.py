import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(pathlib.Path(__file__).parent), str(ROOT / "python")]

for variable, places in {
    "HEADROOM_LIBRARY": ("build/src/libheadroom.so", "build/test/src/libheadroom.so"),
    "HEADROOM_CLI": ("build/cli/headroom", "build/test/cli/headroom"),
}.items():
    found = [str(ROOT / place) for place in places if (ROOT / place).exists()]
    if found:
        os.environ.setdefault(variable, found[0])
