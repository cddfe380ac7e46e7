"""Strategy files, written and read."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankxform.errors import UsageError
from rankxform.storage import user_files
from tests import reference

STAGES = [{"w": ([2], [0], 0, 0)}, {"v": ([2], [0], 0, 0)}]


@pytest.mark.parametrize("kind", ["ckpt", "json"])
def test_merge_writes_what_it_read(kind, tmp_path):
    folder = Path(reference.write_stage_files(tmp_path / "s", STAGES, kind))
    merged = user_files.merge_stage_files(str(folder), str(tmp_path / f"m.{kind}"))
    again = user_files.load_strategy(str(tmp_path / f"m.{kind}"))
    assert again.stages == merged.stages
    user_files.merge_stage_files(str(folder), str(folder / f"m.{kind}"))
    assert (
        user_files.merge_stage_files(str(folder), str(folder / f"m.{kind}"), overwrite=True).stages
        == merged.stages
    )


def test_merge_wants_the_format_of_its_inputs(tmp_path):
    folder = Path(reference.write_stage_files(tmp_path / "s", STAGES))
    with pytest.raises(UsageError, match="no JSON file of pipeline stage 0"):
        user_files.merge_stage_files(str(folder), str(tmp_path / "m.json"))
