"""Divisions of a tensor into boxes: grids, other boxes, and the tiles that are moved at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import product
from math import prod
from typing import Generic, Protocol, TypeVar

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

    A `Grid` is the usual one; `rankxform.geometry.tiling` has one of other boxes, and
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


@dataclass(frozen=True)
class TileRun:
    """Equal tiles that follow each other along one axis: the first, and how many there are."""

    first: Box
    axis: int
    count: int

    @property
    def step(self) -> int:
        """Elements on the axis from one tile to the next."""
        return self.first.stop[self.axis] - self.first.start[self.axis] if self.first.ndim else 0

    def __iter__(self) -> Iterator[Box]:
        for n in range(self.count):
            start = self.first.start[self.axis] + n * self.step if self.first.ndim else 0
            yield _replace(self.first, self.axis, start, start + self.step)


T = TypeVar("T")

Groups = Sequence[Sequence[Box]]


def split_into_tiles(
    shape: tuple[int, ...], region: Box, groups: Groups, limit: int
) -> Iterator[TileRun]:
    """Yield tiles that cover `region`, in row-major order, each of bounded cost.

    `shape` is the tensor's; `region` and the shards in `groups` are boxes of it, in elements. The
    cost of a tile to a group is the number of elements that all its shards hold of it, summed; it
    stays within `limit` for each group, unless the tile is a single element of the tensor. Along
    the axis of its range a tile keeps to `region` and never crosses the start or stop of a shard,
    so each shard holds all of its rows or none. Adjacent tiles that differ only in their start are
    yielded as one `TileRun`.

    >>> list(split_into_tiles((4, 4), Box((0, 0), (4, 2)), [[Box((0, 0), (4, 4))]], limit=8))
    [TileRun(first=Box(start=(0, 0), stop=(2, 4)), axis=0, count=2)]
    """
    if region.size:
        yield from _along(Box.whole(shape), region, groups, limit, 0)


def _along(tile: Box, region: Box, groups: Groups, limit: int, axis: int) -> Iterator[TileRun]:
    if axis == region.ndim:
        yield TileRun(tile, max(0, axis - 1), 1)
        return
    low, high = region.start[axis], region.stop[axis]
    ends = {e for shards in groups for s in shards for e in (s.start[axis], s.stop[axis])}
    edges = [low, *sorted(e for e in ends if low < e < high), high]
    for a, b, active in zip(edges, edges[1:], _active(edges, groups, axis)):
        row = max((sum(prod(s.shape[axis + 1 :]) for s in shards) for shards in active), default=0)
        step = limit // row if row else b - a
        if step >= 1:
            count, rest = divmod(b - a, step)
            if count:
                yield TileRun(_replace(tile, axis, a, a + step), axis, count)
            if rest:
                yield TileRun(_replace(tile, axis, b - rest, b), axis, 1)
        else:
            for index in range(a, b):
                single = _replace(tile, axis, index, index + 1)
                yield from _along(single, region, active, limit, axis + 1)


def _active(edges: Sequence[int], groups: Groups, axis: int) -> Sequence[Groups]:
    """Return for every interval between `edges` what of each group covers it, if anything does."""
    found: list[dict[int, list[Box]]] = [{} for _ in edges[1:]]
    for number, shards in enumerate(groups):
        for shard in shards:
            first = bisect_left(edges, shard.start[axis])
            for at in range(first, bisect_left(edges, shard.stop[axis], first)):
                if at < len(found):
                    found[at].setdefault(number, []).append(shard)
    return [list(by_group.values()) for by_group in found]


class RowIndex(Generic[T]):
    """Things with boxes, looked up by the rows of a tile.

    A tile never crosses an edge of these boxes, so on the first axis it is either inside a box's
    range or outside of it.
    """

    def __init__(self, things: Iterable[tuple[T, Box]]) -> None:
        self._all = list(things)
        boxes = [box for _, box in self._all if box.ndim]
        self._edges = sorted({e for box in boxes for e in (box.start[0], box.stop[0])})
        self._found: list[list[tuple[T, Box]]] = [[] for _ in self._edges]
        for one in self._all if boxes else ():
            first = bisect_left(self._edges, one[1].start[0])
            for at in range(first, bisect_left(self._edges, one[1].stop[0], first)):
                self._found[at].append(one)

    def near(self, tile: Box) -> Sequence[tuple[T, Box]]:
        """Return the things whose range on the first axis `tile` is inside of, in their order."""
        if not tile.ndim:
            return self._all
        at = bisect_right(self._edges, tile.start[0]) - 1
        return self._found[at] if at >= 0 else ()

    def touching(self, box: Box) -> list[T]:
        """Return the things whose range on the first axis shares rows with any box, in order."""
        if not box.ndim:
            return [thing for thing, _ in self._all]
        first = max(0, bisect_right(self._edges, box.start[0]) - 1)
        last = bisect_left(self._edges, box.stop[0])
        near = {id(one): one[0] for some in self._found[first:last] for one in some}
        if last - first <= 1:
            return list(near.values())
        return [one[0] for one in self._all if id(one) in near]

    def over(self, tile: Box) -> Iterator[tuple[T, Box]]:
        """Yield the things that have a part of `tile`, with that part."""
        for thing, box in self.near(tile):
            part = box.intersect(tile)
            if part is not None:
                yield thing, part


def _replace(box: Box, axis: int, start: int, stop: int) -> Box:
    if not box.ndim:
        return box
    return Box(
        (*box.start[:axis], start, *box.start[axis + 1 :]),
        (*box.stop[:axis], stop, *box.stop[axis + 1 :]),
    )
