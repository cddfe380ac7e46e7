"""How fast this process reads the source and writes to the destination, measured in a moment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import perf_counter

from .files import (
    SYSCALL_BYTES,
    Buffer,
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
"""Most bytes that are read and written to measure."""


@dataclass(frozen=True)
class Speed:
    """Bytes a second of one process, while its peers measure too."""

    read: float
    write: float


def reading(path: Path, nbytes: int = PROBE_BYTES, part: float = 0.0) -> float:
    """Read at most `nbytes` of a file, from `part` of it on; return bytes a second."""
    with opened(path) as (fd, status):
        first = int(part * status.st_size)
        last = min(first + nbytes, status.st_size)
        began = perf_counter()
        _read(fd, path, first, last, memoryview(bytearray(SYSCALL_BYTES)))
        return max(1, last - first) / (perf_counter() - began)


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


def _read(fd: int, path: Path, first: int, last: int, block: Buffer) -> None:
    for start in range(first, last, SYSCALL_BYTES):
        read_into(fd, path, start, block[: min(SYSCALL_BYTES, last - start)])


def copying(nbytes: int = 8 << 20) -> float:
    """Copy in memory; return bytes a second."""
    source, target = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    best = 0.0
    for _ in range(3):
        began = perf_counter()
        target[:] = source
        best = max(best, nbytes / (perf_counter() - began))
    return best


def measure(
    source: Path | None, folder: Path, *, durable: bool, nbytes: int = PROBE_BYTES
) -> Speed:
    """Read from the file `source`, and write a file below `folder` that is removed again.

    Without a source, nothing is read, in no time.
    """
    block = memoryview(bytearray(SYSCALL_BYTES))
    read = reading(source, nbytes) if source else inf
    probe = existing(folder) / f".rankxform-{os.uname().nodename}-{os.getpid()}.part"
    try:
        create(probe)
        with opened_to_write(probe) as fd:
            began = perf_counter()
            for start in range(0, nbytes, SYSCALL_BYTES):
                write_from(fd, probe, start, block[: min(SYSCALL_BYTES, nbytes - start)])
                if durable:
                    start_writing(fd, start, SYSCALL_BYTES)
            if durable:
                fsync(fd, probe)
            write = nbytes / (perf_counter() - began)
    finally:
        remove(probe)
    return Speed(read, write)
