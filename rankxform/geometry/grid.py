"""A grid of boxes that tile an array: the cells into which it is sharded."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cache, cached_property
from itertools import product
from typing import Protocol

from rankxform.values import dataclass

from .box import Box, Shape

Cell = tuple[int, ...]

Overlaps = tuple[tuple[Cell, Box], ...]
"""(cell of one grid, region) for all that makes up a box; regions in the array's elements."""


class Tiling(Protocol):
    """What has cells, each a box of one array, that can be found by region."""

    def __hash__(self) -> int:
        """Tensors that are sharded alike share what is planned for them."""

    @property
    def shape(self) -> Shape:
        """The array's extents, in elements."""

    def box(self, cell: Cell) -> Box:
        """Return the region of a cell, in the array's elements."""

    def cells_over(self, box: Box) -> Iterator[Cell]:
        """Yield the cells that share at least one element with `box`, in row-major order."""


def cells_overlapping(tiling: Tiling, box: Box) -> Overlaps:
    """Return what makes up a box: (cell, common region)."""
    if not box.size:
        return ()
    found = []
    for cell in tiling.cells_over(box):
        common = tiling.box(cell).intersect(box)
        assert common is not None
        found.append((cell, common))
    return tuple(found)


@dataclass(frozen=True)
class Grid:
    """Boundaries on every axis: ``edges[j]`` ascends from 0 to the extent of axis j, in elements.

    Cell ``(i0, i1, ..)`` is the box from ``edges[j][i_j]`` to ``edges[j][i_j + 1]``.

    >>> Grid(((0, 2, 4), (0, 3))).box((1, 0))
    Box(start=(2, 0), stop=(4, 3))
    """

    edges: tuple[tuple[int, ...], ...]

    @classmethod
    def even(cls, shape: tuple[int, ...], counts: tuple[int, ...]) -> Grid:
        """Split axis j into ``counts[j]`` equal parts; the caller has checked that they divide."""
        return cls(
            tuple(
                tuple(range(0, extent + 1, extent // n)) if extent else (0,) * (n + 1)
                for extent, n in zip(shape, counts)
            )
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.edges)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of the tiled array, in elements."""
        return tuple(edges[-1] for edges in self.edges)

    def box(self, cell: Cell) -> Box:
        """Return the region of `cell`."""
        return Box(
            tuple(edges[i] for edges, i in zip(self.edges, cell)),
            tuple(edges[i + 1] for edges, i in zip(self.edges, cell)),
        )

    def cells_over(self, box: Box) -> Iterator[Cell]:
        """Yield the cells that share at least one element with `box`, in row-major order.

        >>> list(Grid(((0, 2, 4), (0, 3))).cells_over(Box((1, 0), (3, 1))))
        [(0, 0), (1, 0)]
        """
        return product(
            *(
                [
                    i
                    for i in range(bisect_right(edges, a) - 1, bisect_left(edges, b))
                    if edges[i] < edges[i + 1]
                ]
                for edges, a, b in zip(self.edges, box.start, box.stop)
            )
        )

    def source_box(self, cell: Cell) -> Box:
        """Return the region that is stored as `cell`: its own."""
        return self.box(cell)

    def box_in_source(self, cell: Cell, box: Box) -> Box:
        """Return where a part of `cell` lies in the tensor that is stored: where it is."""
        return box

    def destination_box(self, cell: Cell, box: Box) -> Box:
        """Return where a region of `cell` lies in the tensor that is made: where it is."""
        return box

    def overlaps(self, dst: Tiling, cell: Cell) -> Overlaps:
        """Return what makes up `cell` of `dst`: (cell of this grid, common region)."""
        return cells_overlapping(self, dst.box(cell))


class SourceTiling(Protocol):
    """How a tensor is stored: in cells, each a box, of tensors that are sharded.

    A `Grid` is the usual one; `rankxform.geometry.boxes` has one of other boxes, and
    `rankxform.geometry.pieces` one for tensors made of others.
    """

    def __hash__(self) -> int:
        """Tensors that are stored alike share what is planned for them."""

    @property
    def shape(self) -> Shape:
        """The tensor's extents, in elements."""

    def box(self, cell: Cell) -> Box:
        """Return what a cell holds, in the frame in which `overlaps` gives regions of it."""

    def source_box(self, cell: Cell) -> Box:
        """Return the region of the stored tensor that a cell is."""

    def box_in_source(self, cell: Cell, box: Box) -> Box:
        """Return the smallest box of the stored tensor with a region of a cell."""

    def destination_box(self, cell: Cell, box: Box) -> Box:
        """Return the smallest box of the tensor that is made with a region of a cell."""

    def overlaps(self, dst: Tiling, cell: Cell) -> Overlaps:
        """Return what makes up `cell` of `dst`: (cell, region)."""


@cache
def overlaps(src: SourceTiling, dst: Tiling, cell: Cell) -> Overlaps:
    """Return what makes up `cell` of `dst`: (cell of `src`, common region), in row-major order.

    Both tile one array. A cell without elements is made up of nothing.

    >>> rows, columns = Grid(((0, 2, 4), (0, 4))), Grid(((0, 4), (0, 2, 4)))
    >>> [(at, str(box)) for at, box in overlaps(rows, columns, (0, 1))]
    [((0, 0), '[0:2, 2:4]'), ((1, 0), '[2:4, 2:4]')]
    """
    return src.overlaps(dst, cell)
