"""An error under a strategy that is not the checkpoint's says which is, if that can be seen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import rankxform
from tests import reference

PARAMS = {"w": ((16, 8), "Float32"), "x": ((8, 8), "Float32")}


def rows(ranks, names=tuple(PARAMS)):
    return [{name: ([ranks], [0, -1], 0, 0) for name in names}]


def columns(ranks):
    return [{name: ([ranks], [-1, 0], 0, 0) for name in PARAMS}]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A checkpoint of four ranks, strategies of four and two, and one of two stages."""
    monkeypatch.chdir(tmp_path)
    reference.write_checkpoint(tmp_path / "src", rows(4), PARAMS)
    reference.write_strategy(tmp_path / "four.ckpt", rows(4))
    reference.write_strategy(tmp_path / "two.ckpt", columns(2))
    reference.write_stage_files(tmp_path / "stages", [*rows(2, ["w"]), *rows(2, ["x"])])
    return tmp_path


def refused(*words, **options):
    """Return the message of a conversion that is refused; every process has the same."""
    with pytest.raises(rankxform.RankxformError) as told:
        rankxform.transform(*words, **options)
    return str(told.value)


def test_exchanged_strategies_are_named_first(place):
    said = refused("src", "dst", "two.ckpt", "four.ckpt")
    assert said.startswith("two.ckpt is of 2 ranks, and the checkpoint has 4")
    assert "; exchange --src-strategy and --dst-strategy\n" in said
    assert "axis 0 of shape [2, 16] cannot be split" in said, "what was found stays"


def test_a_fitting_strategy_beside_the_checkpoint(place):
    Path("four.ckpt").rename("strategy.ckpt")
    said = refused("src", "dst", "two.ckpt")
    assert said.startswith("two.ckpt is of 2 ranks") and "; --src-strategy strategy.ckpt (f" in said


def test_a_stage_in_place_of_the_folder(place):
    first = next(iter(sorted(Path("stages").iterdir())))
    said = refused("src", "dst", "four.ckpt", str(first))
    assert f"{first} is of pipeline stage 0 alone; --dst-strategy stages (found there: 2" in said
    shutil.rmtree("src")
    reference.write_checkpoint(place / "src", [*rows(2, ["w"]), *rows(2, ["x"])], PARAMS)
    said = refused("src", "dst", str(first), "four.ckpt")
    assert "; --src-strategy stages (found there: 2 stages of 2 ranks)" in said


def test_lost_ranks_are_no_exchange(place):
    """Two of four ranks are there, as many as the destination has: the loss is said first."""
    for rank in (2, 3):
        shutil.rmtree(f"src/rank_{rank}")
    said = refused("src", "dst", "four.ckpt", "two.ckpt")
    assert "ranks 2, 3" in said or "rank 2" in said
    assert "exchange --src-strategy and --dst-strategy" in said and (
        "\nfour.ckpt is of 4 ranks, and the checkpoint has 2, as many as two.ckpt is of" in said
    )


def test_ranks_that_are_left_over_on_purpose_are_no_reason(place):
    Path("four.ckpt").rename("strategy.ckpt")
    reference.write_strategy(place / "odd.ckpt", rows(3))
    said = refused("src", "dst", "two.ckpt", "odd.ckpt", accept=("extra-ranks",))
    assert "cannot be split into 3" in said and "strategy.ckpt" not in said


def test_source_and_destination_exchanged(place):
    rankxform.transform("src", "dst", "four.ckpt", "two.ckpt")
    said = refused("dst", "src", "four.ckpt", "two.ckpt", overwrite=True)
    assert "four.ckpt is of 4 ranks, and the checkpoint has 2; " in said
    assert "exchange SRC and DST" in said
    assert refused("none", "src", "four.ckpt").endswith("; exchange SRC and DST")


def test_no_guess_where_nothing_fails(place, monkeypatch):
    """Nothing else is looked at; what is much larger than a strategy is never read."""
    with (place / "strategy.json").open("w") as file:
        file.truncate(1 << 40)
    rankxform.transform("src", "dst", "four.ckpt", "two.ckpt")
    assert "strategy.json" not in refused("src", "other", "two.ckpt", "four.ckpt")


def test_a_folder_one_level_too_high(place):
    (place / "out").mkdir()
    Path("src").rename("out/checkpoint")
    Path("stages").rename("out/strategy")
    said = refused("out", "dst", "four.ckpt")
    assert "out/strategy shard 'w' in two ways" in said
    assert f"MindFormers left the latter with {place}/out/checkpoint" in said
    Path("out/other").mkdir()
    shutil.copytree("out/checkpoint/rank_0", "out/other/rank_0")
    said = refused("out", "dst", "four.ckpt")
    assert "; name out/other (1 rank), or name out/checkpoint (4 ranks)" in said
    assert "did you mean out/strategy?" in refused("out/checkpoint", "dst", "out")


def test_a_strategy_that_places_parameters_elsewhere_is_not_proposed(place):
    """One of as many ranks was, in two stages, by which the files cannot be read either."""
    stages = [*rows(2, ("w",)), *rows(2, ("x",))]
    reference.write_strategy("early_stages.ckpt", stages)
    with pytest.raises(rankxform.RankxformError) as raised:
        rankxform.transform("src", "dst", "two.ckpt", None)
    tries = " ".join(raised.value.tries)
    assert "four.ckpt (found there: 4 ranks)" in tries and "early_stages" not in tries, tries
