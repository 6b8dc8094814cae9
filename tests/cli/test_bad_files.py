"""Missing, truncated, mismatched and malicious files give exit code 1 and a message that names the file."""

import json
import os
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

N, V, D = 6, 11, 4


@pytest.fixture
def loss(refused, tmp_path, random):
    """Returns loss(message, **changed arguments), which has good files for the rest."""
    np.save(tmp_path / "hidden.npy", random.standard_normal((N, D)).astype(np.float32))
    np.save(tmp_path / "weight.npy", random.standard_normal((V, D)).astype(np.float32))
    np.save(tmp_path / "targets.npy", random.integers(0, V, N))

    def call(message, **changes):
        files = {"hidden": "hidden.npy", "weight": "weight.npy", "targets": "targets.npy", **changes}
        arguments = [part for name, file in files.items() for part in ("--" + name.replace("_", "-"), file)]
        refused(1, message, "loss", *arguments)
        assert not list(tmp_path.glob("*partial*"))

    return call


def test_missing_folder_pipe_and_unknown_kind(loss, tmp_path):
    loss("absent.npy: cannot be opened", hidden="absent.npy")
    loss("absent.safetensors: cannot be opened", hidden="absent.safetensors:x")
    (tmp_path / "folder.npy").mkdir()
    loss("got a directory", hidden="folder.npy")
    loss("expected a .safetensors or .npy file", weight="folder.npy/..")
    os.mkfifo(tmp_path / "pipe.npy")
    loss("expected a regular file", hidden="pipe.npy")
    (tmp_path / "x.bin").write_bytes(b"abc")
    loss("expected a .safetensors", hidden="x.bin")
    (tmp_path / "empty.npy").touch()
    (tmp_path / "empty.safetensors").touch()
    loss("not an npy file", hidden="empty.npy")
    loss("at least 8 bytes", hidden="empty.safetensors")


def test_mismatched_shapes_and_dtypes(loss, tmp_path, random):
    def save(name, array):
        np.save(tmp_path / f"{name}.npy", array)

    save("wide", np.zeros((V, D + 1), np.float32))
    loss("wide.npy: expected shape [11, 4]", weight="wide.npy")
    save("flat", np.zeros(V * D, np.float32))
    loss("expected shape [V, D], got [44]", weight="flat.npy")
    loss("expected shape [..., tokens, D]", hidden="flat.npy")
    save("short", np.zeros(N - 1, np.int64))
    loss("expected shape [6]", targets="short.npy")
    save("real", np.zeros(N, np.float32))
    loss("expected an integer dtype", targets="real.npy")
    save("whole", np.zeros((N, D), np.int64))
    loss("expected dtype F32, BF16, F16 or F64, got I64", hidden="whole.npy")
    save("double", np.zeros((V, D)))
    loss("F64 exactly when hidden is", weight="double.npy")
    save("bias", np.zeros(V + 1, np.float32))
    loss("expected shape [11]", bias="bias.npy")
    loss("expected 11 elements", class_weight="bias.npy")
    save("nan", np.full(V, np.nan, np.float32))
    loss("finite weights", class_weight="nan.npy")
    save("none", np.zeros((0, D), np.float32))
    loss("at least one row", weight="none.npy")


@pytest.mark.parametrize("bad", [V, -1, 2**40, -101])
def test_target_out_of_range(loss, tmp_path, bad):
    targets = np.zeros(N, np.int64)
    targets[3] = bad
    np.save(tmp_path / "bad.npy", targets)
    loss(f"expected targets in [0, {V}) or -100, got {bad} at 3", targets="bad.npy")


