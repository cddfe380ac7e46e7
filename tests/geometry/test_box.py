"""Laws of boxes, runs, grids and tiles, in integers alone."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankxform.geometry.box import Box, contiguous_runs, first_element, strided_runs
from rankxform.geometry.tiling import Grid, split_into_tiles

extents = st.integers(1, 6)


@st.composite
def boxes(draw, shape):
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(start, tuple(draw(st.integers(a + 1, n)) for a, n in zip(start, shape)))


@st.composite
def box_in_array(draw):
    shape = tuple(draw(st.lists(extents, max_size=4)))
    return shape, draw(boxes(shape)), draw(boxes(shape))


@given(box_in_array())
def test_an_intersection_holds_what_both_hold(case):
    shape, a, b = case
    marks = np.zeros(shape, int)
    marks[a.slices()] += 1
    marks[b.slices()] += 1
    common = a.intersect(b)
    assert (marks == 2).sum() == (common.size if common else 0)
    if common:
        assert (marks[common.slices()] == 2).all()
        assert a.contains(common) and b.contains(common)
    assert a.bounding_box(b).contains(a) and a.bounding_box(b).contains(b)


@given(box_in_array())
def test_runs_are_maximal_and_cover_the_box(case):
    shape, box, _ = case
    flat = np.arange(prod(shape)).reshape(shape)
    runs = list(contiguous_runs(box, shape))
    found = [i for start, count in runs for i in range(start, start + count)]
    assert found == flat[box.slices()].ravel().tolist()
    assert all(a + n < b for (a, n), (b, _) in pairwise(runs)), "runs ascend, never touch"
    assert first_element(box, shape) == found[0]


@given(st.data())
def test_cells_tile_the_array_and_are_found_by_what_they_overlap(data):
    """Parts of equal length, or of any, some of none."""
    counts = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    if data.draw(st.booleans()):
        grid = Grid.even(tuple(n * data.draw(st.integers(1, 3)) for n in counts), counts)
    else:
        lengths = st.lists(st.integers(0, 3), min_size=0, max_size=3)
        axes = [[*data.draw(lengths), 1, *data.draw(lengths)] for _ in counts]
        grid = Grid(tuple(tuple(accumulate(axis, initial=0)) for axis in axes))
        counts = tuple(map(len, axes))
    marks = np.zeros(grid.shape, int)
    for cell in np.ndindex(*counts):
        marks[grid.box(cell).slices()] += 1
    assert (marks == 1).all()
    box = data.draw(boxes(grid.shape))
    assert list(grid.cells_over(box)) == [
        cell for cell in np.ndindex(*counts) if grid.box(cell).intersect(box)
    ]


@given(st.data())
def test_tiles_tile_the_region_within_their_cost(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 8), min_size=0, max_size=3)))
    shards = data.draw(st.lists(boxes(shape), min_size=1, max_size=4))
    region = shards[0]
    limit = data.draw(st.integers(1, 60))
    at = data.draw(st.integers(0, len(shards) - 1))
    groups = [shards[:at], shards[at:]]
    marks = np.zeros(shape, int)
    before = -1
    for tile in (one for alike in split_into_tiles(shape, region, groups, limit) for one in alike):
        marks[tile.slices()] += 1
        position = first_element(tile, shape)
        assert position > before, "tiles come in row-major order"
        before = position
        for group in groups:
            parts = [common for s in group if (common := tile.intersect(s))]
            assert tile.size == 1 or sum(p.size for p in parts) <= limit
        for shard in shards:
            common = tile.intersect(shard)
            if common:
                runs = list(contiguous_runs(common.relative_to(shard), shard.shape))
                assert len(runs) == 1, "what a shard holds of a tile is one interval of its file"
    assert (marks[region.slices()] == 1).all()
    assert marks.max() == 1


@given(box_in_array())
def test_runs_that_are_equally_far_apart_are_all_runs(case):
    shape, box, _ = case
    first, length, stride, count = strided_runs(box, shape)
    runs = list(contiguous_runs(box, shape))
    if count:
        assert [(first + i * stride, length) for i in range(count)] == runs
    else:
        assert len(shape) > 2
