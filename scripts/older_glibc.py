"""Lets the libraries and programs of a wheel run with glibc 2.28: older_glibc.py WHEEL

A linker asks for the newest version of each symbol that the building machine has. This script drops versions above
2.28, so that the loader takes the one that its C library has. A symbol without a version of 2.28 or before is an error:
cmake/glibc_2_28.c is the place for it.
"""

import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import zipfile

from elftools.elf.elffile import ELFFile

ANY_VERSION = 1
# Until glibc 2.34 these hold what is in libc.so.6 now.
NEEDED = ["--add-needed", "libpthread.so.0", "--add-needed", "libdl.so.2"]


def is_newer(version):
    match = re.match(r"GLIBC_2\.(\d+)", version)
    return match is not None and int(match[1]) > 28


def symbols_with_versions(elf):
    section = elf.get_section_by_name(".gnu.version")
    numbers = struct.unpack(f"<{section.num_symbols()}H", section.data())
    return list(zip(elf.get_section_by_name(".dynsym").iter_symbols(), numbers))


def older_symbols(library):
    """Returns the symbols of this machine's C library, or of its part, that have a version of 2.28 or before."""
    path = subprocess.check_output(["c++", f"-print-file-name={library}"], text=True).strip()
    with open(path, "rb") as file:
        elf = ELFFile(file)
        sections = elf.get_section_by_name(".gnu.version_d").iter_versions()
        names = {version["vd_ndx"]: next(texts).name for version, texts in sections}
        return {s.name for s, n in symbols_with_versions(elf) if not is_newer(names.get(n & 0x7FFF, "GLIBC_2.99"))}


def drop_newer_versions(path):
    """Changes the file. Returns whether it asked for newer versions."""
    data = bytearray(path.read_bytes())
    with open(path, "rb") as file:
        elf = ELFFile(file)
        needs = elf.get_section_by_name(".gnu.version_r")
        if needs is None:
            return False
        kept, dropped = [], {}
        for library, versions in needs.iter_versions():
            versions = list(versions)
            dropped |= {v["vna_other"]: library.name for v in versions if is_newer(v.name)}
            kept.append((library, [v for v in versions if not is_newer(v.name)]))
        kept = [(library, versions) for library, versions in kept if versions]
        known = {library: older_symbols(library) for library in set(dropped.values())}
        at = elf.get_section_by_name(".gnu.version")["sh_offset"]
        for index, (symbol, number) in enumerate(symbols_with_versions(elf)):
            if number in dropped:
                if symbol.name not in known[dropped[number]]:
                    remedy = "define it in cmake/glibc_2_28.c"
                    sys.exit(f"{path.name}: expected symbols of glibc 2.28, got {symbol.name}: {remedy}")
                struct.pack_into("<H", data, at + 2 * index, ANY_VERSION)

        # The list of needed versions is written again, shorter. Two numbers count its libraries.
        at = needs["sh_offset"]
        for library, versions in kept:
            size = 16 * (1 + len(versions))
            following = 0 if library is kept[-1][0] else size
            struct.pack_into("<HHIII", data, at, 1, len(versions), library["vn_file"], 16, following)
            for index, version in enumerate(versions):
                fields = [version[name] for name in ("vna_hash", "vna_flags", "vna_other", "vna_name")]
                struct.pack_into("<IHHII", data, at + 16 * (index + 1), *fields, 16 * (index + 1 < len(versions)))
            at += size
        header = elf["e_shoff"] + elf["e_shentsize"] * elf.get_section_index(".gnu.version_r")
        struct.pack_into("<I", data, header + 44, len(kept))
        dynamic = elf.get_section_by_name(".dynamic")
        for index, tag in enumerate(dynamic.iter_tags()):
            if tag.entry.d_tag == "DT_VERNEEDNUM":
                struct.pack_into("<Q", data, dynamic["sh_offset"] + 16 * index + 8, len(kept))
    path.write_bytes(data)
    return bool(dropped)


def main(wheel):
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            members = archive.infolist()
            archive.extractall(folder)
        for member in members:
            path = pathlib.Path(folder, member.filename)
            if path.is_file() and path.read_bytes()[:4] == b"\x7fELF" and drop_newer_versions(path):
                subprocess.check_call(["patchelf", *NEEDED, path])
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for member in members:
                archive.writestr(member, pathlib.Path(folder, member.filename).read_bytes(), zipfile.ZIP_DEFLATED)


main(pathlib.Path(sys.argv[1]))
