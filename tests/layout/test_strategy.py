"""How strategy files become one strategy."""

from __future__ import annotations

import pytest

from rankxform.errors import StrategyError
from rankxform.storage import user_files
from tests import reference


@pytest.mark.parametrize("where", [None, "", "none", "None"])
def test_none_lists_every_parameter_whole_on_one_rank(where):
    strategy = user_files.load_strategy(where)
    assert strategy.ranks == 1 and "anything" in strategy
    assert strategy.layout("anything", 0, 2).counts == (1, 1)


def test_dashes_in_names(tmp_path):
    stages = [{"0-a-b": ([2], [0], 0, 0)}, {"my-w": ([2], [0], 0, 0)}]
    merged = user_files.load_strategy(reference.write_strategy(tmp_path / "m.ckpt", stages))
    assert merged.stages_of == {"0-a-b": (0,), "my-w": (1,)}
    unmerged = user_files.load_strategy(reference.write_strategy(tmp_path / "u.ckpt", stages[:1]))
    assert unmerged.stages_of == {"0-a-b": (0,)}


def test_layouts_on_numbers_of_ranks_that_do_not_divide_one_another(tmp_path):
    path = reference.write_strategy(
        tmp_path / "s.ckpt", [{"w": ([4], [0], 0, 0), "v": ([6], [0], 0, 0)}]
    )
    with pytest.raises(StrategyError, match="'w' is laid out on 4 ranks, another parameter on 6"):
        user_files.load_strategy(path)


def stages_of(ranks, *layers):
    """Return pipeline stages of these layers, each with states and a tied embedding."""
    names = [[f"layers.{n}.w" for n in some] + ["embedding"] for some in layers]
    layouts = [([n], [0], 0, 0) for n in ranks]
    return [
        {state + name: layout for name in some for state in ("", "adam_m.", "adam_v.")}
        for some, layout in zip(names, layouts)
    ]


class TestStagesOfTwoJobs:
    """One job ran in the folder of another: each file is right, and their union is nobody's."""

    def test_of_other_numbers_of_ranks(self, tmp_path):
        folder = reference.write_stage_files(tmp_path / "s", stages_of([4, 2], [0, 1], [2, 3]))
        with pytest.raises(StrategyError, match=r"0 and 1 are of two jobs, of 4 and 2 ranks"):
            user_files.load_strategy(folder)

    @pytest.mark.parametrize("kind", ["ckpt", "json"])
    def test_of_other_layers(self, tmp_path, kind):
        layers = [*range(4)], [4, 5, 6, 7], [4, 5], [6, 7]
        folder = reference.write_stage_files(tmp_path / "s", stages_of([2] * 4, *layers), kind)
        with pytest.raises(StrategyError, match="two jobs, which both list 2 parameters") as caught:
            user_files.load_strategy(folder)
        assert f"rank_1.{kind} and " in str(caught.value)

    def test_merged_into_one_file(self, tmp_path):
        stages = stages_of([2] * 3, [0, 1, 2, 3], [2, 3], [4, 5])
        path = reference.write_strategy(tmp_path / "m.ckpt", stages)
        with pytest.raises(StrategyError, match="stages 0 and 1 are of two jobs"):
            user_files.load_strategy(path)

    def test_what_has_no_number_may_be_in_two_stages(self, tmp_path):
        stages = stages_of([2] * 2, [0], [1])
        for stage in stages:
            stage.update(dict.fromkeys(("position", "token_type", "mask"), ([2], [0], 0, 0)))
        path = reference.write_strategy(tmp_path / "m.ckpt", stages)
        assert len(user_files.load_strategy(path).stages) == 2

    def test_a_tied_embedding_with_its_states_is_none(self, tmp_path):
        path = reference.write_strategy(tmp_path / "m.ckpt", stages_of([2] * 2, [0], [1]))
        assert len(user_files.load_strategy(path).stages) == 2
