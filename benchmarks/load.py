"""Loading a checkpoint for another strategy: in memory, against by way of files.

``python -m benchmarks.load CASE [--repeat 5]`` has each of as many processes as there are
destination ranks load its slices, in turn: by `rankxform.load` from the source; by ``transform``
(without fsync) and then from its own new file, by `rankxform.load`; and the same, by MindSpore's
load_checkpoint. Prints the medians of the seconds from start to exit of all commands, of the
seconds from barrier to barrier in them, and the peak memory of the largest process over its slices.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time

from benchmarks.cases import CASES, make
from tests.mpi_launch import environment, mpirun
from tests.reference import stage_size

PROGRAM = """
import json, sys, time
from mpi4py import MPI
import numpy as np
import rankxform
way, src, a, b, dst = [word or None for word in sys.argv[1:]]
world = MPI.COMM_WORLD
if way == "mindspore":
    import mindspore
def held():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(l for l in lines if l.startswith("VmHWM")).split()[1])
before = held()
world.Barrier()
began = time.perf_counter()
if way == "memory":
    found = rankxform.load(src, a, b, comm=world)
elif way == "file":
    found = rankxform.load(
        f"{dst}/rank_{world.rank}/checkpoint_{world.rank}.ckpt", "none", comm=MPI.COMM_SELF, rank=0
    )
else:
    found = mindspore.load_checkpoint(f"{dst}/rank_{world.rank}/checkpoint_{world.rank}.ckpt")
world.Barrier()
seconds = time.perf_counter() - began
nbytes = sum(value.nbytes for value in found.values())
over = world.reduce(held() - before - nbytes, MPI.MAX)
total = world.reduce(nbytes)
if world.rank == 0:
    print(json.dumps({"seconds": seconds, "over": over, "bytes": total}))
"""
WAYS = ("memory", "file", "mindspore")


def load(way, processes, src, a, b, dst):
    words = [str(word or "") for word in (way, src, a, b, dst)]
    line = [*mpirun(processes), sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def convert(processes, src, a, b, dst):
    line = [*mpirun(processes), sys.executable, "-m", "rankxform", "transform", src, dst]
    line += [*(("--src-strategy", a) if a else ()), *(("--dst-strategy", b) if b else ())]
    line += ["--no-fsync", "--profile"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=True)
    return float(re.search(r"moved in ([\d.]+)", done.stdout)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--folder", default="/tmp/rankxform-bench")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    case, src, a, b = make(options.case, options.folder)
    processes = stage_size(case.dst) * len(case.dst) if case.dst else 1
    dst = f"{options.folder}/{options.case}-ckpt/dst"
    found = {way: [] for way in WAYS}
    for run in range(options.repeat + 1):  # the first is not counted
        for way in WAYS:
            shutil.rmtree(dst, ignore_errors=True)
            os.sync()
            began = time.perf_counter()
            moved = 0.0 if way == "memory" else convert(processes, src, a, b, dst)
            facts = load(way, processes, src, a, b, dst)
            whole = time.perf_counter() - began
            if run:
                found[way].append((whole, moved + facts["seconds"], facts["over"], facts["bytes"]))
    shutil.rmtree(dst)
    told = {"case": options.case, "processes": processes, "bytes": found["memory"][0][3]}
    for way, rounds in found.items():
        whole, between, over, _ = map(statistics.median, zip(*rounds))
        told[way] = {"whole": whole, "between barriers": between, "memory over slices": over}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
