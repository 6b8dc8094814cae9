"""Makes a kernel repository for Hugging Face's Hub: make.py [--cuda VERSION] OUT WHEEL...

Each wheel of ./scripts/wheel becomes a build variant: its Python files and libraries as they are, without the command
line, and metadata.json, which `kernels` reads. The library does not use PyTorch's C++ interface. So a variant is for
every PyTorch from the wheel's oldest on, and has the name of the stable ABI of that version. See docs/hub.md.
"""

from __future__ import annotations

import argparse
import base64
import email
import hashlib
import json
import pathlib
import re
import shutil
import struct
import zipfile

KERNELS = ("0.16.2", "0.17.2")  # releases of `kernels` that ./hub/test tries, the oldest first
SYSTEMS = {"manylinux": "linux", "linux": "linux", "macosx": "darwin", "win": "windows"}
MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}  # where the names of Python's tags differ from those of `kernels`


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a kernel repository for Hugging Face's Hub from wheels.")
    parser.add_argument("out", type=pathlib.Path, help="a new folder")
    parser.add_argument("wheels", type=pathlib.Path, nargs="+", metavar="wheel")
    parser.add_argument("--cuda", metavar="VERSION", help="CUDA's version, such as 13.0, of a wheel with CUDA kernels")
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"out: expected the name of a new folder, got {given.out}, which exists")
    for wheel in given.wheels:
        try:
            print(add_variant(given.out / "build", wheel, given.cuda))
        except ValueError as error:
            parser.error(str(error))
    shutil.copy(pathlib.Path(__file__).with_name("CARD.md"), given.out / "build")


def add_variant(build: pathlib.Path, wheel: pathlib.Path, cuda: str | None) -> pathlib.Path:
    """Writes the variant of a wheel and returns its folder."""
    if not zipfile.is_zipfile(wheel):
        raise ValueError(f"wheel: expected a wheel of logitless, got {wheel}")
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    info, licence = (next((n for n in files if re.fullmatch(p, n)), None) for p in (INFO, LICENSE))
    libraries = [name for name in files if re.fullmatch(r"logitless/(lib)?logitless\.(so|dylib|dll)", name)]
    if info is None or licence is None or len(libraries) != 1:
        raise ValueError(f"wheel: expected a wheel of logitless with its library and license, got {wheel}")
    metadata = email.message_from_bytes(files[info])
    archs = architectures(files[libraries[0]])
    if archs and not re.fullmatch(r"\d+\.\d+", cuda or ""):
        raise ValueError(f"--cuda: expected a version such as 13.0 for the CUDA kernels of {wheel.name}, got {cuda}")
    backend = "cuda" if archs else "cpu"
    variant = f"torch-stable-abi{oldest_torch(metadata)}-{f'cu{cuda}' if archs else 'cpu'}-{platform(wheel)}"
    folder = build / variant.replace(".", "")
    if folder.exists():
        raise ValueError(f"wheel: expected one wheel for {folder.name}, got a second, {wheel}")

    kept = {name.removeprefix("logitless/"): data for name, data in files.items() if name.startswith("logitless/")}
    kept = {name: data for name, data in kept.items() if not name.startswith(("bin/", "__main__"))}
    kept["LICENSE"] = files[licence]
    digests = {name: hashlib.sha256(data).digest() for name, data in sorted(kept.items())}
    whole = hashlib.sha256(b"".join(name.encode() + digest for name, digest in digests.items())).hexdigest()
    for name, data in kept.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    described = {
        "name": "logitless",
        "id": f"_logitless_{backend}_{whole[:12]}",  # the name of the imported module, unique in a process
        "version": int(metadata["Version"].split(".")[0]),
        "license": "Apache-2.0",
        "python-depends": [],
        "kernel-depends": [],
        "kernels-minver": KERNELS[0],
        "backend": {"type": backend} | ({"archs": archs} if archs else {}),
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(digest).decode() for name, digest in digests.items()},
        },
    }
    (folder / "metadata.json").write_text(json.dumps(described, indent=2) + "\n")
    return folder


INFO = r"logitless-[^/]+\.dist-info/METADATA"
LICENSE = r"logitless-[^/]+\.dist-info/(licenses/)?LICENSE"


def oldest_torch(metadata: email.message.Message) -> str:
    for requirement in metadata.get_all("Requires-Dist", []):
        if found := re.match(r"torch\s*\(?>=\s*(\d+\.\d+)", requirement):
            return found[1]
    raise ValueError("wheel: expected Requires-Dist: torch>=VERSION in its metadata, got none")


def platform(wheel: pathlib.Path) -> str:
    tag = wheel.stem.rsplit("-", 1)[-1].split(".")[0]
    found = re.fullmatch(r"([a-z]+)[\d_]*_(x86_64|aarch64|arm64|amd64)", tag)
    if found is None or found[1] not in SYSTEMS:
        raise ValueError(f"wheel: expected a wheel for Linux, macOS or Windows and x86-64 or Arm, got {wheel.name}")
    return f"{MACHINES.get(found[2], found[2])}-{SYSTEMS[found[1]]}"


def architectures(library: bytes) -> list[str]:
    """Returns the compute capabilities of a library's CUDA kernels, as `kernels` writes them."""
    found, position = set(), 0
    magic = struct.pack("<IH", 0xBA55ED50, 1)  # of a fat binary: its header, then for each kernel's code a header
    while (position := library.find(magic, position)) >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", library, position)
        position, end = position + header, position + header + size
        while position < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, position)
            (arch,), (flags,) = (struct.unpack_from("<I", library, position + at) for at in (28, 40))
            only = "a" if flags & 0x100000 else "f" if flags & 0x200000 else ""
            found.add((arch, only, "+PTX" if kind == 1 else ""))
            position += header + size
    newest = max(found, default=(0,))[0]  # its PTX is for GPUs that are newer still; other PTX is not for all kernels
    return [f"{arch // 10}.{arch % 10}{only}{ptx}" for arch, only, ptx in sorted(found) if not ptx or arch == newest]


if __name__ == "__main__":
    main()
