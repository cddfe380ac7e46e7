"""How fast this process reads the source and writes to the destination, measured in a moment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from time import perf_counter

from rankxform.errors import StorageError
from rankxform.planning.reads import Costs

from .posix import SYSCALL_BYTES, fsync, nameless_file, nearest_existing, start_writing, write_from
from .store import storage_of

MEASURED_BYTES = 64 << 20
"""Most bytes that are read and written to predict how long something takes."""

_RUN, _RUNS, _STRIDE = 128 << 10, 16, 4
_BESIDE = 1.3e-6
"""Seconds that the engine takes for a read beside the system call (`benchmarks.reading`)."""

_SAMPLE = 16 << 20


class ReadTimer:
    """Reads a little of a file, from `part` of it on, to see how fast that is."""

    def __init__(self, path: str, part: float = 0.0) -> None:
        self._path, self._part = path, part
        self._ranges = storage_of(path).ranges()
        self._block = memoryview(bytearray(SYSCALL_BYTES))
        self._next = 0

    def speed(self, least: float = 0.0, most: float = 0.05) -> Costs:
        """Return the bandwidth and the latency of reads, from a few runs and a sequential read.

        The sequential read is of 16 MiB, but takes from `least` to `most` seconds. The latency is
        the median time of a run less the time of its bytes.
        """
        size = self.size
        run = min(_RUN, size // (_RUNS * _STRIDE))
        span = run * _RUNS * _STRIDE
        behind = int((1 - self._part) * (size - span))  # from the other end than the row
        places = iter(range(behind, behind + span, run * _STRIDE) if run else ())
        runs: list[float] = []
        while sum(runs) < most and (offset := next(places, None)) is not None:
            runs.append(self._read(offset, offset + run, sparse=True))
        first = self._next = int(self._part * max(0, size - _SAMPLE))
        passed = 0.0
        paces: list[float] = []
        while self._next < size and passed < (least if self._next - first >= _SAMPLE else most):
            nbytes = min(SYSCALL_BYTES, size - self._next)
            seconds = self.read_more(nbytes)
            passed += seconds
            paces.append(seconds / nbytes)
        read = max(1, self._next - first) / max(passed, 1e-9)
        latency = _median(runs) - run * _median(paces)
        return Costs(read, read_latency=max(0.0, latency) + _BESIDE)

    def read_more(self, nbytes: int) -> float:
        """Read so much more in a row, and from the start again if the file ends; return the
        seconds that took."""
        size = self.size
        done, passed = 0, 0.0
        while done < nbytes and size:
            first = self._next % size
            last = min(first + SYSCALL_BYTES, first + nbytes - done, size)
            passed += self._read(first, last)
            done += last - first
            self._next = last
        return passed

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._ranges.version(self._path).size

    def _read(self, first: int, last: int, *, sparse: bool = False) -> float:
        """Read, in one call; return the seconds that took."""
        began = perf_counter()
        self._ranges.read(self._path, first, self._block[: last - first], sparse)
        return perf_counter() - began

    def __enter__(self) -> ReadTimer:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(StorageError):  # nothing can be lost
            self._ranges.close()


def _median(values: Sequence[float]) -> float:
    """Return the median; 0 of none. `statistics` takes 5 ms to import.

    >>> _median([4.0, 1.0, 2.0, 3.0]), _median([])
    (2.5, 0.0)
    """
    middle = sorted(values)[max(0, len(values) - 1) // 2 : len(values) // 2 + 1]
    return sum(middle) / max(1, len(middle))


def reading(path: str) -> float:
    """Read from the start of a file; return bytes a second."""
    with ReadTimer(path) as timer:
        nbytes = min(MEASURED_BYTES, timer.size)
        return max(1, nbytes) / max(timer.read_more(nbytes), 1e-9)


def measure_reading(path: str, seconds: float) -> float:
    """Read a file for this many seconds, again if it ends; return bytes a second.

    No shorter measurement detects a process that gets the processor for only part of the time.
    """
    done, began, passed = 0, perf_counter(), 0.0
    with ReadTimer(path) as timer:
        while passed < seconds and timer.read_more(SYSCALL_BYTES):
            done += SYSCALL_BYTES
            passed = perf_counter() - began
    return max(1, done) / max(passed, 1e-9)


def measure_copying(nbytes: int = 16 << 20) -> float:
    """Copy in memory, more than a cache holds; return bytes a second."""
    source, target = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    target[:] = source  # so that the pages are there
    began = perf_counter()
    target[:] = source
    return nbytes / (perf_counter() - began)


def measure_storage(source: str | None, folder: Path, *, durable: bool) -> Costs:
    """Read from the file `source`, and write a file below `folder` that is removed again.

    Without a source nothing is read, and the bandwidth of reading is infinite.
    """
    block = memoryview(bytearray(SYSCALL_BYTES))
    read = reading(source) if source else inf
    folder = nearest_existing(folder)
    with nameless_file(folder) as fd:
        began = perf_counter()
        for start in range(0, MEASURED_BYTES, SYSCALL_BYTES):
            write_from(fd, folder, start, block)
            if durable:
                start_writing(fd, start, SYSCALL_BYTES)
        if durable:
            fsync(fd, folder)
        write = MEASURED_BYTES / (perf_counter() - began)
    return Costs(read, write)
