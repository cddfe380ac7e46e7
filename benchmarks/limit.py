"""The fastest plain copy of some files' bytes by the processes of one mpirun.

``mpirun -n P python -m benchmarks.limit FOLDER TARGET [--fsync]`` copies all checkpoint files below FOLDER,
each process its share by bytes, once for each way: read and write in blocks of 128 KiB, 256 KiB
and 1 MiB, and copy_file_range. It prints, as JSON, seconds from barrier to barrier by way.
A single file is sharded among the processes. Every copy goes to new files.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

from mpi4py import MPI

WAYS = {"128 KiB": 128 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "copy_file_range": 0}


def pieces(folder, rank, size):
    """Return (file, offset, nbytes) of this process's share."""
    files = sorted(p for p in Path(folder).rglob("*") if p.suffix in (".ckpt", ".safetensors"))
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


def main(folder, target, *options):
    comm = MPI.COMM_WORLD
    mine = pieces(folder, comm.rank, comm.size)
    seconds = {}
    only = [o for o in options if o in WAYS]
    for way, block in WAYS.items():
        if only and way not in only:
            continue
        if comm.rank == 0:
            shutil.rmtree(target, ignore_errors=True)
            for path in Path(folder).rglob("*"):
                if path.is_file():
                    (Path(target) / path.relative_to(folder)).parent.mkdir(
                        parents=True, exist_ok=True
                    )
            os.sync()
            if "--cold" in options:
                Path("/proc/sys/vm/drop_caches").write_text("3")
        comm.Barrier()
        began = time.perf_counter()
        for path, offset, nbytes in mine:
            copy(
                path,
                Path(target) / path.relative_to(folder),
                offset,
                nbytes,
                block,
                "--fsync" in options,
            )
        comm.Barrier()
        seconds[way] = time.perf_counter() - began
    if comm.rank == 0:
        shutil.rmtree(target)
        print(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
