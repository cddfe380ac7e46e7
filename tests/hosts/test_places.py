"""A node of four is lost with its disk: the others go on with what they and storage have."""

from __future__ import annotations

import re
import shutil
import sys

import pytest

from tests import reference
from tests.hosts.machines import LOCAL, NETWORK, SFTP, require
from tests.hosts.test_exchange import COLUMN, ROW, TOTAL, big, clean, gathered, hosts

__all__ = ["clean", "hosts"]

SAMPLES = 8 * 9 * (128 << 10)
"""Headers and samples of 8 files; a network file system reads 128 KiB at least for each."""


@pytest.mark.parametrize("replicas", [1, 2])
def test_storage_is_asked_for_what_no_survivor_has(replicas, clean):
    """Ranks 6 and 7 are lost, and storage has all: one matrix of 8 rows, or of 4 rows twice."""
    require("sshfs", SFTP)
    matrix = [8] if replicas == 1 else [2, 4]
    case = big((matrix, ROW), ([6], COLUMN))
    made = clean.shared / "made"
    shutil.rmtree(made, ignore_errors=True)
    reference.write_checkpoint(made / "src", case.src, case.params, None, "safetensors")
    options = []
    for side, stages in (("src", case.src), ("dst", case.dst)):
        options += [f"--{side}-strategy", reference.write_stage_files(made / side[0], stages)]
    for rank in range(6):
        home = clean.disk(clean.names[rank // 2]) / "src" / f"rank_{rank}"
        shutil.copytree(made / "src" / f"rank_{rank}", home)
    with clean.storage():
        shutil.copytree(made / "src", clean.disk("storage") / "src")
        served, crossed = clean.sent(["storage"]), clean.sent()
        code, output = clean.mpirun(
            1, sys.executable, "-m", "rankxform", "transform", LOCAL / "src", LOCAL / "dst",
            *options, "--fallback", NETWORK / "src", "--no-fsync",
        )  # fmt: skip
        served, crossed = clean.sent(["storage"]) - served, clean.sent() - crossed
    assert code == 0, output
    assert reference.wrong_slices(gathered(clean), case.dst, case.params, "safetensors") == []
    of_storage = TOTAL // 4 if replicas == 1 else 0
    # Each node has two files of six, and makes two ranks of six, of which a third lies in each file.
    assert re.search(
        rf"{NETWORK}/src: "
        + ("14.2 MB of ranks 6-7" if of_storage else "nothing was needed of it"),
        output,
    )
    assert of_storage <= served <= 1.05 * of_storage + SAMPLES, output
    assert crossed <= 1.05 * 2 * TOTAL / 3 + 2.5e6, output
    code, output = clean.mpirun(
        1, sys.executable, "-m", "rankxform", "plan", LOCAL / "src", *options,
    )  # fmt: skip
    assert (code == 0) == (replicas == 2), output
    lost = ("rank 6 has no file (looked on h1, h2, h3)", "slices of rank 7 are lost too")
    assert replicas == 2 or all(words in output for words in lost)
