"""Asked to stop, by a signal, a time limit or a lost process, a run ends soon and can go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import reference
from tests.mpi_launch import environment, mpirun, own_tmp
from tests.place import Place
from tests.trust import victim

ROOT = Path(__file__).parents[2]
NAMES = [f"w{i}" for i in range(200)]
PARAMS = dict.fromkeys(NAMES, ((12, 4), "Float32"))
SRC = [dict.fromkeys(NAMES, ([4], [0, -1], 0, 0))]
DST = [dict.fromkeys(NAMES, ([3], [0, -1], 0, 0))]


def is_open_mpi():
    text = subprocess.run([*mpirun(1)[:1], "--version"], capture_output=True, text=True).stdout
    return "Open MPI" in text


class SlowPlace(Place):
    """Conversions run here in processes that are slow enough to be interrupted."""

    def __init__(self, tmp):
        super().__init__(tmp, SRC, DST, PARAMS)
        self.mark = f"VICTIM_ID={tmp}"

    def start(self, processes, *options, pause=0.05):
        line = [*(mpirun(processes) if processes else []), sys.executable, "-m", "tests.trust.slow"]
        strategies = "--src-strategy", self.a, "--dst-strategy", self.b
        line += ["transform", self.src, self.dst, *strategies]
        env = environment(
            SLOW_SECONDS=str(pause), VICTIM_ID=self.mark.partition("=")[2], TMPDIR=self.tmp
        )
        return subprocess.Popen(
            [*map(str, line), "--progress", "none", *options], env=env, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def wait_for_work(self, process, processes):
        """Wait until all are at work for a moment; return the process ids of the ranks."""
        pids = []
        while len(pids) < max(processes, 1):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            pids += [int(pid) for pid in re.findall(r"at work (\d+)", line)]
        time.sleep(0.5)
        return pids

    def left(self):
        return victim.relatives(self.mark.encode())

    def go_on(self, processes, continued=3):
        process = self.start(processes, pause=0)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, output + errors
        if continued:
            assert (
                f"continued an earlier run: 0 of 3 files were complete, {continued} begun" in output
            )
        assert reference.wrong_slices(self.dst, DST, PARAMS) == []


@pytest.fixture
def place(tmp_path):
    place = SlowPlace(tmp_path)
    with own_tmp() as place.tmp:
        yield place
        for pid, _ in place.left():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("processes", [0, 2])
def test_a_signal_stops_in_time_and_says_how_to_go_on(processes, number, place):
    process = place.start(processes)
    place.wait_for_work(process, processes)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert not list(place.dst.glob("rank_*/*.ckpt"))
    if processes and number != signal.SIGUSR1 and is_open_mpi():
        place.go_on(3, continued=0)  # it kills after a quarter of a second: what is on disk counts
        return
    assert process.returncode == 75
    assert errors.count(f"rankxform: error: stopped by {number.name}") == 1
    assert errors.count("run the same command again to continue") == 1
    place.go_on(3)


def test_a_signal_to_one_process_stops_all(place):
    process = place.start(3)
    pids = place.wait_for_work(process, 3)
    os.kill(pids[1], signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 75
    assert re.search(r"(?s)stopped by SIGTERM\n.*met by process \d of 3", errors)
    place.go_on(2)


def test_a_second_signal_ends_at_once(place):
    process = place.start(0, pause=3)
    place.wait_for_work(process, 0)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=2)
    assert process.returncode == 75


@pytest.mark.parametrize("processes", [0, 3])
def test_a_time_limit_stops_before_it_has_passed(processes, place):
    process = place.start(processes, "--time-limit", "3")
    began = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 75
    assert time.monotonic() - began < 8
    assert errors.count("rankxform: error: stopped: the time limit is near") == 1
    place.go_on(2)


def test_a_lost_process_ends_all_within_the_stall_limit(place):
    process = place.start(3, "--stall-limit", "2")
    pids = place.wait_for_work(process, 3)
    os.kill(pids[1], signal.SIGSTOP)
    until = time.monotonic() + 20
    while any(pid in pids and pid != pids[1] for pid, _ in place.left()):
        assert time.monotonic() < until, "the others still run"
        time.sleep(0.1)
    for pid, _ in place.left():
        os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert errors.count("no answer from a process for 2 s") == 1
    place.go_on(2, continued=0)
