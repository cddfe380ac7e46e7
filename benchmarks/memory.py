"""Peak anonymous memory of each process, above the bare interpreter with mpi4py and numpy.

``python -m benchmarks.memory CASE`` watches RssAnon of all processes of one run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.cases import make
from tests.mpi_launch import environment, mpirun

BARE = "from mpi4py import MPI; import numpy, time; MPI.COMM_WORLD.Barrier(); time.sleep(0.5)"


def watch(line, marker):
    """Run a command; return the largest RssAnon, in bytes, of each process with `marker`."""
    process = subprocess.Popen(
        line, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    peaks = {}
    while process.poll() is None:
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or marker not in (entry / "cmdline").read_bytes():
                    continue
                found = re.search(r"RssAnon:\s+(\d+)", (entry / "status").read_text())
            except OSError:
                continue
            if found and b"mpirun" not in (entry / "cmdline").read_bytes()[:200].split(b"\0")[0]:
                peaks[entry.name] = max(peaks.get(entry.name, 0), int(found[1]) * 1024)
        time.sleep(0.002)
    if process.returncode:
        sys.exit(process.stderr.read().decode())
    return sorted(peaks.values(), reverse=True)


def main(name, folder="/tmp/rankxform-bench", *options):
    case, src, a, b = make(name, folder)
    dst = f"{folder}/{name}-ckpt/dst"
    shutil.rmtree(dst, ignore_errors=True)
    bare = watch([*mpirun(2), sys.executable, "-c", BARE], b"time.sleep(0.5)")[1]
    line = [*mpirun(2), sys.executable, "-m", "rankxform", "transform", src, dst, "--no-fsync"]
    line += [*(("--src-strategy", a) if a else ()), *(("--dst-strategy", b) if b else ()), *options]
    peak = watch(line, b"rankxform\0transform")
    shutil.rmtree(dst, ignore_errors=True)
    print(json.dumps({"case": case.name, "bare": bare, "peak": peak[0], "above": peak[0] - bare}))


if __name__ == "__main__":
    main(*sys.argv[1:])
