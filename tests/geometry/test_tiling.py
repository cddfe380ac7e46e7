"""Tilings of any boxes: what tiles an array is taken, and nothing else."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest

from rankxform.geometry.box import Box
from rankxform.geometry.tiling import BoxTiling, Grid, build_tiling, overlaps


def split(box, rng, depth=3):
    """Divide a box at random, along any axis, into boxes that are no grid."""
    axes = [j for j in range(box.ndim) if box.shape[j] > 1]
    if not depth or not axes or rng.random() < 0.2:
        return [box]
    axis = rng.choice(axes)
    at = rng.randrange(box.start[axis] + 1, box.stop[axis])
    low = Box(box.start, tuple(at if j == axis else b for j, b in enumerate(box.stop)))
    high = Box(tuple(at if j == axis else a for j, a in enumerate(box.start)), box.stop)
    return [*split(low, rng, depth - 1), *split(high, rng, depth - 1)]


def random_boxes(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(0, 4)))
    boxes = split(Box.whole(shape), rng)
    rng.shuffle(boxes)
    return shape, boxes, rng


@pytest.mark.parametrize("seed", range(200))
def test_the_cells_of_a_tiling_are_the_boxes_and_tile_the_array(seed):
    shape, boxes, rng = random_boxes(seed)
    tiling, cells = build_tiling(shape, boxes)
    assert [tiling.box(cell) for cell in cells] == boxes
    marks = np.zeros(shape, int)
    for cell in cells:
        marks[tiling.box(cell).slices()] += 1
    assert (marks == 1).all()
    start = tuple(rng.randrange(n) for n in shape)
    wanted = Box(start, tuple(rng.randrange(a + 1, n + 1) for a, n in zip(start, shape)))
    found = overlaps(tiling, Grid(tuple((0, n) for n in shape)), (0,) * len(shape))
    assert sum(box.size for _, box in found) == prod(shape)
    assert {tiling.box(cell) for cell in tiling.cells_over(wanted)} == {
        box for box in boxes if box.intersect(wanted) is not None
    }


@pytest.mark.parametrize("seed", range(100))
def test_what_does_not_tile_the_array_is_refused(seed):
    shape, boxes, rng = random_boxes(seed)
    if len(boxes) < 2:
        return
    at = rng.randrange(len(boxes))
    with pytest.raises(ValueError, match=r"cover|overlap"):
        build_tiling(shape, boxes[:at] + boxes[at + 1 :])
    more = Box(boxes[at].start, tuple(a + 1 for a in boxes[at].start))
    if more not in boxes:
        with pytest.raises(ValueError, match=r"cover|overlap"):
            build_tiling(shape, [*boxes, more])


def test_a_box_outside_is_refused():
    with pytest.raises(ValueError, match="does not lie in"):
        build_tiling((4,), [Box((0,), (5,))])


def test_boxes_without_elements_have_an_empty_cell():
    tiling, cells = build_tiling((2, 3), [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))])
    assert isinstance(tiling, Grid) and cells == [(0, 0), ()]


def test_equal_boxes_are_one_cell():
    rows = [Box((0, 0), (1, 3)), Box((0, 3), (1, 4)), Box((1, 0), (2, 4))]
    tiling, cells = build_tiling((2, 4), [*rows, rows[1]])
    assert isinstance(tiling, BoxTiling) and cells == [(0,), (1,), (2,), (1,)]
