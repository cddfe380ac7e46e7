"""The whole command, from start to exit, against a script that calls MindSpore's own transform.

``python -m benchmarks.mindspore CASE [--kind safetensors --process-num 1,2,4] [--repeat 5]``. Both sides
convert the same files, warm, each into an empty folder; rankxform with 2 processes and without fsync,
as MindSpore does not sync. MindSpore's safetensors output is wrong for sharding on an inner axis; only its
time is of interest here. With ``--unified`` both write unified safetensors.
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
from benchmarks.move import rankxform
from tests.mpi_launch import environment

SCRIPT = """
import sys
import mindspore as ms
if __name__ == "__main__":
    src, dst, a, b, processes = sys.argv[1:]
    more = {{"process_num": int(processes), "output_format": "safetensors"}} if {safe} else {{}}
    ms.transform_checkpoints(src, dst, "checkpoint_", a or None, b or None, **more)
"""


UNIFIED = """
import sys
import mindspore as ms
if __name__ == "__main__":
    src, dst, a, b, processes = sys.argv[1:]
    ms.unified_safetensors(src, a, dst, max_process_num=int(processes))
"""


def theirs(src, dst, a, b, kind, processes, folder, unified):
    """Run MindSpore's transform as a whole process; return its seconds and peak memory."""
    script = f"{folder}/transform.py"
    with open(script, "w") as file:
        file.write(UNIFIED if unified else SCRIPT.format(safe=kind == "safetensors"))
    line = ["/usr/bin/time", "-v"] if os.path.exists("/usr/bin/time") else []
    began = time.perf_counter()
    done = subprocess.run(
        [*line, sys.executable, script, src, dst, a or "", b or "", str(processes)],
        env=environment(GLOG_v="3"), capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    peak = re.search(r"Maximum resident set size \(kbytes\): (\d+)", done.stderr)
    return seconds, int(peak[1]) * 1024 if peak else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--folder", default="/tmp/rankxform-bench")
    parser.add_argument("--kind", default="ckpt", choices=("ckpt", "safetensors"))
    parser.add_argument("--process-num", default="1")
    parser.add_argument("--unified", action="store_true")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--theirs", type=int, help="runs of MindSpore, if fewer")
    options = parser.parse_args()
    case, src, a, b = make(options.case, options.folder, options.kind)
    dst = f"{options.folder}/{options.case}-{options.kind}/dst"
    ours, others, peak = [], {n: [] for n in options.process_num.split(",")}, None
    more = ("--dst-form", "unified") if options.unified else ()
    b = None if options.unified else b
    for run in range(options.repeat):
        shutil.rmtree(dst, ignore_errors=True)
        os.sync()
        ours.append(rankxform(src, dst, a, b, 2, "--no-fsync", *more)[1])
        for processes, seconds in others.items():
            if options.theirs and run >= options.theirs:
                continue
            shutil.rmtree(dst, ignore_errors=True)
            os.sync()
            took, peak = theirs(
                src, dst, a, b, options.kind, processes, options.folder, options.unified
            )
            seconds.append(took)
            print(f"# {ours[-1]:.3f} {processes}: {took:.2f} s {peak}", file=sys.stderr)
    shutil.rmtree(dst, ignore_errors=True)
    best = min(statistics.median(seconds) for seconds in others.values())
    mine = statistics.median(ours)
    row = {"case": case.name, "kind": options.kind, "rankxform": mine, "mindspore": best}
    print(json.dumps({**row, "times": best / mine, "mindspore peak": peak}))


if __name__ == "__main__":
    main()
