"""logitless.tune: its arguments, and the record of a GPU, which later processes use."""

import ctypes
import json
import os
import signal
import threading
import time

import logitless
import pytest
from logitless import native
from support import process

HEADS = [(256, 2000, 128), (100, 3000, 64)]


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r'device: expected a GPU such as "cuda:0", got \'cpu\''):
        logitless.tune(device="cpu")
    with pytest.raises(ValueError, match="device: expected a GPU"):
        logitless.tune(device="h200")
    with pytest.raises(ValueError, match=r"heads: expected \(tokens, vocab, hidden\), got \(1, 2\)"):
        logitless.tune([(1, 2)], device=0)
    with pytest.raises(TypeError, match="heads"):
        logitless.tune([(1, 2, 3.5)], device=0)
    with pytest.raises(ValueError, match=r"heads: expected \(tokens, vocab, hidden\), got 1"):
        logitless.tune([1, 2, 3], device=0)
    for minutes in (0, -1, float("nan"), 1441):
        with pytest.raises(ValueError, match=f"minutes: expected more than 0 and at most 1440, got {minutes}"):
            logitless.tune(device=0, minutes=minutes)
    with pytest.raises(TypeError, match="minutes: expected a number, got str"):
        logitless.tune(device=0, minutes="1")
    with pytest.raises(logitless.LogitlessError):
        logitless.tune([(1, 2, 3)], device=999)


class LibraryThatMeasures:
    """Calls progress as logitless_tune does, until it stops or ten seconds have passed."""

    def logitless_tune(self, options, _record):
        given = ctypes.cast(options, ctypes.POINTER(native.TuneOptions))[0]
        start = time.monotonic()
        while time.monotonic() < start + 10:
            time.sleep(0.01)
            if given.progress(0.5, None) != 0:
                return 1
        return 0


@pytest.fixture
def _interruptible():
    """A shell's background job ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("progress", [None, lambda share: None])
def test_an_interrupt_ends_it(monkeypatch, progress):
    monkeypatch.setattr(native, "library", LibraryThatMeasures)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        logitless.tune(HEADS, device=0, progress=progress)
    assert time.monotonic() < start + 5


@pytest.mark.gpu
def test_a_record_is_written_and_used(tmp_path):
    shares = []
    path = tmp_path / "devices" / "record.json"
    record = logitless.tune(HEADS, device=0, minutes=0.05, path=path, progress=shares.append)
    assert record == json.loads(path.read_text()) and record["file"] == str(path)
    assert shares == sorted(shares) and shares[-1] <= 1
    assert {(run["tokens"], run["vocab"], run["hidden"]) for run in record["runs"]} == set(HEADS)
    assert set(record["engines"]) == {"loss", "exact", "sparsified"}

    # A process that starts with this record follows it.
    own = f"{''.join(c if c.isalnum() else '-' for c in record['device']['name'].lower())}"
    record["engines"]["loss"] = "portable"
    named = path.with_name(f"{own}-{record['device']['multiprocessors']}.json")
    named.write_text(json.dumps(record))
    plan = "logitless.plan(64, 512, 64, dtype='bf16', gradients=(), device=0)"
    script = f"import logitless; p = {plan}; print(p.engine, p.reason)"
    done = process("-c", script, LOGITLESS_DEVICE_RECORDS=str(named.parent))
    assert done.stdout.startswith("portable the fastest of those measured, device record"), done.stdout + done.stderr
    named.write_text("{}")
    done = process("-c", script, LOGITLESS_DEVICE_RECORDS=str(named.parent))
    assert done.returncode != 0 and "format: expected a value" in done.stderr


@pytest.mark.gpu
def test_an_exception_of_progress_ends_it(tmp_path):
    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        logitless.tune(HEADS, device=0, path=tmp_path / "r.json", progress=stop)
    assert not list(tmp_path.iterdir())
