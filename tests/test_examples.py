"""Every example runs, as a person would run it, and says that its results are right."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi_launch import environment

ROOT = Path(__file__).parents[1]
NOT_RUN_ALONE = {"__init__", "steps", "demo", "transform_by_rank"}
IN_MEMORY = {"living_job"}
NEED_MINDSPORE = {"data_parallel", "four_ways", "lost_process", "training_goes_on"}
EXAMPLES = sorted({path.stem for path in (ROOT / "examples").glob("*.py")} - NOT_RUN_ALONE)


@pytest.mark.sampled
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs_and_its_results_are_right(name, tmp_path):
    if name in NEED_MINDSPORE and not importlib.util.find_spec("mindspore"):
        pytest.skip("MindSpore has no wheel for this Python")
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}", tmp_path / "here"],
        cwd=ROOT,
        env=environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checked:" in done.stdout or "the same" in done.stdout
    assert "WRONG" not in done.stdout + done.stderr
    if name not in IN_MEMORY:
        assert "peak memory" in done.stdout, "the command itself was run"


def test_all_of_the_tutorials_scenarios_are_there():
    assert set(EXAMPLES) == {
        "any_number", "by_hand", "complete", "data_parallel", "fewer_ranks", "four_ways", "living_job", "lost_process",
        "other_sharding", "pipeline", "training_goes_on",
    }  # fmt: skip
