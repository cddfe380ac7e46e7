"""The verb `transform`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.test_main import command, place, right

__all__ = ["place"]


@pytest.mark.parametrize("processes", [None, 1, 2, 5])
def test_transform(processes, place):
    code, output = command(
        "transform", place.src, place.dst, *place.strategies,
        processes=processes,
    )  # fmt: skip
    assert code == 0, output
    assert right(place)
    assert "4 ranks, epoch 3 step 70" in output
    assert re.search(rf"rankxform [\d.]+, {processes or 1} process", output)
    assert "left out  adam_m.* (1): 192 B; optimizer state" in output
    assert output.count("\ndone ") == 1, "one process speaks"


@pytest.mark.parametrize("processes", [None, 2])
def test_a_folder_with_anothers_checkpoint_is_no_destination(processes, place):
    """Such as the source, if SRC and DST are exchanged."""
    foreign = place.dst / "rank_0" / "trained-3_70.ckpt"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"theirs")
    words = ["transform", place.src, place.dst, *place.strategies]
    code, output = command(*words, processes=processes)
    assert code == 4 and "or   exchange SRC and DST, if" in output, output
    assert [p for p in place.dst.rglob("*") if p.is_file()] == [foreign]
    code, output = command(*words, "--overwrite", processes=processes)
    assert code == 0 and "another checkpoint file lies beside" in output.splitlines()[-1]
    code, output = command(*words, processes=processes)
    assert code == 0 and "complete already" in output and right(place), output
    assert foreign.read_bytes() == b"theirs"


@pytest.mark.parametrize("processes", [None, 2])
def test_a_dry_run_prints_the_plan_and_the_time_and_leaves_nothing(processes, place):
    before = sorted(place.dst.parent.iterdir())
    code, output = command(
        "transform", place.src, place.dst, *place.strategies, "--dry-run", processes=processes
    )
    assert code == 0, output
    assert sorted(place.dst.parent.iterdir()) == before
    told = re.search(r"take about ([\d.]+) (us|ms|s): .* measured with 64 MiB", output)
    assert told and 0 < float(told[1]) < 1000
    rows = [line.split() for line in output.splitlines() if line[:4].strip().isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert all(
        line.endswith("0, 1, 2, 3") for line in output.splitlines() if line[:4].strip().isdigit()
    )


@pytest.mark.parametrize("processes", [None, 2])
def test_a_step_that_a_rank_lacks_is_warned_of_first_and_last(processes, place):
    for rank in range(3):
        shard = Path(place.src) / f"rank_{rank}/net-3_70.ckpt"
        shard.with_name("net-4_80.ckpt").write_bytes(shard.read_bytes())
    for words in (
        ["transform", place.src, place.dst, *place.strategies],
        ["verify", place.src, place.dst, *place.strategies],
        ["plan", place.src, *place.strategies],
    ):
        code, output = command(*words, processes=processes)
        assert code == 0, output
        lines = output.splitlines()
        assert lines[0] == lines[-1] and lines[0].startswith(
            "WARNING:  epoch 4 step 80 is newer but not complete: rank 3 has no file of it"
        )
        code, output = command(*words, "--step", "latest")
        assert code == 3 and "--step 3_70" in output, output
