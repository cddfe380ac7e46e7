"""Checkpoints that their users sharded by pattern (layerwise_parallel): joined, split, sharded anew."""

from __future__ import annotations

import numpy as np
import pytest

import rankxform
from rankxform.layout.layout import Layout
from rankxform.layout.strategy import PatternStrategy, Strategy
from tests import reference

NAMES = ("weight", "moments.weight")
RATE = {"learning_rate": ("Float32", np.full(1, 0.01, np.float32))}


def full(name):
    return reference.full_tensor(name, (8, 8), "Float32")


def write_sliced(folder, ranks, pattern="rank_{}/net.ckpt", extra=RATE, axis=0):
    for rank in range(ranks):
        entries = {
            name: ("Float32", np.split(full(name), ranks, axis=axis)[rank]) for name in NAMES
        }
        reference.write_ckpt(folder / pattern.format(rank), {**entries, **extra})
    return folder


def values(path):
    return {
        name: np.frombuffer(data, np.uint32).reshape(shape)
        for name, (_, shape, data) in reference.read_any(path).items()
    }


@pytest.fixture
def nodes(tmp_path):
    return write_sliced(tmp_path / "src", 4, "node{}/CKP_1-4_32.ckpt")


PATTERN = {"src_pattern": "node{rank}/CKP_1-4_32.ckpt", "fsync": False}


def test_slices_are_joined_and_split(nodes, tmp_path):
    rankxform.transform(nodes, tmp_path / "full", "shard:weight=0@4", None, **PATTERN)
    whole = tmp_path / "full/rank_0/checkpoint_0.ckpt"
    found = values(whole)
    assert all(np.array_equal(found[name], full(name)) for name in NAMES)
    assert found["learning_rate"].shape == (1,)
    rankxform.transform(whole, tmp_path / "two", None, "shard:^weight$=0@2", fsync=False)
    rankxform.transform(
        nodes, tmp_path / "direct", "shard:weight=0@4", "shard:weight=0@2", **PATTERN
    )
    for rank in range(2):
        name = f"rank_{rank}/checkpoint_{rank}.ckpt"
        found = values(tmp_path / "two" / name)
        assert all(np.array_equal(found[n], full(n)[4 * rank : 4 * rank + 4]) for n in NAMES)
        assert values(tmp_path / "direct" / name).keys() == found.keys()
        assert all(
            np.array_equal(v, found[n]) for n, v in values(tmp_path / "direct" / name).items()
        )


def test_a_strategy_file_that_lists_no_states(nodes, tmp_path):
    layout = [{"weight": ([4], [0, -1], 0, 0)}]
    a = reference.write_strategy(tmp_path / "train.ckpt", layout)
    b = reference.write_strategy(tmp_path / "next.ckpt", [{"weight": ([2], [-1, 0], 0, 0)}])
    rankxform.transform(nodes, tmp_path / "full", a, None, **PATTERN)
    found = values(tmp_path / "full/rank_0/checkpoint_0.ckpt")
    assert all(np.array_equal(found[name], full(name)) for name in NAMES)
    rankxform.transform(nodes, tmp_path / "dst", a, b, **PATTERN)
    for rank in range(2):
        found = values(tmp_path / f"dst/rank_{rank}/checkpoint_{rank}.ckpt")
        assert all(np.array_equal(found[n], full(n)[:, 4 * rank : 4 * rank + 4]) for n in NAMES)
    assert (
        rankxform.verify(
            nodes, tmp_path / "dst", a, b, src_pattern=PATTERN["src_pattern"]
        ).differences
        == ()
    )


def test_states_of_another_shape_or_in_a_strategy_do_not_follow(tmp_path):
    factored = {"exp_avg_sq_row.weight": ("Float32", np.ones(2, np.float32)), **RATE}
    src = write_sliced(tmp_path / "src", 4, extra=factored)
    a = reference.write_strategy(tmp_path / "a.ckpt", [{"weight": ([4], [0, -1], 0, 0)}])
    rankxform.transform(src, tmp_path / "full", a, None, fsync=False)
    assert values(tmp_path / "full/rank_0/checkpoint_0.ckpt")["exp_avg_sq_row.weight"].shape == (2,)
    both = reference.write_strategy(
        tmp_path / "b.ckpt", [dict.fromkeys(NAMES, ([4], [0, -1], 0, 0))]
    )
    report = rankxform.transform(src, tmp_path / "predict", both, a, fsync=False)
    (left,) = report.left_out
    assert left.names == ("moments.weight",), "listed on one side: for training alone"


def test_the_last_axis(tmp_path):
    src = write_sliced(tmp_path / "src", 2, axis=1)
    rankxform.transform(src, tmp_path / "full", "shard:weight=-1@2", None, fsync=False)
    found = values(tmp_path / "full/rank_0/checkpoint_0.ckpt")
    assert all(np.array_equal(found[name], full(name)) for name in NAMES)


