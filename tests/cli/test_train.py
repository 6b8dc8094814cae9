"""The demonstration: where oneDNN is missing, and what a terminal shows."""

import os
import pty
import re
import subprocess

import pytest


@pytest.fixture
def without_onednn(binary, tmp_path):
    """without_onednn(*arguments) -> the finished process, for which every libdnnl is an empty file."""
    for version in (1, 2, 3):
        (tmp_path / f"libdnnl.so.{version}").touch()

    def call(*arguments):
        environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
        return subprocess.run(
            [binary, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )

    return call


def test_without_onednn_all_but_training_works(without_onednn):
    for arguments in (["info"], ["plan", "--model", "gpt2"], ["loss", "--help"], ["train", "--help"]):
        process = without_onednn(*arguments)
        assert process.returncode == 0, process.stderr
    process = without_onednn("bench", "--shape", "8,16,8", "--repeat", "1")
    assert process.returncode == 0, process.stderr
    process = without_onednn("train", "--device", "cpu", "--steps", "1")
    assert process.returncode == 1 and process.stdout == ""
    if "not in this build" in process.stderr:
        pytest.skip("this build has no train command")
    assert "train: oneDNN, which multiplies the matrices, cannot be opened" in process.stderr


def screen_lines(output):
    """The lines that a terminal shows after all."""
    lines = []
    for line in output.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_rows_of_the_table_stand_on_lines_of_their_own(binary, run, tmp_path):
    if run("train", "--help").code != 0:
        pytest.skip("this build has no train command")
    (tmp_path / "text.txt").write_text("".join(f"{k} is a number, {k * k} its square.\n" for k in range(4000)))
    ours, theirs = pty.openpty()
    arguments = ["train", "text.txt", "--device", "cpu", "--steps", "120", "--compare-steps", "0", "--vocab", "400",
                 "--dim", "128", "--inner", "128", "--batch", "4", "--validation-batches", "1"]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([binary, *arguments], cwd=tmp_path, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        output += piece
    os.close(ours)
    assert process.wait(timeout=60) == 0, output
    assert b"fused head [" in output  # the bar was drawn
    lines = screen_lines(output.decode())
    start = next(k for k, line in enumerate(lines) if line.split()[:2] == ["step", "loss"])
    rows = [line for line in lines[start + 1 :] if re.search(r"\d+ +[\d.]+ +[\d.]+ +[\d,]+$", line)]
    assert len(rows) >= 3
    for row in rows:
        assert re.fullmatch(r" *\d+ +[\d.]+ +[\d.]+ +[\d,]+", row), row
