"""Numbers in the library's messages have a decimal point in any locale of the host."""

import re
import shutil
import subprocess

import pytest
from support import process

COMMA = "de_DE.UTF-8"
SCRIPT = """
import locale
import logitless
import logitless.numpy
import numpy
locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
assert locale.localeconv()["decimal_point"] == ","

def message(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except logitless.LogitlessError as error:
        return str(error)
    raise AssertionError((arguments, options))

print(message(logitless.plan, 512, 8000, 64, dtype="float32", max_workspace_bytes=1500))
arrays = numpy.zeros((4, 8), "f4"), numpy.zeros((16, 8), "f4"), numpy.zeros(4, "i8")
for option in ("label_smoothing", "softcap", "z_loss", "temperature"):
    print(message(logitless.numpy.linear_cross_entropy, *arrays, **{option: -0.125}))
logitless.numpy.linear_cross_entropy(*arrays)
"""


@pytest.fixture(scope="module")
def locales(tmp_path_factory):
    """Returns a folder with a locale that has a decimal comma."""
    folder = tmp_path_factory.mktemp("locales")
    command = ["localedef", "--no-archive", "-i", "de_DE", "-f", "UTF-8", str(folder / COMMA)]
    if not shutil.which("localedef") or subprocess.run(command, capture_output=True).returncode > 1:
        pytest.skip("localedef cannot make a German locale here")
    return folder


@pytest.mark.slow
def test_messages_have_a_point(locales):
    done = process("-c", SCRIPT, LOCPATH=str(locales), LOGITLESS_VERBOSE="1")
    assert done.returncode == 0, done.stderr
    budget, *factors = done.stdout.splitlines()
    assert "1500 bytes (1.5 KiB)" in budget
    assert all("got -0.125" in line for line in factors), factors
    assert re.search(r"\d\.\d\d matmuls, ", done.stderr), done.stderr
