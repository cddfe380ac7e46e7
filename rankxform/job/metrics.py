"""Where one process's time went, by name, in seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

ORDER = (
    "start",
    "index",
    "plan",
    "compare",
    "read",
    "exchange",
    "gather",
    "write",
    "fsync",
    "publish",
    "wait",
)


class Phases:
    """Adds up seconds by phase. ``start`` is what passed before, from the process's start on."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(ORDER, 0.0)
        self.seconds["start"] = since_process_start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def since_process_start() -> float:
    """Return the seconds since this process was started (proc(5), field 22 of stat)."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rsplit(")", 1)[1].split()[19])
    except OSError:
        return time.process_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
