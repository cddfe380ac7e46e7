"""Tilings whose boxes are no grid: of unequal rows, or of any other boxes.

Who describes a tensor by boxes need not know whether they are a grid: `build_tiling` finds
out, since a grid's cells are found by bisection and compared at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod

from rankxform.values import dataclass

from .box import Box, Shape
from .grid import Cell, Grid, Overlaps, Tiling, cells_overlapping


@dataclass(frozen=True)
class BoxTiling:
    """Boxes that tile an array of `shape`; cell ``(n,)`` is number n. They ascend by their start.

    >>> rows = BoxTiling((2, 4), (Box((0, 0), (1, 3)), Box((0, 3), (1, 4)), Box((1, 0), (2, 4))))
    >>> list(rows.cells_over(Box((0, 3), (2, 4))))
    [(1,), (2,)]
    """

    shape: Shape
    boxes: tuple[Box, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple((box.start, box.stop) for box in self.boxes))

    @cached_property
    def _starts(self) -> Sequence[int]:
        return [box.start[0] for box in self.boxes]

    @cached_property
    def _most_rows(self) -> int:
        return max(box.shape[0] for box in self.boxes)

    def box(self, cell: Cell) -> Box:
        """Return the region of `cell`."""
        return self.boxes[cell[0]]

    def cells_over(self, box: Box) -> Iterator[Cell]:
        """Yield the cells that share at least one element with `box`, in their order."""
        first = bisect_left(self._starts, box.start[0] - self._most_rows + 1)
        for number in range(first, bisect_left(self._starts, box.stop[0])):
            if self.boxes[number].intersect(box) is not None:
                yield (number,)

    def source_box(self, cell: Cell) -> Box:
        """Return the region that is stored as `cell`: its own."""
        return self.boxes[cell[0]]

    def box_in_source(self, cell: Cell, box: Box) -> Box:
        """Return where a part of `cell` lies in the tensor that is stored: where it is."""
        return box

    def destination_box(self, cell: Cell, box: Box) -> Box:
        """Return where a region of `cell` lies in the tensor that is made: where it is."""
        return box

    def overlaps(self, dst: Tiling, cell: Cell) -> Overlaps:
        """Return what makes up `cell` of `dst`: (cell of this tiling, common region)."""
        return cells_overlapping(self, dst.box(cell))


def build_tiling(shape: Shape, boxes: Sequence[Box]) -> tuple[Grid | BoxTiling, list[Cell]]:
    """Return the tiling of an array by these boxes, and the cell of each; a grid if they are one.

    Equal boxes have one cell, and a box without elements has none of its own: it gets an empty cell
    ``()``. Raises ValueError, which says what is wrong, where they do not tile the array.

    >>> build_tiling((4,), [Box((0,), (3,)), Box((3,), (4,)), Box((4,), (4,))])
    (Grid(edges=((0, 3, 4),)), [(0,), (1,), ()])
    """
    distinct = dict.fromkeys(sorted((b for b in boxes if b.size), key=lambda b: (b.start, b.stop)))
    whole = Box.whole(shape)
    for box in distinct:
        if not whole.contains(box):
            raise ValueError(f"box {box} does not lie in shape {list(shape)}")
    grid = _grid(shape, list(distinct))
    if grid is not None:
        cell_of = {grid.box(cell): cell for cell in grid.cells_over(whole)}
        return grid, [cell_of.get(box, ()) for box in boxes]
    _check_tiles(shape, list(distinct))
    numbers = {box: (number,) for number, box in enumerate(distinct)}
    return BoxTiling(shape, tuple(distinct)), [numbers.get(box, ()) for box in boxes]


def _grid(shape: Shape, boxes: Sequence[Box]) -> Grid | None:
    """Return the grid that distinct boxes are, if they are one."""
    if not prod(shape):
        return Grid(tuple((0, n) for n in shape)) if not boxes else None
    edges = [{0, extent} for extent in shape]
    for box in boxes:
        for axis, (start, stop) in enumerate(zip(box.start, box.stop)):
            edges[axis] |= {start, stop}
    if prod(len(some) - 1 for some in edges) != len(boxes):
        return None
    grid = Grid(tuple(map(tuple, map(sorted, edges))))
    cells = set(map(grid.box, grid.cells_over(Box.whole(shape))))
    return grid if cells == set(boxes) else None


def _check_tiles(shape: Shape, boxes: Sequence[Box]) -> None:
    """Raise ValueError where distinct boxes, which ascend by their start, do not tile an array."""
    active: list[Box] = []
    for box in boxes:
        active = [one for one in active if one.stop[0] > box.start[0]]
        for other in active:
            if other.intersect(box) is not None:
                raise ValueError(f"boxes at {other.start} and {box.start} overlap")
        active.append(box)
    have = sum(box.size for box in boxes)
    if have != prod(shape):
        raise ValueError(f"boxes cover {have:,} of {prod(shape):,} elements of {list(shape)}")
