"""What `--log` keeps of a run."""

from __future__ import annotations

import re

import pytest

from rankxform.cli.main import main
from tests import reference
from tests.cli.test_command import command

LAYOUTS = [{"w": ([2], [0, -1], 0, 0)}]


@pytest.fixture
def line(tmp_path):
    src = reference.write_checkpoint(tmp_path / "src", LAYOUTS, {"w": ((4, 4), "Float32")})
    a = reference.write_strategy(tmp_path / "a.ckpt", LAYOUTS)
    return ["transform", src, str(tmp_path / "dst"), "--src-strategy", a]


def logged(path):
    """Return the lines of a log without their times, which each has."""
    lines = path.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4}", one) for one in lines)
    return [one[25:] for one in lines]


@pytest.mark.parametrize("quiet", [[], ["-q"], ["--json"]])
def test_all_that_is_printed_and_more(line, tmp_path, capfd, quiet):
    log = tmp_path / "run.log"
    assert main([*line, "--log", str(log), *quiet]) == 0
    told = logged(log)
    assert told[0].startswith("rankxform ") and f"--log {log}" in told[0]
    assert any(one.startswith("from      ") for one in told), "quiet runs say it to the log"
    printed = capfd.readouterr().out.splitlines()
    assert printed and [one for one in told if one in printed] == [p for p in printed if p in told]
    assert not {*printed} - {*told}


def test_an_error_is_added(line, tmp_path, capfd):
    log = tmp_path / "run.log"
    assert main([*line, "--log", str(log)]) == 0
    number = len(logged(log))
    assert main([*line[:-1], "nowhere", "--log", str(log)]) == 2
    added = logged(log)[number:]
    assert added[1].startswith("rankxform: error: ") and "nowhere" in added[1]


def test_under_mpirun_one_process_writes(line, tmp_path):
    log = tmp_path / "run.log"
    code, output = command(*line, "--log", log, processes=3)
    assert code == 0, output
    assert sum(one.startswith("done ") for one in logged(log)) == 1


def test_where_no_log_can_be(line, tmp_path, capfd):
    assert main([*line, "--log", f"{line[1]}/run.log"]) == 2
    assert "lies in SRC" in capfd.readouterr().err
    assert main([*line, "--log", str(tmp_path / "no" / "run.log")]) == 4
    assert not (tmp_path / "dst").exists()
