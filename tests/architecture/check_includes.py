"""Checks who may include whom: check_includes.py ROOT

The core may include the standard library and lists only. Backends may include the core, and not one another. Only the
list of CUDA engines may include an engine. Exact and sparsified plans and candidates do not include each other. The
loss, a logit and the registers of a tile have one home each. Everything outside src includes the public headers only.
The command line has layers: its support and files include no command. Examples include nothing of it. CUDA's own
headers are allowed under src/cuda, bench and tests/gpu, in the examples on CUDA, and for the device memory that tests
share.
"""

import pathlib
import re
import sys

SUFFIXES = {".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
PUBLIC = "logitless/"
OUTSIDE = ("cli", "python", "bench", "examples")
# Folders of the command line, each with the folders that its files may include in quotes. The first match counts.
LAYERS = {
    "cli/support/": ("support",),
    "cli/io/": ("io", "support"),
    "examples/": (),
}
# The bounds of `logitless check` read the library's own formulas.
READS_CORE = "cli/commands/check_compare.cpp"
BACKENDS = ("reference", "cpu", "cuda")
# Engines of the CUDA backend. Only their own files and the list of engines may include them.
ENGINES = ("cuda/engines/sm90/", "cuda/engines/mma/", "cuda/engines/portable/")
ENGINE_LIST = "src/cuda/engines/engines.cpp"
# Folders that may not include each other.
PEERS = ("cuda/run/candidates/", "cuda/run/exact/", "cuda/run/sparsified/")
# A pattern, the folder in which few files may contain it, these files, and the alternative for all others.
HOMES = (
    (r"\bz_loss\b", "src/", ("src/core/",), "core/row_coefficients.h's LossParams"),
    (r"\b(float|double)\b[^;()=\n]*\bsoftcap\b", "src/cuda/", (), "core/logit_transform.h's LogitTransform"),
    (r"\bacc\[", "src/cuda/engines/fused/", ("src/cuda/engines/fused/accumulators.cuh",), "element()"),
)
CUDA_TESTS = ("tests/gpu/", "tests/cuda_on_cpu/", "tests/support/device_memory.cpp")
CUDA_USERS = ("src/cuda/", "bench/", "examples/cuda_", *CUDA_TESTS)

# Headers in <> that a folder may use, besides C's and those of the standard library, which have no dot or slash.
C_HEADERS = {"stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h", "math.h", "assert.h", "float.h", "limits.h"}


def allowed_in_src(part: str, header: str) -> bool:
    """Returns whether ``part``, a folder under src/, may include ``header``, written in quotes."""
    target = header.split("/")[0]
    if header.startswith(PUBLIC):
        # The C interface belongs to api/. Other parts use the core's types, which follow from its lists.
        return part == "api" or (part == "core" and header.endswith(".def"))
    if part == "api":
        return target in ("api", "core", *BACKENDS, "distributed")
    if part == "core":
        return target == "core"
    return target in (part, "core")


def allowed_in_layer(relative: str, header: str) -> bool:
    """Returns whether a layer may include ``header``, written in quotes; all may include the public ones."""
    for folder, known in LAYERS.items():
        if relative.startswith(folder):
            return header.startswith(PUBLIC) or ("/" in header and header.split("/")[0] in known)
    return True


def is_standard(header: str) -> bool:
    return ("." not in header and "/" not in header) or header in C_HEADERS


def is_cuda(header: str) -> bool:
    name = header.split("/")[-1]
    return header.startswith(("cuda", "cute/", "cub/", "thrust/", "cublas", "nccl")) or name.startswith("cuda_")


def problems_of(root: pathlib.Path, path: pathlib.Path, local_headers: set) -> list:
    relative = path.relative_to(root).as_posix()
    text = path.read_text(encoding="utf-8")
    problems = []
    for pattern, folder, homes, instead in HOMES:
        if relative.startswith(folder) and not relative.startswith(homes) and re.search(pattern, text):
            problems.append(f"{relative}: {pattern}: use {instead}")
    top, *rest = relative.split("/")
    for bracket, header in INCLUDE.findall(text):
        where = f"{relative}: #include {bracket}{header}"
        own = header.startswith("cuda/") and bracket == '"'
        if is_cuda(header) and not own and not relative.startswith(CUDA_USERS):
            problems.append(f"{where}: CUDA headers belong to src/cuda and bench")
        if top == "include" and not (header.startswith(PUBLIC) or is_standard(header)):
            problems.append(f"{where}: the public headers need the standard library only")
        if top == "src":
            part = rest[0] if len(rest) > 1 else ""
            if bracket == '"' and not allowed_in_src(part, header):
                problems.append(f"{where}: not for src/{part}")
            engine = next((folder for folder in ENGINES if header.startswith(folder)), None)
            if engine is not None and relative != ENGINE_LIST and not relative.startswith(f"src/{engine}"):
                problems.append(f"{where}: an engine is known to {ENGINE_LIST} alone")
            if relative.startswith(tuple(f"src/{peer}" for peer in PEERS)) and header.startswith(PEERS):
                if header.split("/")[2] != relative.split("/")[3]:
                    problems.append(f"{where}: {' and '.join(PEERS)} do not know each other")
            if bracket == "<" and part == "core" and not is_standard(header):
                problems.append(f"{where}: the core needs the standard library only")
        if (
            top in OUTSIDE
            and relative != READS_CORE
            and bracket == '"'
            and f"src/{header}" in local_headers
            and f"{top}/{header}" not in local_headers
        ):
            beside = (path.parent / header).resolve()
            if not beside.exists():
                problems.append(f"{where}: {top} sees include/ only")
        if bracket == '"' and not allowed_in_layer(relative, header):
            problems.append(f"{where}: not for this layer of the command line")
        if top in OUTSIDE and re.search(r"(^|/)\.\./.*src/|^src/", header):
            problems.append(f"{where}: {top} sees include/ only")
    return problems


def main() -> int:
    root = pathlib.Path(sys.argv[1]).resolve()
    folders = ("include", "src", "cli", "python", "bench", "examples", "tests", "experiments")
    files = sorted(
        path
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.is_file() and (path.suffix in SUFFIXES or path.suffix == ".py") and "build" not in path.parts
    )
    local_headers = {path.relative_to(root).as_posix() for path in files}
    problems = [problem for path in files for problem in problems_of(root, path, local_headers)]
    for problem in problems:
        print(problem)
    print(f"{len(files)} files, {len(problems)} problems")
    if len(files) < 30:
        print("so few files: is this the root of the repository?")
        return 1
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
