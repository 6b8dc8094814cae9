"""Checks that a wheel's library uses PyTorch's OpenMP runtime, in either import order: beside_torch.py WHEEL"""

import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

RUN = """
import {first}, {second}
import torch
hidden, weight = torch.randn(600, 64, requires_grad=True), torch.randn(5000, 64, requires_grad=True)
target = torch.arange(600)
logitless.linear_cross_entropy(hidden, weight, target).backward()
torch.nn.functional.cross_entropy(hidden @ weight.T, target)
maps = open("/proc/self/maps").read().split()
print("\\n".join(sorted({{path for path in maps if "libgomp" in path}})))
"""

with tempfile.TemporaryDirectory() as folder:
    zipfile.ZipFile(sys.argv[1]).extractall(folder)
    environment = {name: value for name, value in os.environ.items() if name != "LOGITLESS_LIBRARY"}
    environment["PYTHONPATH"] = folder
    for first, second in (("torch", "logitless"), ("logitless", "torch")):
        done = subprocess.run(
            [sys.executable, "-c", RUN.format(first=first, second=second)],
            env=environment,
            capture_output=True,
            text=True,
            cwd=pathlib.Path(folder),
        )
        assert done.returncode == 0, done.stderr
        runtimes = done.stdout.split()
        assert len(runtimes) == 1, f"{first} imported first: {len(runtimes)} OpenMP runtimes: {runtimes}"
print("one OpenMP runtime beside torch, whichever is imported first")
