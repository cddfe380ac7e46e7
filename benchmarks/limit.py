"""The fastest plain copy of some files' bytes by the processes of one mpirun.

``mpirun -n P python -m benchmarks.limit FOLDER TARGET [--fsync] [--first N] [--once SOURCE READ WRITTEN]`` copies
all checkpoint files below FOLDER, each process its share by bytes, once for each way: read and
write in blocks of 128 KiB, 256 KiB and 1 MiB, and copy_file_range; ``--first`` says with which way
it begins. It prints, as JSON, seconds from barrier to barrier by way. A single file is shared among
the processes. Every copy goes to new files.

With ``--once``, so many bytes are read from SOURCE's files, and so many written to files of FOLDER's
names, in blocks of each of these sizes; the fastest is the floor: what no conversion that must read
and write as many can be faster than. With ``--cast N`` that many values
of Float32 are cast to BFloat16 besides, with ``--exchange N`` the axes of matrices of so many bytes
are exchanged, of 16-bit values, with ``--checksum N`` so many bytes are summed by CRC-32: in memory
that stays in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from mpi4py import MPI

from rankxform.values import crc32

WAYS = {"128 KiB": 128 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "copy_file_range": 0}
ONCE = "read once"  # the fastest of its blocks
BLOCKS = {f"{ONCE}, {block >> 10} KiB": block for block in (128 << 10, 256 << 10, 1 << 20, 4 << 20)}


def pieces(folder, rank, size):
    """Return (file, offset, nbytes) of this process's share."""
    files = sorted(
        p for p in Path(folder).rglob("*") if p.suffix in (".ckpt", ".safetensors", ".distcp")
    )
    files = list({p.stat().st_ino: p for p in files}.values())
    total = sum(p.stat().st_size for p in files)
    low, high = total * rank // size, total * (rank + 1) // size
    if len(files) % size == 0:  # whole files
        each = len(files) // size
        return [(p, 0, p.stat().st_size) for p in files[rank * each : (rank + 1) * each]]
    found, at = [], 0
    for path in files:
        nbytes = path.stat().st_size
        start, stop = max(low, at), min(high, at + nbytes)
        if start < stop:
            found.append((path, start - at, stop - start))
        at += nbytes
    return found


def copy(path, target, offset, nbytes, block, fsync):
    source = os.open(path, os.O_RDONLY)
    out = os.open(target, os.O_WRONLY | os.O_CREAT, 0o644)
    room = memoryview(bytearray(block or 1))
    end = offset + nbytes
    while offset < end:
        if block:
            part = room[: min(block, end - offset)]
            got = os.preadv(source, [part], offset)
            os.pwrite(out, part[:got], offset)
        else:
            got = os.copy_file_range(source, out, min(end - offset, 1 << 30), offset, offset)
        offset += got
    if fsync:
        os.fsync(out)
    os.close(source)
    os.close(out)


class Reader:
    """Reads this process's share of a folder's files, from the first byte on, into one room."""

    def __init__(self, share, block):
        self.share, self.room, self.at, self.fd = list(share), memoryview(bytearray(block)), 0, None

    def read(self, nbytes):
        while nbytes and self.share:
            path, offset, there = self.share[0]
            if self.fd is None:
                self.fd = os.open(path, os.O_RDONLY)
            part = self.room[: min(nbytes, there - self.at, len(self.room))]
            got = os.preadv(self.fd, [part], offset + self.at)
            nbytes, self.at = nbytes - got, self.at + got
            if self.at == there:
                os.close(self.fd)
                self.share, self.at, self.fd = self.share[1:], 0, None


def write(reader, ratio, target, offset, nbytes, fsync):
    """Write `nbytes`, and read `ratio` times as many."""
    out, end, read = os.open(target, os.O_WRONLY | os.O_CREAT, 0o644), offset + nbytes, 0.0
    while offset < end:
        part = reader.room[: min(len(reader.room), end - offset)]
        read += len(part) * ratio
        reader.read(int(read))
        read -= int(read)
        offset += os.pwrite(out, part, offset)
    if fsync:
        os.fsync(out)
    os.close(out)


def cast(count):
    """Cast so many values from Float32 to BFloat16, in cache."""
    values = np.linspace(-1, 1, 1 << 17, dtype=np.float32)
    words = np.empty(1 << 17, ml_dtypes.bfloat16)
    for _ in range(-(-count >> 17)):
        words[...] = values


def exchange(nbytes):
    """Exchange the axes of matrices of so many bytes, of 16-bit values, in squares that stay in
    the cache."""
    rows = np.zeros((512, 2048), np.uint16)
    columns, room = np.empty(rows.shape[::-1], np.uint16), np.empty((128, 128), np.uint16)
    for _ in range(-(-nbytes // rows.nbytes)):
        for i in range(0, 512, 128):
            for j in range(0, 2048, 128):
                room[...] = rows[i : i + 128, j : j + 128]
                columns[j : j + 128, i : i + 128] = room.T


def checksum(nbytes):
    """Sum so many bytes by CRC-32, in cache."""
    block = bytes(1 << 20)
    for _ in range(-(-nbytes // len(block))):
        crc32(block)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--once", nargs=3)
    for work in ("--cast", "--exchange", "--checksum"):
        parser.add_argument(work, type=int, default=0)
    for flag in ("--cold", "--fsync"):
        parser.add_argument(flag, action="store_true")
    told = parser.parse_args()
    comm = MPI.COMM_WORLD
    mine = pieces(told.folder, comm.rank, comm.size)
    total = comm.allreduce(sum(nbytes for *_, nbytes in mine))
    ways = [*WAYS, *(BLOCKS if told.once else ())]
    seconds = {}
    for number in range(len(ways)):
        way = ways[(number + told.first) % len(ways)]
        if comm.rank == 0:
            shutil.rmtree(told.target, ignore_errors=True)
            for path in told.folder.rglob("*"):
                if path.is_file():
                    place = told.target / path.relative_to(told.folder)
                    place.parent.mkdir(parents=True, exist_ok=True)
            os.sync()
            if told.cold:
                Path("/proc/sys/vm/drop_caches").write_text("3")
        if told.once:
            block = BLOCKS.get(way, 256 << 10)
            reader = Reader(pieces(told.once[0], comm.rank, comm.size), block)
        comm.Barrier()
        began = time.perf_counter()
        for path, offset, nbytes in mine:
            target = told.target / path.relative_to(told.folder)
            if way in BLOCKS:
                read, written = map(int, told.once[1:])
                ratio = read / max(1, written)
                write(reader, ratio, target, offset, nbytes * written // total, told.fsync)
            else:
                copy(path, target, offset, nbytes, WAYS[way], told.fsync)
        if way in BLOCKS:
            cast(told.cast // comm.size)
            exchange(told.exchange // comm.size)
            checksum(told.checksum // comm.size)
        comm.Barrier()
        seconds[way] = time.perf_counter() - began
    if comm.rank == 0:
        shutil.rmtree(told.target)
        if told.once:
            seconds[ONCE] = min(seconds.pop(way) for way in BLOCKS)
        print(json.dumps(seconds))


if __name__ == "__main__":
    main()