def test_words():
    sharded = PatternStrategy.parse("shard:embed=0,w.*t=-1@8")
    strategy = sharded.over({"embed": (8, 4), "weight": (4, 8), "bias": (8,)}, states=True)
    assert isinstance(strategy, Strategy) and strategy.ranks == 8
    assert strategy.stages == (
        {"embed": Layout((8,), ((0,), ())), "weight": Layout((8,), ((), (0,)))},
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("shard:weight=0", "expected shard:REGEX=AXIS,REGEX=AXIS@RANKS"),
        ("shard:weight=0@", "expected shard:REGEX=AXIS,REGEX=AXIS@RANKS"),
        ("shard:weight=0@0", "expected shard:REGEX=AXIS,REGEX=AXIS@RANKS"),
        ("shard:weight@4", "expected shard:REGEX=AXIS,REGEX=AXIS@RANKS"),
        ("shard:weight=x@4", "'weight=x': invalid literal"),
        ("shard:(=0@4", r"'\(=0': missing"),
        ("shard:weight=2@4", "'weight' has 2 axes, and no axis 2"),
        ("shard:other=0@4", "no parameter of the checkpoint has a name like 'other'"),
    ],
)
def test_words_that_make_no_sense(nodes, tmp_path, words, message):
    with pytest.raises(rankxform.StrategyError, match=message):
        rankxform.transform(nodes, tmp_path / "dst", words, None, **PATTERN)
    assert not (tmp_path / "dst").exists()


def test_slices_that_were_not_named_are_not_taken_for_whole_ones(nodes, tmp_path):
    with pytest.raises(rankxform.CheckpointError, match=r"moments\.weight"):
        rankxform.transform(nodes, tmp_path / "dst", "shard:^moments.weight$=0@4", None, **PATTERN)


def test_a_number_of_ranks_that_does_not_divide(nodes, tmp_path):
    with pytest.raises(rankxform.RequestError, match="cannot be split into 3 equal parts"):
        rankxform.transform(
            nodes, tmp_path / "d", "shard:weight=0@4", "shard:weight=0@3", **PATTERN
        )


def test_ranks_and_plans(nodes, tmp_path):
    with pytest.raises(rankxform.UsageError, match="the checkpoint tells; name SRC"):
        rankxform.ranks("shard:weight=0@4", "shard:weight=0@2")
    plan = rankxform.plan(
        nodes, "shard:weight=0@4", "shard:weight=0@2", src_pattern=PATTERN["src_pattern"]
    )
    assert len(plan.shards) == 2
    shapes = tmp_path / "shapes.json"
    shapes.write_text('{"weight": {"shape": [8, 8], "dtype": "Float32"}}')
    imagined = rankxform.plan("", "shard:weight=0@4", "shard:weight=0@2", shapes=str(shapes))
    assert len(imagined.shards) == 2


def test_only_states_of_the_parameters_shape_follow(tmp_path):
    factored = {"exp_avg_sq_col.weight": ("Float32", np.arange(8, dtype=np.float32)), **RATE}
    src = write_sliced(tmp_path / "src", 4, extra=factored)
    for words in ("shard:weight=0@4", "shard:^weight$=0@4"):
        found = rankxform.load(src, words, None)
        assert found["exp_avg_sq_col.weight"].shape == (8,)
        assert found["moments.weight"].shape == (8, 8)
    assert (
        "shard:weight=0@4 shards moments.weight, weight"
        in rankxform.load(src, "shard:weight=0@4", None).notices
    )


def test_states_of_another_shape_are_whole_on_every_rank(tmp_path):
    """Whole to sharded by hand, as in the other directions."""
    row = np.arange(8, dtype=np.float32).view("<u4")
    factored = {"exp_avg_sq_row.weight": ("Float32", row)}
    src = write_sliced(tmp_path / "src", 1, extra=factored)
    report = rankxform.transform(src, tmp_path / "dst", "none", "shard:^weight$=0@2")
    assert report.left_out == ()
    for rank in range(2):
        found = reference.read_ckpt(tmp_path / f"dst/rank_{rank}/checkpoint_{rank}.ckpt")
        assert found["exp_avg_sq_row.weight"] == ("Float32", (8,), row.tobytes())
        assert found["weight"][1] == found["moments.weight"][1] == (4, 8)


def test_what_all_ranks_hold_alike_was_not_sharded(tmp_path):
    norm = {"norm.weight": ("Float32", np.arange(8, dtype=np.float32))}
    src = write_sliced(tmp_path / "src", 4, extra=norm)
    with pytest.raises(
        rankxform.CheckpointError, match=r"shards 'norm\.weight', and all ranks hold"
    ):
        rankxform.load(src, "shard:weight=0@4", None)
    assert rankxform.load(src, "shard:^weight=0@4", None)["norm.weight"].shape == (8,)


def test_states_follow_whichever_way_the_shards_are_told(nodes, tmp_path):
    two = reference.write_strategy(tmp_path / "two.ckpt", [{"weight": ([2], [0, -1], 0, 0)}])
    four = reference.write_strategy(tmp_path / "four.ckpt", [{"weight": ([4], [0, -1], 0, 0)}])
    same = write_sliced(tmp_path / "same", 1, "rank_0/net.ckpt")
    write_sliced(tmp_path / "same", 1, "rank_1/net.ckpt")
    unsharded = reference.write_strategy(tmp_path / "dp.ckpt", [{"weight": ([2], [-1, -1], 0, 0)}])
    pattern = {"src_pattern": PATTERN["src_pattern"]}
    for src, a, b, more in (
        (nodes, "shard:weight=0@4", two, pattern),
        (nodes, four, "shard:weight=0@2", pattern),
        (nodes, four, two, pattern),
        (same, unsharded, two, {}),
    ):
        for rank in range(2):
            found = rankxform.load(src, a, b, rank=rank, **more)
            for name in NAMES:
                assert np.array_equal(
                    found[name].view(np.uint32), full(name)[4 * rank : 4 * rank + 4]
                )
