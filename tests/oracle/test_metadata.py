"""Layouts of metadata.json: what MindSpore states of optimizer shards, right and wrong."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from rankxform.errors import RankxformError
from rankxform.layout.layout import Layout, fold_optimizer_shard, repair_misstated_layout

strategy = pytest.importorskip(
    "mindspore.parallel.strategy", reason="MindSpore has no wheel for this Python"
)
pytestmark = pytest.mark.oracle


def stated(layout):
    """Return the layout that MindSpore states of one with an optimizer shard; None if it fails."""
    own = object.__new__(strategy._NetStrategyInfo)
    maps = [list(axes) or [-1] for axes in layout.tensor_map]
    try:
        matrix, counter, maps, full = own._get_dev_mat_for_opt_shard(
            layout.opt_size, list(layout.device_matrix), maps
        )
        names = [chr(97 + n) for n in range(len(matrix))]
        found = own._get_tensor_map_for_opt_shard(
            SimpleNamespace(
                new_dev_mat=matrix, new_tensor_map=maps, full_opt_shard=full, counter=counter,
                alias_name=names,
            )
        )  # fmt: skip
    except (ZeroDivisionError, IndexError, ValueError):
        return None
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in found]
    axes = tuple(
        tuple(len(names) - 1 - names.index(name) for name in entry if name != "None")
        for entry in entries
    )
    try:
        return Layout(tuple(matrix), axes)
    except RankxformError:
        return None


def layouts(count):
    rng = random.Random(5)
    while count:
        matrix = tuple(rng.choice([2, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4)))
        axes = list(range(len(matrix)))
        rng.shuffle(axes)
        tensor_map = []
        for _ in range(rng.randint(1, 3)):
            taken = rng.choice([0, 0, 1, 1, 2])
            tensor_map.append(tuple(axes[:taken]))
            axes = axes[taken:]
        try:
            one = Layout(matrix, tuple(tensor_map), 1, rng.choice([-1, 2, 3, 4, 6]))
        except RankxformError:
            continue
        if one.opt_shards > 1:
            count -= 1
            yield one


def test_what_metadata_can_state_and_what_is_repaired():
    right = wrong = repaired = 0
    for layout in layouts(6000):
        cells = [layout.cell(rank) for rank in range(layout.ranks)]
        theirs = stated(layout)
        try:
            ours = fold_optimizer_shard(layout, layout.ranks)
            assert [ours.cell(rank) for rank in range(ours.ranks)] == cells
        except RankxformError:
            ours = None
        if theirs is None:
            continue
        if [theirs.cell(rank) for rank in range(theirs.ranks)] == cells:
            right += 1
            assert ours is not None
            if theirs.counts == ours.counts and 1 not in theirs.device_matrix:
                assert theirs.device_matrix == ours.device_matrix
                assert theirs.tensor_map == ours.tensor_map
            continue
        wrong += 1
        meant = repair_misstated_layout(theirs, layout.counts)
        if theirs.counts != layout.counts and meant is not None:
            repaired += 1
            assert [meant.cell(rank) for rank in range(meant.ranks)] == cells
    assert right > 3000 and wrong > 100 and repaired > wrong // 2, (right, wrong, repaired)