def test_npy_of_other_kinds(loss, tmp_path):
    np.save(tmp_path / "fortran.npy", np.asfortranarray(np.zeros((N, D), np.float32)))
    loss("Fortran order", hidden="fortran.npy")
    np.save(tmp_path / "big.npy", np.zeros((N, D), ">f4"))
    loss("big-endian", hidden="big.npy")
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    loss("plain numbers", hidden="object.npy")
    np.save(tmp_path / "fields.npy", np.zeros(3, [("a", "<f4")]))
    loss("structured", hidden="fields.npy")
    np.savez(tmp_path / "many.npy", a=np.zeros(3))
    os.rename(tmp_path / "many.npy.npz", tmp_path / "many.npy")
    loss("not an npy file", hidden="many.npy")


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_every_truncation_is_refused(refused, tmp_path, kind):
    """The cuts are at every byte of the header and at some of the data."""
    data = np.arange(N * D, dtype=np.float32).reshape(N, D)
    whole = tmp_path / f"whole.{kind}"
    np.save(whole, data) if kind == "npy" else save_file({"hidden": data}, whole)
    np.save(tmp_path / "c.npy", np.zeros((V, D), np.float32))
    np.save(tmp_path / "y.npy", np.zeros(N, np.int64))
    content = whole.read_bytes()
    cut = tmp_path / f"cut.{kind}"
    for length in [*range(0, len(content) - data.nbytes, 7), len(content) - data.nbytes, len(content) - 1]:
        cut.write_bytes(content[:length])
        refused(1, f"cut.{kind}", "loss", "--hidden", cut.name, "--weight", "c.npy", "--targets", "y.npy")
    cut.write_bytes(content + b"x")
    refused(1, "expected 96 bytes", "loss", "--hidden", cut.name, "--weight", "c.npy", "--targets", "y.npy")


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(N, D), offsets=(0, N * D * 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


DATA = bytes(N * D * 4)


@pytest.mark.parametrize(
    "content, message",
    [
        (safetensors({}, length=2**63), "the format allows"),
        (safetensors({}, length=99_999_999), "truncated"),
        (safetensors(b"[1]"), "does not start with '{'"),
        (safetensors(b'{"x":'), "not valid JSON"),
        (safetensors(b"{" + b'"a":{' * 50_000), "nested deeper"),
        (safetensors(b'{"x\xff":1}'), "not valid JSON"),
        (safetensors({"x": entry(dtype="F33")}, DATA), "unknown dtype"),
        (safetensors({"x": entry(shape=(2**62, 4))}, DATA), "not a number of bytes"),
        (safetensors({"x": entry(shape=(2**32, 2**32, 2**32))}, DATA), "not a number of bytes"),
        (safetensors({"x": entry(shape=(-6, -4))}, DATA), "whole number"),
        (safetensors({"x": entry(offsets=(0, 2**63))}, DATA), "whole number"),
        (safetensors({"x": entry(offsets=(96, 0))}, DATA), "expected 96 bytes"),
        (safetensors({"x": entry(offsets=(2**62, 2**62 + 96))}, DATA), "truncated"),
        (safetensors({"x": entry(), "y": entry()}, DATA), "overlaps"),
        (safetensors({"x": entry(offsets=(4, 100))}, DATA + b"1234"), "hole"),
        (safetensors({"x": entry()}, DATA + b"1"), "got 97"),
        (
            safetensors(b'{"x":' + json.dumps(entry()).encode() + b',"x":' + json.dumps(entry()).encode() + b"}", DATA),
            "'x' twice",
        ),
        (safetensors({"\n\x1b[31mx": 1}), "\\x0a\\x1b[31mx"),
    ],
)
def test_malicious_safetensors(loss, tmp_path, content, message):
    (tmp_path / "bad.safetensors").write_bytes(content)
    loss(message, hidden="bad.safetensors:x")


def test_tensor_names(loss, tmp_path):
    save_file({"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)}, tmp_path / "two.safetensors")
    loss("has no tensor 'c'; it has 'a', 'b'", hidden="two.safetensors:c")
    loss("has 2 tensors; name the hidden states as two.safetensors:TENSOR", hidden="two.safetensors")
    loss("no named tensors", hidden="hidden.npy:x")


def test_outputs_never_replace_inputs_nor_stay_half_written(loss, refused, tmp_path):
    good = ["--hidden", "hidden.npy", "--weight", "weight.npy", "--targets", "targets.npy"]
    before = (tmp_path / "hidden.npy").read_bytes()
    refused(2, "is an input of this run", "loss", *good, "--per-token", "./hidden.npy")
    assert (tmp_path / "hidden.npy").read_bytes() == before
    (tmp_path / "link").symlink_to(tmp_path)
    for other in ("o.safetensors", "./o.safetensors", tmp_path / "o.safetensors", "link/o.safetensors"):
        message = f"--gradients: expected a file other than that of --per-token, got '{other}'"
        refused(2, message, "loss", *good, "--per-token", "o.safetensors", "--gradients", other)
    refused(1, "cannot be created", "loss", *good, "--gradients", "none/g.safetensors")
    (tmp_path / "g.safetensors").mkdir()
    refused(1, "not a regular file", "loss", *good, "--gradients", "g.safetensors")
    assert not list(tmp_path.glob("*partial*"))
