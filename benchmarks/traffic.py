"""The bytes that one process reads in all, as the kernel counts them, over the bytes needed.

``python -m benchmarks.traffic CASE`` converts in one process and compares rchar of
/proc/self/io, less what a process reads to start, with the distinct source bytes needed.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import rankxform
from benchmarks.cases import make


def read_so_far():
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def main(name, folder="/tmp/rankxform-bench"):
    case, src, a, b = make(name, folder)
    dst = f"{folder}/{name}-ckpt/dst"
    shutil.rmtree(dst, ignore_errors=True)
    before = read_so_far()
    report = rankxform.transform(src, dst, a, b, fsync=False)
    read = read_so_far() - before
    shutil.rmtree(dst)
    row = {
        "case": case.name,
        "read": read,
        "needed": report.bytes_needed,
        "ratio": read / report.bytes_needed,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
