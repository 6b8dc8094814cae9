"""logitless tune: its arguments, and the record of a GPU."""

import json

import pytest


def test_arguments_are_checked(refused):
    refused(2, "--device: expected cuda:N, got 'cpu'", "tune", "--device", "cpu")
    refused(2, "--device: expected cpu or cuda:N, got 'h200'", "tune", "--device", "h200")
    refused(2, "--minutes", "tune", "--minutes", "0")
    refused(1, "--device: expected a usable CUDA device, got cuda:999", "tune", "--device", "cuda:999")


@pytest.mark.gpu
def test_a_record_is_written_and_shown(cuda_device, ok, refused, tmp_path):
    out = tmp_path / "record.json"
    sizes = ["--shape", "100,2000,64", "--minutes", "0.02", "--quiet"]
    text = ok("tune", "--device", cuda_device, "--out", out, *sizes).out
    record = json.loads(out.read_text())
    assert {run["work"] for run in record["runs"]} == {"loss", "exact", "sparsified"}
    assert f"device record: {out}" in text and "fastest engines: loss " in text
    link = tmp_path / "link.json"
    link.symlink_to("other.json")
    again = ok("--json", "tune", "--device", cuda_device, "--out", link, *sizes).json
    assert again["device"] == record["device"] and link.is_symlink() and (tmp_path / "other.json").is_file()
    refused(2, "--shape: expected TOKENS,VOCAB,HIDDEN, got '1,2'", "tune", "--device", cuda_device, "--shape", "1,2")
    refused(
        1, "--out: expected a file that can be written", "tune", "--device", cuda_device, "--out", "/dev/null/r", *sizes
    )
