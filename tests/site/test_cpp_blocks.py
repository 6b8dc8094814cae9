"""Every C++ block of the documentation is a program: it is compiled with the headers and the library, and run."""

import os
import pathlib
import shutil
import subprocess

import blocks
import pytest

PROGRAMS = blocks.of("cpp")


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("block", PROGRAMS, ids=[blocks.name(block) for block in PROGRAMS])
def test_program(block, tmp_path):
    library = pathlib.Path(os.environ["LOGITLESS_LIBRARY"]).resolve()
    source, program = tmp_path / "block.cpp", tmp_path / "block"
    source.write_text(block.text)
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{blocks.ROOT / 'include'}"]
    link = [str(library), f"-Wl,-rpath,{library.parent}"]
    done = subprocess.run(["c++", *flags, str(source), *link, "-o", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    subprocess.run([str(program)], check=True, timeout=60)


def test_the_cmake_blocks_are_those_that_the_install_test_runs():
    assert {block.page.name for block in blocks.of("cmake")} == {"c_and_cpp.md"}
    assert len(blocks.of("cmake")) == 3
