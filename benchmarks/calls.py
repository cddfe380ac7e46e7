"""The move of a conversion, against the same reads and writes with nothing around them.

``python -m benchmarks.calls CASE [--kind safetensors] [--folder FOLDER] [--repeat 9]
[--processes 2]`` records, of one run, which bytes each process reads and writes with each call of
the system. It then runs the conversion and repeats those calls, in turn: files are made, read,
written from one room, and renamed, in Python's shortest loop. It prints, as JSON, the medians, and
`of_calls`, the median of the ratios. Many small tensors cannot be moved faster without reading
what nobody needs, or without gathering more before each write.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import runpy
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.cases import CASES, make
from benchmarks.move import prepare, rankxform
from tests.mpi_launch import environment, mpirun


def record(log, *command):
    """Run the command, and write down the calls of this process by which files are read or written:
    (whether written, path, offset, bytes)."""
    from mpi4py import MPI

    rank, calls, paths = MPI.COMM_WORLD.rank, [], {}
    of_system = {False: os.preadv, True: os.pwritev}

    def recorded(is_write):
        def call(fd, buffers, offset):
            done = of_system[is_write](fd, buffers, offset)
            if fd not in paths:
                paths[fd] = os.readlink(f"/proc/self/fd/{fd}")
            calls.append((is_write, paths[fd], offset, done))
            return done

        return call

    open_file = os.open

    def opened(path, flags, *arguments, **keywords):
        if flags & os.O_CREAT and str(path).startswith("journal-"):  # the move begins
            calls.clear()
        fd = open_file(path, flags, *arguments, **keywords)
        paths.pop(fd, None)
        return fd

    os.preadv, os.pwritev, os.open = recorded(False), recorded(True), opened
    sys.argv = ["rankxform", *command]
    try:
        runpy.run_module("rankxform", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        os.preadv, os.pwritev, os.open = *of_system.values(), open_file
        Path(f"{log}.{rank}").write_bytes(pickle.dumps(calls))


def repeat(log, target):
    """Make the calls that were recorded, and print the seconds from the first to the last."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    calls = pickle.loads(Path(f"{log}.{comm.rank}").read_bytes())
    room = memoryview(bytearray(max(nbytes for *_, nbytes in calls)))
    copies = {
        path: f"{target}/{path.strip('/').replace('/', '+')}"
        for written, path, *_ in calls
        if written
    }
    comm.Barrier()
    began = time.perf_counter()
    fds = {path: os.open(f"{copy}.part", os.O_CREAT | os.O_WRONLY) for path, copy in copies.items()}
    for written, path, offset, nbytes in calls:
        if path not in fds:
            fds[path] = os.open(path, os.O_RDONLY)
        (os.pwritev if written else os.preadv)(fds[path], [room[:nbytes]], offset)
    for path, copy in copies.items():
        os.close(fds[path])
        os.rename(f"{copy}.part", copy)
    comm.Barrier()
    if not comm.rank:
        print(time.perf_counter() - began)


def run(processes, *arguments):
    line = [*mpirun(processes), sys.executable, "-m", "benchmarks.calls", *map(str, arguments)]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr or f"mpirun ended with {done.returncode}")
    return done.stdout


def main():
    if sys.argv[1:2] in (["--record"], ["--again"]):
        (record if sys.argv[1] == "--record" else repeat)(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--folder", default="/tmp/rankxform-bench")
    parser.add_argument("--kind", default="ckpt", choices=("ckpt", "safetensors"))
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--processes", type=int, default=2)
    told = parser.parse_args()
    case, src, a, b = make(told.case, told.folder, told.kind)
    base = Path(told.folder, f"{told.case}-{told.kind}")
    dst, copies, log = base / "dst", base / "copies", base / "calls"
    strategies = [*(("--src-strategy", a) if a else ()), *(("--dst-strategy", b) if b else ())]
    shutil.rmtree(dst, ignore_errors=True)
    run(told.processes, "--record", log, "transform", src, dst, *strategies, "--no-fsync")
    moves, again = [], []
    for number in range(told.repeat + 1):  # the first is not counted
        shutil.rmtree(dst, ignore_errors=True)
        prepare(False, case.output)
        moves.append(rankxform(src, dst, a, b, told.processes, "--no-fsync")[0])
        shutil.rmtree(copies, ignore_errors=True)
        copies.mkdir()
        prepare(False, case.output)
        again.append(float(run(told.processes, "--again", log, copies).split()[-1]))
        print(f"# {number}: move {moves[-1]:.4f} calls {again[-1]:.4f}", file=sys.stderr)
    calls = [
        pickle.loads(Path(f"{log}.{process}").read_bytes()) for process in range(told.processes)
    ]
    shutil.rmtree(copies)
    ratios = sorted(calls_alone / move for move, calls_alone in zip(moves[1:], again[1:]))
    print(json.dumps({
        "case": told.case, "move": statistics.median(moves[1:]), "calls": statistics.median(again[1:]),
        "of_calls": statistics.median(ratios), "range": [ratios[0], ratios[-1]],
        "reads": sum(not written for process in calls for written, *_ in process),
        "writes": sum(written for process in calls for written, *_ in process),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
