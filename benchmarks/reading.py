"""Wanted ranges, or the rows that hold them: each forced, and what is chosen.

``python -m benchmarks.reading [--folder F]``: one file, of which one destination rank wants every
second, fourth or eighth piece of each row, by the length of the piece; all from the page cache, or
with `--cold` from the device. Medians of the move, interleaved.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np

import rankxform
from tests import reference

TOTAL = 256 << 20
RUNS = (2, 8, 32, 128)
WAYS = ("auto", "ranges", "sieving")


def forget(folder):
    """Drop from the page cache what is in the files of a folder."""
    for path in folder.rglob("*.ckpt"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def measure(folder, parts, run, options):
    columns = run * 1024 * parts // 4
    params = {"w": ((TOTAL // (columns * 4), columns), "Float32")}
    shutil.rmtree(folder / "src", ignore_errors=True)
    reference.write_checkpoint(
        folder / "src", None, params, make=lambda name, shape, dtype: np.zeros(shape, "<u4")
    )
    strategy = reference.write_strategy(folder / "b.ckpt", [{"w": ([parts], [-1, 0], 0, 0)}])
    found = {way: [] for way in WAYS}
    for turn in range(options.repeat):
        for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
            shutil.rmtree(folder / "dst", ignore_errors=True)
            if options.cold:
                forget(folder / "src")
            report = rankxform.transform(
                folder / "src",
                folder / "dst",
                None,
                strategy,
                ranks=(1,),
                fsync=False,
                read_method=way,
            )
            found[way].append(report.move_seconds)
    return {way: statistics.median(some) for way, some in found.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=None, help="where to work (default: the temporary one)")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print("| of each row | run | auto | ranges | sieving | auto over best |")
    print("|---|---:|---:|---:|---:|---:|")
    worst = 0.0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for parts in (2, 4, 8):
            for run in RUNS:
                found = measure(Path(folder), parts, run, options)
                over = found["auto"] / min(found.values())
                times = " | ".join(f"{found[way] * 1e3:.1f} ms" for way in WAYS)
                print(f"| 1/{parts} | {run} KiB | {times} | {over:.2f} |", flush=True)
                worst = max(worst, over)
    print(f"the worst choice takes {worst:.2f} times the best")


if __name__ == "__main__":
    main()
