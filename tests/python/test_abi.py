"""The ctypes mirror of the structs and enums against the header, by a C program that prints its view."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from logitless import errors, native
from logitless import options as _options
from logitless._candidates import operators

INCLUDE = Path(__file__).resolve().parents[2] / "include"
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

OF_OPTIONS = ("F32", "BF16", "F16", "F64", "I32", "I64", "FORWARD", "BACKWARD", "FORWARD_BACKWARD")
STAGES = ("VALUES", "GRADIENT", "SUMS", "TERMS")
CONSTANTS = {name: getattr(_options, name) for name in OF_OPTIONS}
CONSTANTS |= {f"REDUCTION_{name.upper()}": place for place, name in enumerate(_options.REDUCTIONS)}
CONSTANTS |= {f"DIVERGENCE_{name}": getattr(native, f"DIVERGENCE_{name}") for name in STAGES} | {"OK": native.OK}
CONSTANTS |= {"CANDIDATES_LOGITS": operators.LOGITS, "CANDIDATES_GRADIENT": operators.GRADIENT}
CONSTANTS |= {"INVALID_ARGUMENT": 1, "INVALID_TARGET": 2, "UNSUPPORTED": 4, "BACKEND_UNAVAILABLE": 5}
CONSTANTS |= {"OUT_OF_MEMORY": 6, "INTERNAL": 7, "COMMUNICATION_FAILED": 8}
CONSTANTS = {f"LOGITLESS_{name}": value for name, value in CONSTANTS.items()}

STRUCTS = {
    "logitless_context_options": native.ContextOptions,
    "logitless_option": native.Option,
    "logitless_tensor_desc": native.TensorDesc,
    "logitless_error_info": native.ErrorInfo,
    "logitless_plan_info": native.PlanInfoStruct,
    "logitless_tune_options": native.TuneOptions,
    "logitless_communicator": native.Communicator,
    "logitless_candidates": operators.Candidates,
    "logitless_divergence": native.Divergence,
    "logitless_divergence_problem": native.DivergenceProblem,
    "logitless_divergence_tiles": native.DivergenceTiles,
    "logitless_sample_noise": native.SampleNoise,
}


def fields(struct):
    return [name for name, *_ in struct._fields_]


@pytest.fixture(scope="module")
def header_view(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no C compiler")
    lines = [
        "#include <logitless/candidates.h>",
        "#include <logitless/distributed.h>",
        "#include <logitless/divergence.h>",
        "#include <logitless/logitless.h>",
        "#include <logitless/sampling.h>",
        "#include <stdio.h>",
        "int main(void) {",
    ]
    for name, struct in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field in fields(struct):
            member = f"(({name}*)0)->{field}"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof({member}));')
    lines.append('printf("logitless_tensor %zu\\n", sizeof(logitless_tensor));')
    for field in ("data", "stride"):
        lines.append(f'printf("logitless_tensor.{field} %zu\\n", offsetof(logitless_tensor, {field}));')
    lines += [f'printf("{name} %d\\n", (int){name});' for name in CONSTANTS]
    folder = tmp_path_factory.mktemp("abi")
    source, program = folder / "view.c", folder / "view"
    source.write_text("\n".join([*lines, "return 0; }"]))
    subprocess.run([COMPILER, "-std=c11", f"-I{INCLUDE}", str(source), "-o", str(program)], check=True)
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return {name: tuple(map(int, values)) for name, *values in map(str.split, output.splitlines())}


@pytest.mark.parametrize("name", STRUCTS)
def test_struct(header_view, name):
    struct = STRUCTS[name]
    assert header_view[name] == (ctypes.sizeof(struct),)
    for field in fields(struct):
        descriptor = getattr(struct, field)
        assert header_view[f"{name}.{field}"] == (descriptor.offset, descriptor.size), field


def test_a_library_of_another_abi_is_refused(monkeypatch):
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    with pytest.raises(errors.LibraryNotFoundError, match=rf"expected version {native.ABI_VERSION} of the ABI, got"):
        native.library.__wrapped__()


def test_buffers_are_the_array_that_a_run_takes(header_view):
    """Each tensor's record has its id, pointer and stride where logitless_tensor has them."""
    schema = native.schema()
    size = header_view["logitless_tensor"][0]
    assert ctypes.sizeof(schema.Buffers) == size * len(schema.tensors)
    buffers = schema.buffers()
    for place, (name, tensor) in enumerate(schema.tensors.items()):
        assert getattr(schema.Buffers, name).offset == place * size + header_view["logitless_tensor.data"][0]
        stride = getattr(schema.Buffers, f"{name}_stride").offset
        assert stride == place * size + header_view["logitless_tensor.stride"][0]
        assert ctypes.c_int32.from_buffer(buffers, place * size).value == tensor["id"]


def test_constants(header_view):
    assert {name: header_view[name][0] for name in CONSTANTS} == CONSTANTS


def test_a_field_of_every_line_is_mirrored():
    """A field added at the end of the header's struct, without a mirror, moves no offset: compare the names too."""
    text = "".join(
        (INCLUDE / "logitless" / name).read_text()
        for name in ("logitless.h", "candidates.h", "distributed.h", "divergence.h", "sampling.h")
    )
    for name, struct in STRUCTS.items():
        body = text.split(f"typedef struct {name} {{")[1].split(f"}} {name};")[0]
        body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
        declared = [
            line.split(";")[0].split()[-1].lstrip("*").split("[")[0] for line in body.splitlines() if ";" in line
        ]
        assert [d for d in declared if d] == fields(struct)
