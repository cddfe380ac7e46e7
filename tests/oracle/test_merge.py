"""`merge` writes what merge_pipeline_strategys writes, and MindSpore reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import rankxform

ms = pytest.importorskip("mindspore", reason="MindSpore has no wheel for this Python")
pytestmark = pytest.mark.oracle
REAL = Path(__file__).parents[1] / "data" / "real_strategies"
PIPELINES = sorted(p.parent for p in REAL.rglob("merged_strategy.ckpt"))


def parsed(path):
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    message = ParallelStrategyMap()
    message.ParseFromString(path.read_bytes())
    return message


def stage_files(configuration, kind, target):
    """Copy the stages' files of one kind, which MindSpore wants alone in a folder."""
    target.mkdir()
    for path in (configuration / "strategy").glob(f"*.{kind}"):
        shutil.copy(path, target)
    return target


@pytest.mark.parametrize("configuration", PIPELINES, ids=lambda p: p.name)
def test_protobuf_stages_merge_to_the_same_message(configuration, tmp_path):
    folder = stage_files(configuration, "ckpt", tmp_path / "stages")
    rankxform.merge(folder, tmp_path / "ours.ckpt")
    ms.merge_pipeline_strategys(str(folder), str(tmp_path / "theirs.ckpt"))
    ours, theirs = parsed(tmp_path / "ours.ckpt"), parsed(tmp_path / "theirs.ckpt")
    for part in ("parallel_layout_item", "parallel_strategy_item"):
        by_text = [sorted(map(str, getattr(m, part))) for m in (ours, theirs)]
        assert by_text[0] == by_text[1]
    assert ours.current_stage == theirs.current_stage == 1
    assert set(ms.build_searched_strategy(str(tmp_path / "ours.ckpt"))) == set(
        ms.build_searched_strategy(str(configuration / "merged_strategy.ckpt"))
    )


@pytest.mark.parametrize("configuration", PIPELINES, ids=lambda p: p.name)
def test_json_stages_merge_to_the_same_document(configuration, tmp_path):
    folder = stage_files(configuration, "json", tmp_path / "stages")
    rankxform.merge(folder, tmp_path / "ours.json")
    ms.merge_pipeline_strategys(str(folder), str(tmp_path / "theirs.json"))
    ours, theirs = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("ours", "theirs"))
    assert ours == theirs


@pytest.mark.parametrize("configuration", PIPELINES, ids=lambda p: p.name)
def test_a_merged_file_agrees_with_its_parts(configuration):
    merged = rankxform.inspect(configuration / "merged_strategy.ckpt")
    parts = rankxform.inspect(configuration / "strategy")
    key = lambda layout: (layout["stage"], layout["name"])  # noqa: E731
    assert sorted(merged["layouts"], key=key) == sorted(parts["layouts"], key=key)
    assert merged["ranks"] == parts["ranks"]


def test_ranks_are_among_those_that_mindspore_lists():
    a = str(REAL / "C_transformer" / "dp2mp2pp2_opt" / "merged_strategy.ckpt")
    b = str(REAL / "C_transformer" / "dp1mp4" / "strategy" / "strategy_0.ckpt")
    for src, dst in ((a, b), (b, a), (a, None)):
        for rank, ours in rankxform.ranks(src, dst).items():
            assert set(ours) <= set(map(int, ms.rank_list_for_transform(rank, src, dst)))
