"""Conversions by processes of two nodes on file systems that keep no caches coherent.

RANKXFORM_FILESYSTEMS names the file systems (default: juicefs,seaweedfs). On every push each gets ten
conversions and three kills; RANKXFORM_CONVERSIONS asks for more (`make filesystems`).
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests import reference
from tests.hosts import filesystems
from tests.mpi_launch import environment, mpirun, own_tmp, run
from tests.place import Place
from tests.trust.test_kills import clear_away

ROOT = Path(__file__).parents[2]
KINDS = os.environ.get("RANKXFORM_FILESYSTEMS", "juicefs,seaweedfs").split(",")
CONVERSIONS = int(os.environ.get("RANKXFORM_CONVERSIONS", "10"))
MUST_SUCCEED, KILLS, STARTS = CONVERSIONS - max(1, CONVERSIONS // 15), CONVERSIONS // 3, 4
PARAMS = {f"w{i}": ((48, 8192 + 1024 * (i % 3)), "Float32") for i in range(12)}  # 20 MB
SRC = [dict.fromkeys(PARAMS, ([4], [0, -1], 0, 0))]
DSTS = [
    [dict.fromkeys(PARAMS, ([1], [-1, -1], 0, 0))],
    [dict.fromkeys(PARAMS, ([3], [0, -1], 0, 0))],
    [dict.fromkeys(PARAMS, ([2, 2], [1, 0], 0, 0))],
]
"""Fewer files than processes, mostly."""


@pytest.fixture(scope="module", params=KINDS)
def mounts(request, tmp_path_factory):
    reason = filesystems.why_not(*filesystems.PROGRAMS[request.param])
    if reason:
        pytest.skip(reason)
    with filesystems.mounted(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A source on the machine's own disk, and a strategy for each destination."""
    tmp = tmp_path_factory.mktemp("place")
    found = Place(tmp, SRC, DSTS[0], PARAMS, make=reference.counting_tensor)
    for number, dst in enumerate(DSTS):
        reference.write_strategy(tmp / f"{number}.ckpt", dst)
    return found


def command(place, mounts, processes, number, name, swapped=False, module="rankxform"):
    """Return the words of a conversion by processes of two nodes."""
    return [
        *mpirun(processes), *mounts.seen(-(-processes // 2), swapped), sys.executable, "-m", module,
        "transform", str(place.src), str(mounts.view / name), "--src-strategy", str(place.a),
        "--dst-strategy", str(place.tmp / f"{number}.ckpt"),
    ]  # fmt: skip


def convert(*what, more=(), **settings):
    with own_tmp() as tmp:
        words = [*command(*what, module=settings.pop("module", "rankxform")), *more]
        return run(words, 120, env=environment(TMPDIR=tmp, **settings), cwd=ROOT)


def wrong(mounts, number, name):
    """Return the slices that either mount shows wrong."""
    return [
        one
        for mount in (mounts.a, mounts.b)
        for one in reference.wrong_slices(
            mount / name, DSTS[number], PARAMS, make=reference.counting_tensor
        )
    ]


def test_every_success_is_right_from_both_mounts(mounts, place):
    rng, succeeded, others = random.Random(7), 0, []
    for at in range(CONVERSIONS):
        processes, number = rng.randint(2, 6), rng.randrange(len(DSTS))
        name = f"out{at}"
        code, output = convert(place, mounts, processes, number, name)
        if code == 0:
            succeeded += 1
            assert wrong(mounts, number, name) == [], (at, processes, number)
            assert "one node writes each file" in output
        else:
            others.append((at, processes, number, code, output[-500:]))
    assert succeeded >= MUST_SUCCEED, others


def test_a_killed_run_is_continued(mounts, place):
    rng = random.Random(8)
    for kill in range(KILLS):
        processes, number = rng.randint(2, 4), rng.randrange(len(DSTS))
        name, mark = f"killed{kill}", f"{os.getpid()}-{mounts.a.parent.name}-{kill}"
        settings = {
            "VICTIM_ID": mark,
            "VICTIM_PROCESS": str(rng.randrange(processes)),
            "VICTIM_CALL": str(rng.randint(1, 60)),
            "VICTIM_WHOM": rng.choice(("one", "all")),
        }
        convert(place, mounts, processes, number, name, module="tests.trust.victim", **settings)
        clear_away(f"VICTIM_ID={mark}".encode())
        code, output = convert(place, mounts, rng.randint(2, 4), number, name)
        if code:
            pytest.fail(f"{settings}\n{output}")
        assert wrong(mounts, number, name) == [], settings


def test_of_two_that_start_at_once_one_is_refused(mounts, place):
    refused = 0
    for at in range(STARTS):
        name = f"both{at}"
        with own_tmp() as tmp:
            both = [
                subprocess.Popen(
                    command(place, mounts, 2, 1, name, swapped),
                    env=environment(TMPDIR=tmp),
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for swapped in (False, True)
            ]
            outputs = [process.communicate(timeout=120)[0] for process in both]
        codes = sorted(process.returncode for process in both)
        assert codes in ([0, 0], [0, 4]), outputs  # the later may find all done
        if codes[1]:
            assert any("works on this folder" in output for output in outputs), outputs
            refused += 1
        assert wrong(mounts, 1, name) == []
    assert refused


def test_writes_of_two_nodes_to_one_file_are_warned_of(mounts, place):
    """What the file system loses then is found by samples (code 4), or said to be possible."""
    code, output = convert(place, mounts, 4, 0, "any", more=["--writers", "any"])
    assert code in (0, 4), output
    assert output.count("writes of two nodes to one file may undo each other") == 2 - bool(code)
