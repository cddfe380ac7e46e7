"""Signals at random moments from the command's first statement on: it is done, or stopped."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rankxform.process import NAMES, STOPPED
from tests import reference
from tests.mpi_launch import environment, mpirun, own_tmp

ROOT = Path(__file__).parents[2]
PARAMS = {f"w{n}": ((64, 64), "Float32") for n in range(20)}
STAGES = [dict.fromkeys(PARAMS, ([4], [0, -1], 0, 0))]
MOMENTS = int(os.environ.get("RANKXFORM_SIGNALS", "10"))
"""Of each test: 200 at night."""

# Says when the command's first statement is next, and becomes the command.
START = """
import os, runpy, sys
import rankxform
os.write(1, b"now\\n")
sys.argv[0] = "rankxform"
runpy.run_module("rankxform", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signals")
    reference.write_checkpoint(folder / "src", STAGES, PARAMS)
    return folder, reference.write_strategy(folder / "a.ckpt", STAGES)


def interrupt(place, processes, rng, number):
    """Run the command, send the signal at a moment of its first second; return how it ended."""
    folder, strategy = place
    dst = folder / f"dst{rng.randrange(10**9)}"
    line = [*(mpirun(processes) if processes else []), sys.executable, "-c", START]
    line += ["transform", folder / "src", dst, "--src-strategy", strategy, "--progress", "none"]
    with own_tmp() as tmp:
        process = subprocess.Popen(
            list(map(str, line)), env=environment(TMPDIR=tmp), cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            for _ in range(max(1, processes)):
                while "now" not in (line := process.stdout.readline()):
                    assert line, process.stderr.read()
            time.sleep(rng.random())
            process.send_signal(number)
            output, errors = process.communicate(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output, errors, dst


def own_lines(errors):
    return [line for line in errors.splitlines() if "rankxform" in line]


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("processes", [0, 3])
def test_every_moment_ends_well(place, processes, name):
    rng = random.Random(f"{name} {processes} {MOMENTS}")
    is_open_mpi = (
        "Open MPI"
        in subprocess.run([*mpirun(1)[:1], "--version"], capture_output=True, text=True).stdout
    )
    ended = []
    for _ in range(MOMENTS if not processes else max(2, MOMENTS // 3)):
        code, output, errors, dst = interrupt(place, processes, rng, getattr(signal, name))
        ended.append(code)
        told = f"{code}: {output}\n{errors}"
        assert "Traceback" not in errors and "Segmentation" not in errors, told
        if processes and (is_open_mpi or name == "SIGHUP"):
            continue  # Open MPI's mpirun kills processes half a second after a signal, MPICH's dies
        if "mpiexec" in errors and (dst / "rankxform.json").exists():
            continue  # it was done, and mpirun could not pass the signal on any more
        if code == 0:
            assert (dst / "rankxform.json").exists(), told
            continue
        assert code == STOPPED, told
        lines = own_lines(errors)
        assert len(lines) == 1 and re.search(f"stopped by {name}", lines[0]), told
    assert ended
