"""Where one process's time went, and how much memory it took."""

from __future__ import annotations

import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

ORDER = (
    "start", "index", "plan", "compare", "read", "exchange", "copy", "write", "fsync", "publish",
    "wait",
)  # fmt: skip


class Phases:
    """Adds up seconds by phase. ``start`` is what passed before, from the process's start on.

    began: the moment after that, of `time.monotonic`.
    """

    def __init__(self, first: str) -> None:
        self.seconds, self.began = dict.fromkeys(ORDER, 0.0), time.monotonic()
        self.seconds["start"] = seconds_since_start()
        self._now, self._since = first, self.began
        self._fetched = fetched()

    def bytes_fetched(self) -> int | None:
        """Return what storage gave this process since then, if that is counted."""
        now = fetched()
        return None if now is None or self._fetched is None else now - self._fetched

    def enter(self, name: str) -> None:
        """End one phase, and begin another."""
        now = time.monotonic()
        self.seconds[self._now] = self.seconds.get(self._now, 0.0) + now - self._since
        self._now, self._since = name, now


def seconds_since_start() -> float:
    """Return the seconds since this process was started (proc(5), field 22 of stat)."""
    try:
        with open("/proc/self/stat") as file:
            clock = int(file.read().rsplit(")", 1)[1].split()[19])
    except OSError:
        return time.process_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - clock / os.sysconf("SC_CLK_TCK")


def peak_memory() -> int:
    """Return the largest resident size this process has had, in bytes.

    The value of getrusage also includes the time before exec, and so pages of the parent process.
    """
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def fetched() -> int | None:
    """Return the bytes that storage gave this process so far, or None where that is not counted.

    What the page cache or a file system in memory gave is not among them (proc(5), io).
    """
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])
    return None


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))
