"""Checks that the shared library exports just the functions of its headers: exported_symbols.py NM LIBRARY HEADER..."""

import re
import subprocess
import sys

nm, library, *headers = sys.argv[1:]
listing = subprocess.run([nm, "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
exported = {line.split()[-1].split("@")[0] for line in listing.splitlines() if line.strip()}
declared = set()
for header in headers:
    with open(header, encoding="utf-8") as file:
        text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.DOTALL)
    declared |= set(re.findall(r"^LOGITLESS_API\b[^;(]*?(\w+)\(", text, flags=re.MULTILINE))

failed = False
for kind, names in (
    ("exported but not declared", exported - declared),
    ("declared but not exported", declared - exported),
):
    for name in sorted(names):
        print(f"{kind}: {name}")
        failed = True
if len(declared) < 10:
    print(f"only {len(declared)} declarations found in {headers}: is this test still reading it right?")
    failed = True
print(f"{len(exported)} symbols")
sys.exit(failed)
