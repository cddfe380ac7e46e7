"""A conversion that an earlier commit began is continued by this one, or refused in words."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import reference
from tests.corpus import digests

ROOT = Path(__file__).parents[2]
NAMES = [f"w{i}" for i in range(40)]
COMMITS = {"cd52c59": "before the names of the package changed", "HEAD~1": "the commit before"}


def records_version(package):
    """Return the version of the records that a package writes."""
    text = (package / "rankxform/publish/records.py").read_text()
    return int(re.search(r"^VERSION = (\d+)$", text, re.M)[1])


def git(*words):
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)


@pytest.fixture(params=COMMITS)
def earlier(request, tmp_path):
    """Return a folder with the package of an earlier commit."""
    archive = git("archive", request.param, "rankxform", "tests/trust/slow.py")
    if archive.returncode:
        pytest.skip(f"this clone has no {request.param}, {COMMITS[request.param]}")
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=archive.stdout, check=True)
    return tmp_path


@pytest.mark.sampled
@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
def test_an_earlier_commit_begins_and_this_one_ends(suffix, earlier, tmp_path):
    here = tmp_path / "here"
    params = dict.fromkeys(NAMES, ((64, 64), "Float32"))
    for name, tensor_map in (("a", [0, -1]), ("b", [-1, 0])):
        here.mkdir(exist_ok=True)
        reference.write_strategy(here / name, [dict.fromkeys(NAMES, ([4], tensor_map, 0, 0))])
    layouts = [dict.fromkeys(NAMES, ([4], [0, -1], 0, 0))]
    reference.write_checkpoint(here / "src", layouts, params, None, suffix)
    words = ["--src-strategy", "a", "--dst-strategy", "b", "--format", suffix]

    def run(package, *command, seconds=0):
        return subprocess.Popen(
            [sys.executable, *command], cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(package), "SLOW_SECONDS": str(seconds)},
        )  # fmt: skip

    with run(
        earlier, earlier / "tests/trust/slow.py", "transform", "src", "out", *words, seconds=0.02
    ) as begun:
        assert any(b"at work" in line for line in begun.stdout)
        begun.send_signal(signal.SIGTERM)
        begun.communicate()
    assert begun.returncode == 75
    assert (here / "out" / ".rankxform" / "job.json").is_file()
    package = ROOT
    if records_version(earlier) != records_version(ROOT):
        before = digests(here / "out")
        with run(ROOT, "-m", "rankxform", "transform", "src", "out", *words) as refused:
            _, told = refused.communicate()
        assert refused.returncode == 4
        assert b"job.json: expected version 4, found 3" in told and b"use that rankxform" in told
        assert digests(here / "out") == before, "nothing is lost"
        package = earlier
    for folder in ("out", "whole"):
        with run(package, "-m", "rankxform", "transform", "src", folder, *words) as ended:
            ended.communicate()
        assert ended.returncode == 0
    assert digests(here / "out") == digests(here / "whole")
