"""How fast this process reads the source and writes to the destination, measured in a moment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter

from .files import (
    SYSCALL_BYTES,
    Buffer,
    advise,
    create,
    existing,
    fsync,
    opened,
    opened_to_write,
    read_into,
    remove,
    start_writing,
    write_from,
)

PROBE_BYTES = 64 << 20
"""Most bytes that are read and written to predict how long something takes."""

_RUN, _RUNS, _STRIDE = 128 << 10, 16, 4
_BESIDE = 1.3e-6
"""Seconds that the engine takes for a call beside the read itself (`benchmarks.reading`)."""

_SAMPLE = 16 << 20


@dataclass(frozen=True)
class Speed:
    """Bytes a second of one process, while its peers measure too; and the seconds that a read takes
    beside its bytes."""

    read: float
    write: float = inf
    call: float = 0.0


def sample(path: Path, part: float = 0.0, least: float = 0.0, most: float = 0.05) -> Speed:
    """Read a few runs in a file, as they are read where they are wanted, and then a little in a
    row, from `part` of it on: 16 MiB, but from `least` to `most` seconds if that is faster or
    slower. What a run takes beside its bytes is waiting.
    """
    block = memoryview(bytearray(SYSCALL_BYTES))
    with opened(path) as (fd, status):
        size = status.st_size
        advise(fd, os.POSIX_FADV_RANDOM)
        run = min(_RUN, size // (_RUNS * _STRIDE))
        span = run * _RUNS * _STRIDE
        behind = int((1 - part) * (size - span))  # from the other end than what is read in a row
        places = iter(range(behind, behind + span, run * _STRIDE) if run else ())
        runs: list[float] = []
        while sum(runs) < most and (at := next(places, None)) is not None:
            runs.append(_read(fd, path, at, at + run, block))
        advise(fd, os.POSIX_FADV_NORMAL)
        first, done, passed = int(part * max(0, size - _SAMPLE)), 0, 0.0
        while first + done < size and passed < (least if done >= _SAMPLE else most):
            stop = min(first + done + SYSCALL_BYTES, size)
            passed += _read(fd, path, first + done, stop, block)
            done = stop - first
    read = max(1, done) / max(passed, 1e-9)
    return Speed(read, call=max(0.0, median(runs or [0.0]) - run / read) + _BESIDE)


def reading(path: Path) -> float:
    """Read from the start of a file; return bytes a second."""
    block = memoryview(bytearray(SYSCALL_BYTES))
    with opened(path) as (fd, status):
        size = min(PROBE_BYTES, status.st_size)
        steps = range(0, size, SYSCALL_BYTES)
        passed = sum(_read(fd, path, at, min(at + SYSCALL_BYTES, size), block) for at in steps)
    return max(1, size) / max(passed, 1e-9)


def reading_for(path: Path, seconds: float) -> float:
    """Read a file for so long, again if it ends; return bytes a second.

    A process that gets the processor for a part of the time only is told by nothing shorter.
    """
    block = memoryview(bytearray(SYSCALL_BYTES))
    done, began, passed = 0, perf_counter(), 0.0
    with opened(path) as (fd, status):
        while passed < seconds and status.st_size:
            first = done % status.st_size
            last = min(first + SYSCALL_BYTES, status.st_size)
            _read(fd, path, first, last, block)
            done += last - first
            passed = perf_counter() - began
    return max(1, done) / max(passed, 1e-9)


def _read(fd: int, path: Path, first: int, last: int, block: Buffer) -> float:
    """Read, in one call; return the seconds that took."""
    began = perf_counter()
    read_into(fd, path, first, block[: last - first])
    return perf_counter() - began


def copying(nbytes: int = 16 << 20) -> float:
    """Copy in memory, more than a cache holds; return bytes a second."""
    source, target = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    target[:] = source  # so that the pages are there
    began = perf_counter()
    target[:] = source
    return nbytes / (perf_counter() - began)


def measure(source: Path | None, folder: Path, *, durable: bool) -> Speed:
    """Read from the file `source`, and write a file below `folder` that is removed again.

    Without a source, nothing is read, in no time.
    """
    block = memoryview(bytearray(SYSCALL_BYTES))
    read = reading(source) if source else inf
    probe = existing(folder) / f".rankxform-{os.uname().nodename}-{os.getpid()}.part"
    try:
        create(probe)
        with opened_to_write(probe) as fd:
            began = perf_counter()
            for start in range(0, PROBE_BYTES, SYSCALL_BYTES):
                write_from(fd, probe, start, block)
                if durable:
                    start_writing(fd, start, SYSCALL_BYTES)
            if durable:
                fsync(fd, probe)
            write = PROBE_BYTES / (perf_counter() - began)
    finally:
        remove(probe)
    return Speed(read, write)
