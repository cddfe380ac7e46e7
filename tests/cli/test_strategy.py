"""The verbs `merge` and `strategy`."""

from __future__ import annotations

import json
from pathlib import Path

from tests import reference
from tests.cli.test_main import command, place

__all__ = ["place"]


def test_merge_and_inspect(place, tmp_path):
    folder = reference.write_stage_files(
        tmp_path / "stages", [{"w": ([2], [0], 0, 0)}, {"v-1": ([2], [0], 0, 0)}]
    )
    code, output = command("merge", folder, tmp_path / "merged.ckpt")
    assert code == 0, output
    assert "2 stages of 2 ranks" in output and "'v-1'" in output
    code, output = command("merge", folder, tmp_path / "merged.ckpt")
    assert code == 4 and "--overwrite" in output
    for path, words in (
        (tmp_path / "merged.ckpt", "strategy, 2 stages of 2 ranks"),
        (place.src, "checkpoint of 4 ranks, step 3_70"),
        (Path(place.src) / "rank_0" / "net-3_70.ckpt", "ckpt, 2 tensors"),
        (folder, "strategy, 2 stages"),
    ):
        code, output = command("inspect", path)
        assert code == 0, output
        assert words in output
        code, output = command("inspect", path, "--json")
        assert code == 0 and json.loads(output)["path"] == str(path)
