"""How fast this process reads the source and writes to the destination, measured in a moment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from .files import (
    SYSCALL_BYTES,
    create,
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


def measure(source: Path, folder: Path, *, durable: bool, nbytes: int = PROBE_BYTES) -> Speed:
    """Read from the file `source`, and write a file below `folder` that is removed again."""
    block = memoryview(bytearray(SYSCALL_BYTES))
    with opened(source) as (fd, status):
        amount = min(nbytes, status.st_size)
        began = perf_counter()
        for start in range(0, amount, SYSCALL_BYTES):
            read_into(fd, source, start, block[: min(SYSCALL_BYTES, amount - start)])
        read = amount / (perf_counter() - began)
    probe = _existing(folder) / f".rankxform-{os.uname().nodename}-{os.getpid()}.part"
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


def _existing(folder: Path) -> Path:
    """Return `folder`, or the nearest one above it that is there."""
    while not folder.is_dir():
        folder = folder.parent
    return folder
