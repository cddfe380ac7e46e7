"""What a metadata.json states: a strategy, as MindFormers writes it."""

from __future__ import annotations

import json

import pytest

import rankxform
from rankxform.storage import user_files
from tests.checkpoints import DATA, METADATA, STRATEGY


@pytest.mark.parametrize("sample", ["checkpoint2", "checkpoint2_2026"])
def test_metadata_is_what_mindformers_writes(sample, tmp_path):
    """Value for value, key order included; the older sample has no `rank_group`."""
    src = DATA / "unified" / "src"
    rankxform.transform(
        src, tmp_path / "dst", STRATEGY, STRATEGY, dst_form="checkpoint2", prefix="llm"
    )
    ours = (tmp_path / "dst" / METADATA).read_text()
    theirs = (DATA / sample / METADATA).read_text()
    if sample == "checkpoint2_2026":
        assert ours == theirs
        return
    known = json.loads(ours)
    for entries in known["storage_data"].values():
        for one in entries:
            del one["rank_group"]
    assert json.dumps(known) == json.dumps(json.loads(theirs))


def test_metadata_is_a_strategy():
    known = user_files.load_strategy(str(DATA / "checkpoint2" / METADATA))
    assert known.extent == "2 stages of 4 ranks"
    assert (
        user_files.load_strategy(str(DATA / "checkpoint2" / "iteration_00000100")).stages
        == known.stages
    )
