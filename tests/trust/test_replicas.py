"""Source ranks that should hold the same bytes and do not are found, and named."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from rankxform.request import Request
from rankxform.transport import SerialTeam
from rankxform.verbs.check import compare_replicas
from tests import reference
from tests.mpi_launch import environment, mpirun, run

PARAMS = {"w": ((8, 6), "Float32"), "v": ((4,), "Float16")}
SRC = [{"w": ([2, 4], [0, -1], 0, 0), "v": ([2, 4], [-1], 0, 0)}]


@pytest.fixture
def place(tmp_path):
    folder = reference.write_checkpoint(
        tmp_path / "src", SRC, PARAMS, {"step": ("Int32", np.array([3], "<i4"))}
    )
    return folder, reference.write_strategy(tmp_path / "a.ckpt", SRC), tmp_path


def taint(folder, rank, name):
    """Change one element of a rank's slice."""
    path = f"{folder}/rank_{rank}/checkpoint_{rank}.ckpt"
    entries = {
        n: (d, np.frombuffer(data, reference.WORD[reference.ITEM[d]]).reshape(shape).copy())
        for n, (d, shape, data) in reference.read_ckpt(path).items()
    }
    entries[name][1].reshape(-1)[-1] ^= 1
    reference.write_ckpt(path, entries)


def compare(folder, a):
    return compare_replicas(Request(folder, None, a, a), SerialTeam())


def test_equal_replicas_pass(place):
    folder, a, _ = place
    found = compare(folder, a)
    assert found.differences == () and found.files_compared == 8
    assert found.bytes_compared == 8 * (2 * 6 * 4 + 4 * 2 + 4)


@pytest.mark.parametrize("name", ["w", "v", "step"])
@pytest.mark.parametrize("rank", range(8))
def test_each_differing_rank_is_named(rank, name, place):
    folder, a, _ = place
    taint(folder, rank, name)
    (one,) = compare(folder, a).differences
    others = [r for r in range(8) if r != rank and (name != "w" or r % 4 == rank % 4)]
    first, second = sorted([(rank,), tuple(others)], key=lambda g: (-len(g), g))
    assert (one.name, one.groups) == (name, (first, second))
    if name == "w":
        assert one.box.start == (rank % 4 * 2, 0)


def test_without_replicas_nothing_is_said_to_be_the_same(tmp_path):
    stages = [{"w": ([4], [0, -1], 0, 0)}]
    src = reference.write_checkpoint(tmp_path / "src", stages, {"w": ((8, 2), "Float32")})
    a = reference.write_strategy(tmp_path / "a.ckpt", stages)
    line = [sys.executable, "-m", "rankxform", "inspect", "--replicas", src, "--src-strategy", a]
    code, output = run([*map(str, line)], 60, env=environment())
    assert code == 6 and output.startswith("NOTHING COMPARED")
    code, output = run([*map(str, line), "--json"], 60, env=environment())
    assert code == 6 and json.loads(output)["same"] is None


@pytest.mark.parametrize("processes", [1, 3])
def test_the_command(processes, place):
    folder, a, _ = place
    line = [*mpirun(processes), sys.executable, "-m", "rankxform", "inspect", "--replicas", folder]
    line = [str(word) for word in [*line, "--src-strategy", a]]
    code, output = run(line, 60, env=environment())
    assert code == 0 and output.startswith("same      all bytes that several ranks hold, 480 B")
    taint(folder, 1, "v")
    code, output = run(line, 60, env=environment())
    assert code == 6
    assert "0, 2, 3, 4, 5, 6, 7 | 1" in output and "DIFFERENT: 1 place" in output
    code, output = run([*line, "--json"], 60, env=environment())
    facts = json.loads(output[: output.rindex("}") + 1])
    assert code == 6 and facts["differences"][0]["groups"] == [[0, 2, 3, 4, 5, 6, 7], [1]]
