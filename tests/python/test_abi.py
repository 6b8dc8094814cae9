"""The ctypes mirror of the structs and enums against the header, by a C program that prints its view."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from logitless import _c

INCLUDE = Path(__file__).resolve().parents[2] / "include"
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

CONSTANTS = {
    "LOGITLESS_F32": _c.F32,
    "LOGITLESS_BF16": _c.BF16,
    "LOGITLESS_F16": _c.F16,
    "LOGITLESS_F64": _c.F64,
    "LOGITLESS_I32": _c.I32,
    "LOGITLESS_I64": _c.I64,
    "LOGITLESS_REDUCTION_NONE": _c.REDUCTIONS["none"],
    "LOGITLESS_REDUCTION_SUM": _c.REDUCTIONS["sum"],
    "LOGITLESS_REDUCTION_MEAN": _c.REDUCTIONS["mean"],
    "LOGITLESS_FORWARD": _c.FORWARD,
    "LOGITLESS_BACKWARD": _c.BACKWARD,
    "LOGITLESS_FORWARD_BACKWARD": _c.FORWARD_BACKWARD,
    "LOGITLESS_DIVERGENCE_VALUES": _c.DIVERGENCE_VALUES,
    "LOGITLESS_DIVERGENCE_GRADIENT": _c.DIVERGENCE_GRADIENT,
    "LOGITLESS_OK": _c.OK,
    "LOGITLESS_BUDGET_TOO_SMALL": _c.BUDGET_TOO_SMALL,
    "LOGITLESS_INVALID_ARGUMENT": 1,
    "LOGITLESS_INVALID_TARGET": 2,
    "LOGITLESS_UNSUPPORTED": 4,
    "LOGITLESS_BACKEND_UNAVAILABLE": 5,
    "LOGITLESS_OUT_OF_MEMORY": 6,
    "LOGITLESS_INTERNAL": 7,
    "LOGITLESS_COMMUNICATION_FAILED": 8,
}


def fields(struct):
    return [name for name, *_ in struct._fields_]


@pytest.fixture(scope="module")
def header_view(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no C compiler")
    lines = [
        "#include <logitless/distributed.h>",
        "#include <logitless/divergence.h>",
        "#include <logitless/logitless.h>",
        "#include <stdio.h>",
        "int main(void) {",
    ]
    for name, struct in _c._STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field in fields(struct):
            member = f"(({name}*)0)->{field}"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof({member}));')
    lines += [f'printf("{name} %d\\n", (int){name});' for name in CONSTANTS]
    folder = tmp_path_factory.mktemp("abi")
    source, program = folder / "view.c", folder / "view"
    source.write_text("\n".join([*lines, "return 0; }"]))
    subprocess.run([COMPILER, "-std=c11", f"-I{INCLUDE}", str(source), "-o", str(program)], check=True)
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return {name: tuple(map(int, values)) for name, *values in map(str.split, output.splitlines())}


@pytest.mark.parametrize("name", _c._STRUCTS)
def test_struct(header_view, name):
    struct = _c._STRUCTS[name]
    assert header_view[name] == (ctypes.sizeof(struct),)
    for field in fields(struct):
        descriptor = getattr(struct, field)
        assert header_view[f"{name}.{field}"] == (descriptor.offset, descriptor.size), field


@pytest.mark.parametrize("name", _c._STRUCTS)
def test_library_fills_the_size(name):
    assert _c.make(name).struct_size == ctypes.sizeof(_c._STRUCTS[name])


def test_constants(header_view):
    assert {name: header_view[name][0] for name in CONSTANTS} == CONSTANTS


def test_a_field_of_every_line_is_mirrored():
    """A field added to the header without a mirror moves no offset when it is the last: compare the names too."""
    text = "".join(
        (INCLUDE / "logitless" / name).read_text() for name in ("logitless.h", "distributed.h", "divergence.h")
    )
    for name, struct in _c._STRUCTS.items():
        body = text.split(f"typedef struct {name} {{")[1].split(f"}} {name};")[0]
        body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
        declared = [
            line.split(";")[0].split()[-1].lstrip("*").split("[")[0] for line in body.splitlines() if ";" in line
        ]
        assert [d for d in declared if d] == fields(struct)
