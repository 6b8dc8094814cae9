"""The library's own declarations of XLA's FFI against the header of the installed jaxlib."""

import re
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "src" / "api" / "xla_ffi.h"
THEIRS = {  # names that differ by more than the prefix
    "Version": "XLA_FFI_Api_Version",
    "MetadataExtension": "XLA_FFI_Metadata_Extension",
    "ErrorArgs": "XLA_FFI_Error_Create_Args",
    "StreamArgs": "XLA_FFI_Stream_Get_Args",
    "OrdinalArgs": "XLA_FFI_DeviceOrdinal_Get_Args",
}
CONSTANTS = {
    "kMajorVersion": "XLA_FFI_API_MAJOR",
    "kMetadataExtension": "XLA_FFI_Extension_Metadata",
    "kArrayAttribute": "XLA_FFI_AttrType_ARRAY",
    "kInt64": "XLA_FFI_DataType_S64",
    "kExecuteStage": "XLA_FFI_ExecutionStage_EXECUTE",
    "Code::kInvalidArgument": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "Code::kResourceExhausted": "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED",
    "Code::kFailedPrecondition": "XLA_FFI_Error_Code_FAILED_PRECONDITION",
    "Code::kUnimplemented": "XLA_FFI_Error_Code_UNIMPLEMENTED",
    "Code::kInternal": "XLA_FFI_Error_Code_INTERNAL",
}


def theirs(name, header):
    plain = THEIRS.get(name, f"XLA_FFI_{name}")
    # The first of these names is that of jaxlib 0.10, the second that of 0.11.
    older = {"Extension": ("XLA_FFI_Extension_Base", "XLA_FFI_InternalExtension")}.get(name, (plain,))
    return next(each for each in older if re.search(rf"struct {each}\b", header))


def test_each_field_lies_where_xla_puts_it(tmp_path):
    compiler = shutil.which("c++")
    path = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    if compiler is None or not path.is_file():
        pytest.skip("needs a compiler and jaxlib's headers")
    header, lines = path.read_text(), []
    structs = re.findall(r"^struct (\w+) \{(.*?)^\};", OURS.read_text(), re.MULTILINE | re.DOTALL)
    assert len(structs) > 12
    for name, body in structs:
        for field in re.findall(r"(?:^|[\s*(])(\w+)(?:\)\(\w+\*\))?;", body, re.MULTILINE):
            if field.startswith("unused"):
                continue
            own, other = f"logitless::xla::{name}", theirs(name, header)
            lines.append(f"static_assert(offsetof({own}, {field}) == offsetof({other}, {field}));")
            lines.append(
                f"static_assert(sizeof({own}::{field}) == sizeof({other}::{field}) || is_struct<{own}, {other}>);"
            )
    lines += [
        f"static_assert(static_cast<int>(logitless::xla::{own}) == static_cast<int>({other}));"
        for own, other in CONSTANTS.items()
    ]
    lines.append("static_assert(XLA_FFI_API_MINOR <= logitless::xla::kNewestMinorVersion);")
    source = tmp_path / "layout.cpp"
    source.write_text(
        '#include "xla/ffi/api/c_api.h"\n#include "api/xla_ffi.h"\n'
        "template <class A, class B> constexpr bool is_struct = false;\n" + "\n".join(lines)
    )
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{jax.ffi.include_dir()}", f"-I{ROOT / 'src'}", source]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
