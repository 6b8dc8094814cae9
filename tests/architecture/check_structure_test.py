"""Counts of scripts/measure_structure in a made-up tree. A number above its ceiling is reported."""

import pathlib
import tempfile

import check_structure

PACKAGE = "python/logitless"
FILES = {
    "src/core/a.h": "double z_loss = 0;\n",
    "src/core/b.h": "double z_loss_2 = 0;  // another word\n",
    "cli/c.cpp": 'if (message.starts_with("x: ")) message.erase(0, 3);\n',
    "docs/d.md": "z_loss\n",
    "bench/records/e.py": "z_loss = 1\n",
    "bench/test_f.py": "z_loss = 1\n",
    "build/g.h": "double z_loss = 0;\n",
    "src/build/g.h": "double z_loss = 0;\n",
    "tests/unit/h.cpp": 'EXPECT_EQ(message.substr(0, 3), "x: ");\nauto part = message.substr(3);\n',
    "tests/i.py": 'import re\nassert re.search("x", message)\nfound = re.search("x", message)\n',
    f"{PACKAGE}/__init__.py": "from .j import loss\n",
    f"{PACKAGE}/j.py": (
        "from . import k\nfrom ._chain import end\n\n\n"
        "def loss(max_workspace_bytes, *, z_loss):\n    k.run()\n    end()\n"
    ),
    f"{PACKAGE}/k.py": "def run():\n    from .j import loss\n    max_workspace_bytes = 1\n    loss(1)\n",
    f"{PACKAGE}/_chain.py": "class A:\n    max_workspace_bytes: int\n\n\ndef end():\n    pass\n",
    f"{PACKAGE}/sub/__init__.py": "from ..j import loss\nfrom .l import text\n",
    f"{PACKAGE}/sub/l.py": (
        "from typing import TYPE_CHECKING\n\nfrom .. import _chain\n\nif TYPE_CHECKING:\n    from . import text\n"
        'text = "a b".split()\n_chain.end()\n'
        'try:\n    pass\nexcept ValueError as error:\n    str(error).partition(":")\n'
    ),
}
EXPECTED = {
    "files that name z_loss, without tests": 2,
    "declarations of max_workspace_bytes in Python": 2,
    "files that have these declarations": 2,
    "copies of the preparation chain": 2,
    "circles of imports in Python": 1,
    "code that parses the library's messages": 4,
    "test lines": 6,
    "test files": 3,
}

script = check_structure.measuring(pathlib.Path(__file__).resolve().parents[2])
with tempfile.TemporaryDirectory() as folder:
    for name, text in FILES.items():
        path = pathlib.Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    tree = script.Tree(pathlib.Path(folder))
measured = script.measures(tree, ("end",))
got = {name: measured[name][0] for name in EXPECTED}
assert got == EXPECTED, f"expected {EXPECTED}, got {got}: {measured}"
assert measured["circles of imports in Python"][1] == ["logitless.j logitless.k"], measured
assert measured["non-test files"][0] == len(FILES) - 3 - 4, measured
try:
    script.preparations(tree, ("gone",))
    raise AssertionError("a chain that is nowhere was not refused")
except LookupError as error:
    assert "got gone" in str(error)
above, below = check_structure.compare({"a": 2, "b": 1, "c": 0}, {"a": 1, "b": 1, "c": 1})
assert above == ["a: expected at most 1, got 2"] and below == ["c: 0, below its ceiling 1"]
