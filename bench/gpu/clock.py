"""Times and peak memory of calls, on a CUDA device or, to try the benchmark out, on the CPU."""

from __future__ import annotations

import ctypes
import gc
import pathlib
import re
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]
MIB = 1 << 20
# One thread spins this long before the first event. This hides the host's work before its first launch (about 1.5 ms),
# and the chip stays cool.
SPIN_CYCLES = 3_000_000


class Clock:
    """Measures calls on one device."""

    def __init__(self, device: str, idle_seconds: float = 0.03) -> None:
        self.device = device
        self.cuda = device.startswith("cuda")
        self.idle_seconds = idle_seconds if self.cuda else 0.0

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def works(self) -> bool:
        """Says whether the device still runs: a fault in a kernel ends that for the process."""
        try:
            torch.ones(1, device=self.device).sum().item()
        except RuntimeError:
            return False
        return True

    def burst_ms(self, call: Call) -> float:
        """Times one call after a short idle: the chip is cool and clocks are high."""
        self.wait()
        time.sleep(self.idle_seconds)
        return self.back_to_back_ms([call])[0]

    def back_to_back_ms(self, calls: list[Call]) -> list[float]:
        """Returns each call's time with no wait between calls."""
        if not self.cuda:
            times = []
            for call in calls:
                start = time.perf_counter()
                call()
                times.append(1e3 * (time.perf_counter() - start))
            return times
        torch.cuda._sleep(SPIN_CYCLES)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        events[0].record()
        for call, event in zip(calls, events[1:]):
            call()
            event.record()
        self.wait()
        return [before.elapsed_time(after) for before, after in zip(events, events[1:])]

    def together_ms(self, call: Call, calls: int) -> float:
        """Returns a call's mean time among many in a row: the larger of the host's and the device's time."""
        self.wait()
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return 1e3 * (time.perf_counter() - start) / calls
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        for _ in range(calls):
            call()
        after.record()
        self.wait()
        return before.elapsed_time(after) / calls

    def extra_bytes(self, call: Call) -> int:
        """Returns a call's peak memory beyond the present: allocated memory on a GPU, the resident set on the CPU."""
        peak = self.peak_bytes(call) if self.cuda else resident_peak_bytes(call)
        assert peak is not None
        return peak

    def release(self) -> None:
        """Frees cached memory, so that one method's leftovers do not fail the next."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def peak_bytes(self, call: Call) -> int | None:
        """Returns the allocator's peak above what is allocated now; None on the CPU."""
        if not self.cuda:
            call()
            return None
        self.wait()
        self.release()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.wait()
        return torch.cuda.max_memory_allocated() - before


def resident_peak_bytes(call: Call) -> int:
    """Returns how far the process's resident set rises during a call."""

    def peak() -> int:
        match = re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
        assert match is not None
        return 1024 * int(match[1])

    ctypes.CDLL(None).malloc_trim(0)  # returns memory that earlier calls freed
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak()
    call()
    return peak() - before
