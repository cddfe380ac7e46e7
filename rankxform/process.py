"""This process: its time, its memory, and signals to stop."""

from __future__ import annotations

import _signal as signal  # `signal` itself takes milliseconds, in which nobody listens
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

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


@contextmanager
def throttled(
    on_progress: Callable[[int], None], bytes_per_second: float
) -> Iterator[Callable[[int], None]]:
    """Yield what is told of progress, and waits so that it is no faster than that on average.

    Meanwhile this thread reads and writes only when its disks are idle, if the system knows that.
    """
    began, done = time.monotonic(), 0

    def on_throttled_progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(nbytes)
        while (seconds := began + done / bytes_per_second - time.monotonic()) > 0:
            time.sleep(min(seconds, _THROTTLE_SECONDS))
            on_progress(0)  # the others know that it is alive, and a stop is heard

    before = _io_priority(_GET)
    _io_priority(_SET, _IDLE_CLASS)
    try:
        yield on_throttled_progress
    finally:
        _io_priority(_SET, max(before, 0))


_THROTTLE_SECONDS = 0.2
_SET, _GET = 0, 1
_IO_PRIORITY = {"x86_64": (251, 252), "aarch64": (30, 31)}
"""Numbers of the system calls ioprio_set and ioprio_get, by machine."""
_THREAD, _IDLE_CLASS = 1, 3 << 13


def _io_priority(call: int, *priority: int) -> int:
    """Call ioprio_set or ioprio_get for this thread; return its result, -1 if it is refused."""
    import ctypes  # for those alone who throttle
    import platform

    numbers = _IO_PRIORITY.get(platform.machine())
    if numbers is None:
        return -1
    return int(ctypes.CDLL(None).syscall(numbers[call], _THREAD, 0, *priority))


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


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may use, in order."""
    return sorted(os.sched_getaffinity(0))


NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
STOPPED = 75
_FIRST_SPEAKS, _FORWARDED, _NEXT = 2.0, 0.3, 8
"""Seconds for process 0 to speak, and for a launcher to forward what it says; how many processes
wait for those before them, each for what the one before it says."""
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


class Signals:
    """What was heard. Stopping costs nothing but while work is done that is noted as it goes.

    at_work: whether such work is done, which then ends by itself; at any other moment a signal ends
    the process at once, as a second one does. reason: why to stop.

    Where a launcher started the process, signals wait until it is `ready`: while MPI starts, in
    which nobody listens, the others would wait for one that is gone.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.at_work = False
        self._waiting = any(name in os.environ for name in _RANKS)
        self._leave: Callable[[int], object] = os._exit
        self._names = {getattr(signal, name): name for name in NAMES}
        for number in self._names:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._note_signal)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.reason = self.reason, f"stopped by {self._names[number]}"
        if not self._waiting and not (self.at_work and again is None):
            self._exit_soon(again is None)

    def ready(self, leave: Callable[[int], object]) -> None:
        """Say that MPI has started, if it does; end the process if it was asked to stop before.

        leave: ends all processes now, with an exit code.
        """
        self._waiting, self._leave = False, leave
        if self.reason is not None:
            self._exit_soon(True)

    def ignore_signals(self) -> None:
        """Say that nothing is left to be stopped: MPI and the interpreter end, in a while."""
        for number in self._names:
            signal.signal(number, signal.SIG_IGN)

    def _exit_soon(self, is_first: bool) -> None:
        rank = max(int(os.environ.get(name, "0")) for name in _RANKS)
        if rank:  # process 0, which mostly got the signal too, ends all, or else the next one
            time.sleep(_FIRST_SPEAKS + 2 * _FORWARDED * min(rank, _NEXT))
        if is_first:
            text = f"rankxform: error: {self.reason}; what is complete is kept\n"
            os.write(2, text.encode())
            if self._leave is not os._exit:
                time.sleep(_FORWARDED)
        self._leave(STOPPED)
