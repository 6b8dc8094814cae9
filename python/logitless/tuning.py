"""Measures a GPU, and writes the record by which the library uses it. Needs neither PyTorch nor numpy."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from . import native
from . import options as _options
from .inspection import device_of

_MOST_MINUTES = 1440


def tune(
    heads: Sequence[tuple[int, int, int]] | None = None,
    *,
    device: Any = "cuda",
    minutes: float = 1.0,
    path: str | os.PathLike[str] | None = None,
    progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Times every engine of a GPU, and writes a device record.

    Loss, exact and sparsified gradients are timed in bf16, with the rates of matrix products and of a copy. Processes
    that start later use the fastest engine for each and predict times from these rates. ``logitless info`` says which
    record a device uses. Delete the file to return to the defaults.

    Args:
        heads: (tokens, vocab, hidden) of the heads to time. None means five common heads. Those that do not fit the
            GPU's free memory are left out.
        device: The GPU: a ``torch.device``, ``"cuda"``, ``"cuda:N"`` or an ordinal.
        minutes: Time for the measurements. Every engine runs at least once on each head.
        path: The file to write. None means the device's own in the folder ``LOGITLESS_DEVICE_RECORDS``, else in
            ``~/.config/logitless/devices``. Only files with these names are read later.
        progress: Called with the share of the time that has passed, in another thread. An exception from it ends the
            measurement, as Ctrl+C does.

    Returns:
        The record: device, driver, version of the library, file, date, rates, the fastest engines, and all runs.

    Raises:
        BackendUnavailableError: The device cannot be used.
        InvalidArgumentError: A size or the time is out of range, or the file cannot be written.
        OutOfMemoryError: No head fits the free memory.
        UnsupportedError: The library was built without CUDA, or cannot read and write records.
    """
    ordinal = device_of(device)
    if not isinstance(ordinal, int) or ordinal == native.HOST:
        raise ValueError(f'device: expected a GPU such as "cuda:0", got {device!r}')
    sizes = [_options.integer("heads", size) for head in (() if heads is None else heads) for size in _checked(head)]
    if not 0 < _options.number("minutes", minutes) <= _MOST_MINUTES:
        raise ValueError(f"minutes: expected more than 0 and at most {_MOST_MINUTES}, got {minutes}")
    raised: list[BaseException] = []

    def report(share: float, _: Any) -> int:
        try:
            if progress is not None and not raised:
                progress(share)
        except BaseException as error:  # ctypes would print and drop it
            raised.append(error)
        return len(raised)

    def measured() -> dict[str, Any]:
        given = native.TuneOptions(
            device=ordinal,
            heads=ctypes.cast((ctypes.c_int64 * len(sizes))(*sizes), ctypes.c_void_p),
            head_count=len(sizes) // 3,
            seconds=60 * minutes,
            path=None if path is None else os.fsencode(path),
            progress=native.PROGRESS(report),
        )
        record = ctypes.c_char_p()
        status = native.library().logitless_tune(ctypes.byref(given), ctypes.byref(record))
        if raised:
            raise raised[0]
        native.check(status)
        read: dict[str, Any] = json.loads(record.value or b"")
        return read

    # Python's signals come to the main thread. In a callback of ctypes a KeyboardInterrupt comes before the first line,
    # where nothing catches it. So another thread measures, and this one waits.
    with futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(measured)
        try:
            return future.result()
        except BaseException as error:
            raised.append(error)
            raise


def _checked(head: Sequence[int]) -> Sequence[int]:
    if not hasattr(head, "__len__") or len(head) != 3:
        raise ValueError(f"heads: expected (tokens, vocab, hidden), got {head!r}")
    return head
