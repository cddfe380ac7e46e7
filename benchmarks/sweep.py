"""The move of one case at other block sizes than the engine's own.

``python -m benchmarks.sweep CASE --block 4M,8M --straight 2M,4M --buffer 64K [--repeat 5]`` prints, for every
combination of arena, tile of unchanged rows and write buffer, the median move and the median limit measured beside it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
from itertools import product

from benchmarks.cases import CASES, make
from benchmarks.move import limit
from rankxform.options import parse_size
from tests.mpi_launch import environment, mpirun

PROGRAM = """
import sys
from rankxform.engine import cache, file_sink, schedule
cache._BLOCK, schedule.SMALL_TILE, file_sink._BUFFER = {block}, {straight}, {buffer}
from rankxform.cli.main import main
sys.exit(main())
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--block", default="4M,8M,16M")
    parser.add_argument("--straight", default="4M")
    parser.add_argument("--buffer", default="64K")
    parser.add_argument("--folder", default="/tmp/rankxform-bench")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    _, src, a, b = make(options.case, options.folder)
    dst, copy = (f"{options.folder}/{options.case}-ckpt/{n}" for n in ("dst", "copy"))
    names = ("block", "straight", "buffer")
    transfers = {sizes: [] for sizes in product(*(getattr(options, n).split(",") for n in names))}
    limits = []
    for _ in range(options.repeat):
        for sizes, seconds in transfers.items():
            shutil.rmtree(dst, ignore_errors=True)
            os.sync()
            program = PROGRAM.format(**dict(zip(names, map(parse_size, sizes))))
            line = [
                *mpirun(options.processes),
                sys.executable,
                "-c",
                program,
                "transform",
                src,
                dst,
            ]
            line += [*(("--src-strategy", a) if a else ()), *(("--dst-strategy", b) if b else ())]
            done = subprocess.run(
                [*line, "--no-fsync", "--profile"],
                env=environment(), capture_output=True, text=True, check=True,
            )  # fmt: skip
            seconds.append(float(re.search(r"moved in ([\d.]+)", done.stdout)[1]))
        limits.append(min(limit(dst, copy, options.processes).values()))
    least = statistics.median(limits)
    for sizes, seconds in transfers.items():
        move = statistics.median(seconds)
        told = "  ".join(f"{name} {size:>4}" for name, size in zip(names, sizes))
        print(f"{told}  move {move:.4f} s  {least / move:.0%} of the limit")


if __name__ == "__main__":
    main()
