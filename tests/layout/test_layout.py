"""The closed form against shardings made axis by axis, and against what the real compiler wrote."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields
from math import prod
from pathlib import Path

import numpy as np
import pytest

from rankxform.errors import RequestError, StrategyError
from rankxform.layout.layout import Layout
from rankxform.storage import user_files
from tests import reference
from tests.cases import random_case

REAL = Path(__file__).parents[1] / "data" / "real_strategies"


def to_layout(layout):
    matrix, tensor_map, step, size = layout
    return Layout(tuple(matrix), tuple(tuple(reference.axes_of(e)) for e in tensor_map), step, size)


@pytest.mark.parametrize("seed", range(80))
def test_boxes_are_what_cutting_axis_by_axis_gives(seed):
    case = random_case(seed, mindspore_agrees=False, whole=False)
    for stage in [*case.src, *case.dst]:
        for name, described in stage.items():
            shape, _ = case.params[name]
            layout = to_layout(described)
            counted = np.arange(prod(shape)).reshape(shape)
            grid = layout.grid(shape)
            for rank in range(layout.ranks):
                box = grid.box(layout.cell(rank))
                assert np.array_equal(
                    counted[box.slices()], reference.shard(counted, described, rank)
                )
                assert rank in layout.holders[layout.cell(rank)]
                assert layout.full_shape(box.shape) == shape


@pytest.mark.parametrize("configuration", sorted(REAL.glob("*/*")), ids=lambda p: p.name)
@pytest.mark.parametrize("kind", ["ckpt", "json"])
def test_slices_have_the_shapes_of_the_real_compilers_graphs(configuration, kind):
    shapes = json.loads((configuration / "shapes.json").read_text())
    files = sorted((configuration / "strategy").glob(f"*.{kind}"))
    if not files:
        pytest.skip(f"no {kind} strategy here")
    size = shapes["ranks"] // shapes["stages"]
    for path in files:
        record = user_files.read_strategy_file(path)
        for rank in range(record.stage * size, (record.stage + 1) * size):
            held = shapes["slice_shape_by_rank"][str(rank)]
            for name, layout in record.layouts.items():
                if name not in held or name not in shapes["params"]:
                    continue
                if name.startswith("accu_grads"):
                    continue  # never in a checkpoint, and whole in the graph
                if (
                    "embedding_table" in name
                    and not layout.split_rows
                    and "manual" in path.parts[-3]
                ):
                    continue  # its moments are sharded like the embedding, and no file says so
                full = tuple(shapes["params"][name]["full_shape"])
                folded = layout.fold(tuple(held[name]), slices=True)
                assert folded == layout.fold(full, slices=False)
                assert list(folded.grid(full).box(folded.cell(rank % size)).shape) == held[name]


def test_json_and_protobuf_files_fold_to_one_layout():
    for path in sorted(REAL.glob("D_nested*/*/strategy/*.json")):
        shapes = json.loads((path.parents[1] / "shapes.json").read_text())["params"]
        expanded, nested = (
            user_files.read_strategy_file(path),
            user_files.read_strategy_file(path.with_suffix(".ckpt")),
        )
        for name, layout in nested.layouts.items():
            full = tuple(shapes[name]["full_shape"])
            folded = expanded.layouts[name].fold(full, slices=False)
            assert folded.grid(full) == layout.grid(full)
            assert [folded.cell(r) for r in range(8)] == [layout.cell(r) for r in range(8)]


def test_an_expanded_map_that_folds_in_two_ways_is_refused():
    """Slices (1, 4) are of (4, 8) sharded [[2, 1], 0] or of (2, 16) sharded [2, [1, 0]]."""
    layout = Layout((2, 2, 2), ((2,), (1,), (0,)), expanded_shape=(2, 2, 8))
    with pytest.raises(RequestError, match="in 2 ways"):
        layout.fold((1, 4), slices=True)
    assert layout.fold((4, 8), slices=False).tensor_map == ((2, 1), (0,))


def test_a_step_of_zero_means_no_optimizer_shard():
    assert Layout((4,), ((), ()), opt_step=0, opt_size=-1).counts == (1, 1)
    assert Layout((4,), ((), ()), opt_step=1, opt_size=0).counts == (1, 1)
    assert Layout((4,), ((), ()), opt_step=1, opt_size=2).counts == (2, 1)


def test_the_value_of_the_step_never_matters():
    layouts = [Layout((2, 2, 2), ((1,), ()), opt_step=step, opt_size=2) for step in (1, 2, 7)]
    assert len({tuple(layout.cell(r) for r in range(8)) for layout in layouts}) == 1


def test_fewer_ranks_than_the_stage_repeat():
    layout = Layout((2,), ((0,),))
    assert [layout.cell(rank) for rank in range(4)] == [(0,), (1,), (0,), (1,)]


def test_mindspores_replica_shares_the_coordinates_that_do_not_sharded():
    layout = Layout((2, 2), ((0,), ()), opt_step=0)
    readers = [layout.holders[0, 0][layout.replica(rank)] for rank in range(4)]
    assert readers == [0, 0, 2, 2]
    sharded = Layout((4,), ((), ()), opt_step=1, opt_size=2)
    readers = [sharded.holders[1, 0][sharded.replica(rank)] for rank in range(4)]
    assert readers == [1, 1, 3, 3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((2,), ((0,), (0,))), "uses one device-matrix axis"),
        (((2,), ((1,),)), "names axis 1"),
        (((2, 0), ((1,),)), "positive sizes"),
        (((4,), ((),), 1, 3), "does not divide the 4 ranks"),
        (((4,), (), 1, 2), "cannot divide a scalar"),
    ],
)
def test_impossible_layouts_say_why(arguments, words):
    with pytest.raises(StrategyError, match=words):
        Layout(*arguments)


def test_shapes_that_the_layout_cannot_split_say_why():
    with pytest.raises(RequestError, match="is for 1 axes"):
        Layout((2,), ((0,),)).grid((4, 4))
    with pytest.raises(RequestError, match="cannot be split into 2"):
        Layout((2,), ((0,),)).grid((5,))
    with pytest.raises(RequestError, match="adds up to 5 rows"):
        Layout((2,), ((0,),), split_rows=(2, 3)).grid((6,))
    with pytest.raises(RequestError, match="not one number of rows"):
        Layout((4,), ((0,),), split_rows=(2, 3)).grid((5,))


def test_what_is_worked_out_is_not_sent_to_other_processes():
    layout = Layout((2, 2), ((0,),))
    assert layout.holders and layout.cell(3) == (1,)
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert vars(pickle.loads(pickle.dumps(layout))).keys() == {one.name for one in fields(Layout)}
