"""Strategy files and folders of them, as users give them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rankxform.errors import StrategyError, UsageError
from rankxform.storage import user_files
from tests import reference
from tests.formats.test_strategy_files import STAGES

REAL = Path(__file__).parents[1] / "data" / "real_strategies"


@pytest.mark.parametrize("kind", ["ckpt", "json"])
def test_a_folder_of_stages_in_any_order_of_names(kind, tmp_path):
    folder = Path(reference.write_stage_files(tmp_path / "s", STAGES, kind))
    max(folder.iterdir()).rename(folder / f"a.{kind}")
    strategy = user_files.load_strategy(str(folder))
    assert [list(stage) for stage in strategy.stages] == [["w"], ["v"]]
    assert strategy.ranks == 4 and strategy.stages_of == {"w": (0,), "v": (1,)}


def test_every_rank_may_have_saved_or_one_of_each_stage(tmp_path):
    folder = Path(reference.write_stage_files(tmp_path / "s", STAGES))
    shutil.copy(folder / "ckpt_strategy_rank_0.ckpt", folder / "ckpt_strategy_rank_7.ckpt")
    assert len(user_files.load_strategy(str(folder)).stages) == 2


def test_a_merged_file_beside_its_parts_must_agree(tmp_path):
    folder = Path(reference.write_stage_files(tmp_path / "s", STAGES))
    reference.write_strategy(folder / "merged_ckpt_strategy.ckpt", STAGES)
    assert len(user_files.load_strategy(str(folder)).stages) == 2
    other = [STAGES[0], {"v": ([2], [-1], 0, 0)}]
    reference.write_strategy(folder / "merged_ckpt_strategy.ckpt", other)
    with pytest.raises(StrategyError, match="merged_ckpt_strategy.ckpt and .*rank_1.ckpt both"):
        user_files.load_strategy(str(folder))


def test_json_twins_of_protobuf_files_must_agree_too(tmp_path):
    folder = Path(reference.write_stage_files(tmp_path / "s", STAGES))
    reference.write_stage_files(folder, STAGES, "json")
    assert len(user_files.load_strategy(str(folder)).stages) == 2
    reference.write_stage_files(folder, [STAGES[0], {"v": ([2], [-1], 0, 0)}], "json")
    with pytest.raises(StrategyError, match=r"rank_1.ckpt and .*rank_1.json both"):
        user_files.load_strategy(str(folder))


@pytest.mark.parametrize("folder", sorted(REAL.glob("*/*/strategy")), ids=lambda p: p.parent.name)
def test_real_twins_agree(folder):
    assert user_files.load_strategy(str(folder)).stages


def test_an_unmerged_file_of_a_later_stage_alone_is_incomplete(tmp_path):
    folder = Path(reference.write_stage_files(tmp_path / "s", STAGES))
    with pytest.raises(StrategyError, match="no strategy of pipeline stage 0 .*stage 1 in"):
        user_files.load_strategy(str(folder / "ckpt_strategy_rank_1.ckpt"))


def test_an_empty_folder(tmp_path):
    with pytest.raises(StrategyError, match="holds no strategy file"):
        user_files.load_strategy(str(tmp_path))
    with pytest.raises(UsageError, match="no such strategy"):
        user_files.load_strategy(str(tmp_path / "nowhere"))
