"""A file system fills up, or becomes read-only, while a run writes to it: it says so, and is continued."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi_launch import environment
from tests.trust.mounted import FULL, READ_ONLY

ROOT = Path(__file__).parents[2]
STEP = {"all": 1, "third": 5}.get(os.environ.get("RANKXFORM_CRASHES", ""), 11)
"""Per cent of a run's calls between two that are tried."""


@pytest.mark.parametrize("kind", [FULL, READ_ONLY])
def test_the_file_system_fails_at_some_call(kind, tmp_path):
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "mkfs.ext4", "e2fsck"))):
        pytest.skip("mounting needs root and e2fsprogs")
    calls = map(str, range(1, 100, STEP))
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-m", "tests.trust.mounted", kind, tmp_path, *calls],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    if "mount: " in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
