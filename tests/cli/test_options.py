"""Options that are times, and what a scheduler says of the time left."""

from __future__ import annotations

import re
import time

import pytest

from rankxform.cli.options import parse_time, seconds_left


def test_what_slurm_says_is_left():
    left = seconds_left({"SLURM_JOB_END_TIME": str(int(time.time()) + 100)})
    assert 98 <= left <= 100


def test_what_slurm_said_of_a_job_that_has_ended(capfd):
    """Its environment is left in a shell: there is no limit, which process 0 says once."""
    environ = {"SLURM_JOB_END_TIME": "1"}
    assert seconds_left({**environ, "PMI_RANK": "1"}) is None
    assert capfd.readouterr().err == ""
    assert seconds_left(environ) is None
    assert capfd.readouterr().err.count("SLURM_JOB_END_TIME=1 is past") == 1


def test_times():
    assert [parse_time(t) for t in ("2:30", "2h", "0.5")] == [150, 7200, 0.5]
    for bad in ("", "soon", "1:2:3:4", "-5", "1e9"):
        with pytest.raises(ValueError, match=re.escape(bad) or "^$"):
            parse_time(bad)
