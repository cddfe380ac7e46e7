"""Blocks shared with the source, on real file systems in loop devices."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

import rankxform
from tests import reference

MANY, ROWS, COLUMNS = 4, 4096, 256
PARAMS = {f"layers.{i}.weight": ((ROWS, COLUMNS), "Float32") for i in range(MANY)}
PARAMS["norm"] = (5,), "Float32"
TOTAL = MANY * ROWS * COLUMNS * 4


def layouts(matrix, tensor_map):
    found = dict.fromkeys(PARAMS, (matrix, tensor_map, 0, 0))
    return [{**found, "norm": (matrix, [-1], 0, 0)}]


ROWS_4, ROWS_2 = layouts([4], [0, -1]), layouts([2], [0, -1])
COLUMNS_2 = layouts([2], [-1, 0])


@pytest.fixture(params=["xfs", "btrfs"])
def disk(request, tmp_path):
    """A new file system of its own."""
    image, where = tmp_path / "image", tmp_path / "disk"
    where.mkdir()
    image.touch()
    os.truncate(image, 512 << 20)
    try:
        subprocess.run([f"mkfs.{request.param}", "-q", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, where], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("RANKXFORM_HOSTS") == "required":
            raise
        pytest.skip(f"no {request.param} in a loop device here: {error}")
    yield where
    subprocess.run(["umount", where], check=True)


def used(disk):
    os.sync()
    status = os.statvfs(disk)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def strategy(disk, name, stages):
    reference.write_strategy(disk / f"{name}.ckpt", stages)
    return disk / f"{name}.ckpt"


def allocated(disk, src, dst, a, b, **options):
    before = used(disk)
    done = rankxform.transform(
        disk / src, disk / dst, disk / f"{a}.ckpt", disk / f"{b}.ckpt", format="safetensors",
        fsync=False, **options,
    )  # fmt: skip
    assert done.bytes_written >= TOTAL
    sharing = used(disk) - before
    # What is not whole blocks on both sides is copied.
    assert (done.bytes_shared > 0.9 * TOTAL) == (sharing < 0.1 * TOTAL)
    return sharing


def test_blocks_are_shared_where_whole_rows_move(disk):
    for name, stages in (("a", ROWS_4), ("b", ROWS_2), ("c", COLUMNS_2)):
        strategy(disk, name, stages)
    reference.write_checkpoint(disk / "src", ROWS_4, PARAMS, None, "safetensors")
    original = {path: path.read_bytes() for path in (disk / "src").rglob("*.safetensors")}
    steps = (
        ("src", "same", "a", "a", ROWS_4),
        ("same", "merged", "a", "b", ROWS_2),
        ("merged", "split", "b", "a", ROWS_4),
    )
    for src, dst, a, b, stages in steps:
        assert allocated(disk, src, dst, a, b) < 0.1 * TOTAL, dst  # the rest is the journal's
        assert reference.wrong_slices(disk / dst, stages, PARAMS, "safetensors") == []
        strategies = disk / f"{a}.ckpt", disk / f"{b}.ckpt"
        assert rankxform.verify(disk / src, disk / dst, *strategies).same
    allocated(disk, "merged", "columns", "b", "c")
    assert reference.wrong_slices(disk / "columns", COLUMNS_2, PARAMS, "safetensors") == []
    assert allocated(disk, "src", "checked", "a", "b", verify=True) > 0.9 * TOTAL
    for file in ("checkpoint_0.safetensors", "checkpoint_1.safetensors"):
        one, other = (next((disk / d).rglob(file)).read_bytes() for d in ("merged", "checked"))
        assert one == other
    shutil.rmtree(disk / "same")
    assert {path: path.read_bytes() for path in original} == original


def test_a_source_that_ends_early_is_an_error_here_too(disk):
    strategy(disk, "a", ROWS_4)
    strategy(disk, "b", ROWS_2)
    reference.write_checkpoint(disk / "src", ROWS_4, PARAMS, None, "safetensors")
    (path,) = (disk / "src" / "rank_1").glob("*.safetensors")
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(rankxform.CheckpointError, match="rank_1"):
        allocated(disk, "src", "dst", "a", "b")
