"""Start-up: a whole command that moves one tiny parameter, over the interpreter that it needs.

``python -m benchmarks.startup [--repeat 15]`` runs, in turn, ``python -c "import numpy"`` (with two
processes ``mpirun -n 2 python -c "import numpy; from mpi4py import MPI"``) and ``transform``, and
prints medians and their ratio, without MPI and with two processes; then modules and milliseconds of
import by room, least of the runs, as ``-X importtime`` has them (its own cost included). Byte code
must be there: ``python -m compileall rankxform``.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests import reference
from tests.mpi_launch import environment, mpirun


def checkpoint(here):
    """Make a checkpoint of two ranks, and two strategies; return the command that converts it."""
    src = [{"w": ([2], [0, -1], 0, 0)}]
    reference.write_strategy(here / "a.ckpt", src)
    reference.write_strategy(here / "b.ckpt", [{"w": ([4], [0, -1], 0, 0)}])
    reference.write_checkpoint(here / "src", src, {"w": ((4, 4), "Float32")}, None, "safetensors")
    strategies = ["--src-strategy", str(here / "a.ckpt"), "--dst-strategy", str(here / "b.ckpt")]
    return ["-m", "rankxform", "transform", str(here / "src"), str(here / "dst"), *strategies]


def seconds(words):
    began = time.perf_counter()
    subprocess.run(words, env=environment(), check=True, capture_output=True)
    return time.perf_counter() - began


def rooms(command):
    """Return (modules, milliseconds) of one command's import, by first part below rankxform."""
    output = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        env=environment(), check=True, capture_output=True, text=True,
    )  # fmt: skip
    modules, milliseconds = Counter(), Counter()
    for own, name in re.findall(r"import time: +(\d+) \| +\d+ \| +(\S+)", output.stderr):
        parts = name.split(".")
        room = "/".join(parts[:2]) if parts[0] == "rankxform" else "numpy and other libraries"
        modules[room] += 1
        milliseconds[room] += int(own) / 1000
    return modules, milliseconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=15)
    told = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        command = checkpoint(here)
        for processes, program in (
            (0, "import numpy"),
            (2, "import numpy; from mpi4py import MPI"),
        ):
            launcher = mpirun(processes) if processes else []
            floors, wholes = [], []
            for _ in range(told.repeat):
                floors.append(seconds([*launcher, sys.executable, "-c", program]))
                shutil.rmtree(here / "dst", ignore_errors=True)
                wholes.append(seconds([*launcher, sys.executable, *command]))
            floor, whole = map(statistics.median, (floors, wholes))
            found[f"processes {processes or 1}{'' if processes else ', no MPI'}"] = {
                "floor": round(floor, 4), "whole": round(whole, 4), "ratio": round(whole / floor, 2),
            }  # fmt: skip
        runs = []
        for _ in range(told.repeat):
            shutil.rmtree(here / "dst", ignore_errors=True)
            runs.append(rooms(command))
    found["import by room"] = {
        room: {"modules": count, "ms": round(min(spent[room] for _, spent in runs), 2)}
        for room, count in sorted(runs[0][0].items())
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
