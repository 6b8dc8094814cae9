"""Progress on a terminal is one line, redrawn in place, at any width of the terminal."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

import pytest


@pytest.fixture
def drawn(binary, zero_head, tmp_path):
    """Returns drawn(columns) -> the output of a run of some seconds on a terminal with that many columns."""

    def call(columns):
        terminal, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        command = [*zero_head(2048, 196608, 512), "--threads", "1"]
        process = subprocess.Popen([binary, *command], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=end)
        os.close(end)
        text = b""
        try:
            while part := os.read(terminal, 4096):
                text += part
        except OSError:  # the other end is closed
            pass
        os.close(terminal)
        assert process.wait(timeout=60) == 0, text
        return text.decode()

    return call


@pytest.mark.parametrize("columns", [0, 200, 45, 30, 1])
def test_progress_fits_the_terminal(drawn, columns):
    text = drawn(columns)
    lines = text.replace("\033[K", "").split("\r")
    assert "\n" not in text and len(lines) > 1 and lines[-1] == ""
    room = (columns or 80) - 1
    assert max(map(len, lines)) <= room
    assert all(re.match(r"loss \d+%", line) for line in lines if line and room > 20)
