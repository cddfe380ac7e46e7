"""The time to move the bytes, against the fastest plain copy of the output's bytes.

``python -m benchmarks.move CASE [--kind safetensors] [--cold] [--fsync] [--repeat 5] [--processes 2]
[--link hard] [--src-form checkpoint2] [--dst-form huggingface]`` runs, in turn, the limit (`benchmarks.limit`) and rankxform, under the same mpirun, and
prints the medians, the ranges and the ratio of the medians; `of_once` is that to the
floor, the least of all runs: reading each needed byte once and writing the output's, equal files
once and no blocks of the source's, with what checksums take. Warm: no fsync on either side. ``--cold`` drops
the page cache before each run (as root) and syncs on both sides; ``--fsync`` only syncs. What a dry
run predicted for the move is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.cases import CASES, make
from tests.mpi_launch import environment, mpirun

ONCE = "read once"
UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def rankxform(src, dst, a, b, processes, *options):
    """Run the command; return seconds of the move, of the whole process, and its output."""
    line = [
        *mpirun(processes),
        sys.executable,
        "-m",
        "rankxform",
        "transform",
        src,
        dst,
        "--profile",
    ]
    line += [*(("--src-strategy", a) if a else ()), *(("--dst-strategy", b) if b else ()), *options]
    began = time.perf_counter()
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    whole = time.perf_counter() - began
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return float(re.search(r"moved in ([\d.]+) s", done.stdout)[1]), whole, done.stdout


def limit(folder, target, processes, *options):
    """Return the seconds of each way to copy a folder's files."""
    line = [*mpirun(processes), sys.executable, "-m", "benchmarks.limit", folder, target, *options]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def floor_options(src, output):
    """Return what tells `benchmarks.limit` the bytes that a run had to read and write, by what it
    printed: none of blocks that are the source's, and equal files once."""
    sizes = []
    for pattern in ("the (SIZE) that the slices need", "^done +(SIZE)", "^shared +(SIZE) of"):
        found = re.search(pattern.replace("SIZE", r"[\d.,]+ .?B"), output, re.MULTILINE)
        number, unit = found[1].split() if found else ("0", "B")
        sizes.append(int(float(number.replace(",", "")) * UNITS[unit]))
    needed, written, shared = sizes
    return ["--once", src, str(max(0, needed - shared)), str(max(0, written - shared))]


def prepare(cold, nbytes=0):
    """Write what is dirty; touch as much memory as will be written.

    The first touch of a page is slow where the host of a virtual machine takes free pages back.
    """
    os.sync()
    if nbytes:
        bytearray(nbytes)[:: mmap.PAGESIZE] = bytes(-(-nbytes // mmap.PAGESIZE))
    if cold:
        Path("/proc/sys/vm/drop_caches").write_text("3")


def predicted(src, dst, a, b, processes, *options):
    """Return the seconds that a dry run predicts for the move."""
    line = [*mpirun(processes), sys.executable, "-m", "rankxform", "transform", src, dst]
    line += [*(("--src-strategy", a) if a else ()), *(("--dst-strategy", b) if b else ()), *options]
    done = subprocess.run(
        [*line, "--dry-run"], env=environment(), capture_output=True, text=True, check=True
    )
    return float(re.search(r"would take about ([\d.]+) s", done.stdout)[1])


def in_form(form, src, a, dst):
    """Return the source in another form, made once, and its strategy."""
    if form == "ranks":
        return src, a
    if not Path(dst).exists():
        number = ("--iteration", "1") if form == "checkpoint2" else ()
        rankxform(src, dst, a, a, 2, "--dst-form", form, *number)
    return dst, None


def options_of(form, b):
    """Return the options of a destination's form, and its strategy."""
    if form == "ranks":
        return (), b
    more = {"checkpoint2": ("--iteration", "1"), "huggingface": ("--max-shard", "150MB")}.get(
        form, ()
    )
    is_sharded = form in ("checkpoint2", "dcp", "hyperparallel")
    return ("--dst-form", form, *more), b if is_sharded else None


def measure(
    name, folder, kind, cold, fsync, repeat, processes, link=None, src_form="ranks",
    dst_form="ranks",
):  # fmt: skip
    case, src, a, b = make(name, folder, kind)
    dst, copy = (f"{folder}/{name}-{kind}/{n}" for n in ("dst", "copy"))
    src, a = in_form(src_form, src, a, f"{folder}/{name}-{kind}/{src_form}")
    form, b = options_of(dst_form, b)
    options = form if cold or fsync else (*form, "--no-fsync")
    options = (*options, "--link", link) if link else options
    same = ["--cold"] * cold + ["--fsync"] * (cold or fsync)
    ours, wholes, limits, onces, guesses, output = [], [], [], [], [], ""
    for run in range(repeat + 1):  # the first is not counted
        shutil.rmtree(dst, ignore_errors=True)
        prepare(cold, case.output)
        guess = predicted(src, dst, a, b, processes, *options)
        prepare(cold)
        move, whole, output = rankxform(src, dst, a, b, processes, *options)
        once = floor_options(src, output)
        if dst_form == "dcp":  # whose entries have a CRC-32
            once += ["--checksum", str(sum(p.stat().st_size for p in Path(dst).glob("*.distcp")))]
        found = limit(dst, copy, processes, *same, "--first", str(run), *once)
        least = found.pop(ONCE)
        if run:
            ours.append(move)
            wholes.append(whole)
            limits.append(min(found.values()))
            onces.append(least)
            guesses.append(guess)
        print(
            f"# predicted {guess:.2f} move {move:.4f} whole {whole:.3f} limit {found} {ONCE} {least:.4f}",
            file=sys.stderr,
        )
    move, least = map(statistics.median, (ours, limits))
    once = min(onces)  # a bound
    shutil.rmtree(dst, ignore_errors=True)
    return {
        "case": name, "about": case.about, "kind": kind, "cold": cold, "fsync": cold or fsync, "bytes": case.output,
        "processes": processes, "move": move, "whole": statistics.median(wholes), "limit": least,
        "of_limit": least / move, "move_range": [min(ours), max(ours)],
        "limit_range": [min(limits), max(limits)], "once": once, "of_once": once / move, "predicted": statistics.median(guesses), "profile": output,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--folder", default="/tmp/rankxform-bench")
    parser.add_argument("--kind", default="ckpt", choices=("ckpt", "safetensors"))
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--fsync", action="store_true")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--link")
    for side in ("--src-form", "--dst-form"):
        parser.add_argument(side, default="ranks")
    row = measure(**{"name" if k == "case" else k: v for k, v in vars(parser.parse_args()).items()})
    print(row.pop("profile"), file=sys.stderr)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
