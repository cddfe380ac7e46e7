"""Divisions of a tensor into boxes: grids, other boxes, and the tiles that are moved at once.

A tiling covers a tensor with boxes that do not overlap. Most tilings are grids: their cells are
found by bisection on every axis, and equal grids compare in one step. Uneven rows and the chunks of
distributed checkpoints need not be a grid. `build_tiling` makes one if it can, so that a caller
only lists boxes.

A tile is the part of a tensor that is moved at once. It has one index on each leading axis, a range
on one axis, and everything on the axes behind it. A tile never crosses the edge of a shard.
Therefore each shard holds one contiguous byte range of a tile: one read from each source file, one
write to each destination file, and a strided copy in memory between them, however the two sides are
sharded.
"""

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
"""(cell of a tiling, common region) for each cell that overlaps a box, in the array's elements."""


class Tiling(Protocol):
    """Boxes that cover an array without overlap; each has an index, its cell."""

    def __hash__(self) -> int:
        """Tensors with equal tilings share one plan, which is found by this hash."""

    @property
    def shape(self) -> Shape:
        """The array's extents, in elements."""

    def box(self, cell: Cell) -> Box:
        """Return the region of a cell, in the array's elements."""

    def cells_over(self, box: Box) -> Iterator[Cell]:
        """Yield the cells that share at least one element with `box`, in row-major order."""


def cells_overlapping(tiling: Tiling, box: Box) -> Overlaps:
    """Return the cells of `tiling` that overlap `box`, each with the common region."""
    if not box.size:
        return ()
    overlaps = []
    for cell in tiling.cells_over(box):
        common = tiling.box(cell).intersect(box)
        assert common is not None
        overlaps.append((cell, common))
    return tuple(overlaps)


class _AsStored:
    """What a tiling of a tensor that is stored as it is has: a cell lies in the source where it is.

    It stands where a `SourceTiling` stands.
    """

    def source_box(self: Tiling, cell: Cell) -> Box:
        """Return the box of the source tensor that `cell` is: its own."""
        return self.box(cell)

    def box_in_source(self, cell: Cell, box: Box) -> Box:
        """Return a region of `cell` in the elements of the source tensor: the region itself."""
        return box

    def destination_box(self, cell: Cell, box: Box) -> Box:
        """Return a region of `cell` in the elements of the composed tensor: the region itself."""
        return box

    def overlaps(self: Tiling, dst: Tiling, cell: Cell) -> Overlaps:
        """Return the cells of this tiling that overlap `cell` of `dst`, with the common regions."""
        return cells_overlapping(self, dst.box(cell))


@dataclass(frozen=True)
class Grid(_AsStored):
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

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Extent of the tiled array, in elements."""
        return tuple(edges[-1] for edges in self.edges)

    def box(self, cell: Cell) -> Box:
        """Return the region of `cell`."""
        return Box(
            tuple([edges[i] for edges, i in zip(self.edges, cell)]),
            tuple([edges[i + 1] for edges, i in zip(self.edges, cell)]),
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


class SourceTiling(Protocol):
    """How the source stores a tensor: a `Grid`, a `BoxTiling`, or a `PieceTiling` of others."""

    def __hash__(self) -> int:
        """Tensors with equal tilings share one plan, which is found by this hash."""

    @property
    def shape(self) -> Shape:
        """The tensor's extents, in elements."""

    def box(self, cell: Cell) -> Box:
        """Return the box of a cell, in the frame in which `overlaps` returns regions."""

    def source_box(self, cell: Cell) -> Box:
        """Return the box of the source tensor that a cell is."""

    def box_in_source(self, cell: Cell, box: Box) -> Box:
        """Return the smallest box of the source tensor that contains a region of a cell."""

    def destination_box(self, cell: Cell, box: Box) -> Box:
        """Return the smallest box of the composed tensor that contains a region of a cell."""

    def overlaps(self, dst: Tiling, cell: Cell) -> Overlaps:
        """Return the cells of this tiling that overlap `cell` of `dst`, with the common regions."""


@cache
def overlaps(src: SourceTiling, dst: Tiling, cell: Cell) -> Overlaps:
    """Return the cells of `src` that overlap `cell` of `dst`, in row-major order.

    Each comes with the common region. Both tile one array. A cell without elements overlaps none.

    >>> rows, columns = Grid(((0, 2, 4), (0, 4))), Grid(((0, 4), (0, 2, 4)))
    >>> [(cell, str(box)) for cell, box in overlaps(rows, columns, (0, 1))]
    [((0, 0), '[0:2, 2:4]'), ((1, 0), '[2:4, 2:4]')]
    """
    return src.overlaps(dst, cell)


@dataclass(frozen=True)
class BoxTiling(_AsStored):
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


def build_tiling(shape: Shape, boxes: Sequence[Box]) -> tuple[Grid | BoxTiling, list[Cell]]:
    """Return the tiling that `boxes` are, and the cell of each box. It is a grid if possible.

    Equal boxes share one cell. A box without elements gets the empty cell ``()``. Raises ValueError
    with the reason if the boxes do not tile the array.

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
    """Return the grid that distinct boxes form. None: they form no grid."""
    if not prod(shape):
        return Grid(tuple((0, n) for n in shape)) if not boxes else None
    edges = [{0, extent} for extent in shape]
    for box in boxes:
        for axis, (start, stop) in enumerate(zip(box.start, box.stop)):
            edges[axis] |= {start, stop}
    if prod(len(axis_edges) - 1 for axis_edges in edges) != len(boxes):
        return None
    grid = Grid(tuple(map(tuple, map(sorted, edges))))
    cells = set(map(grid.box, grid.cells_over(Box.whole(shape))))
    return grid if cells == set(boxes) else None


def _check_tiles(shape: Shape, boxes: Sequence[Box]) -> None:
    """Raise ValueError if distinct boxes, sorted by their start, do not tile an array."""
    active: list[Box] = []  # boxes that reach into the rows of the next one
    for box in boxes:
        active = [earlier for earlier in active if earlier.stop[0] > box.start[0]]
        for earlier in active:
            if earlier.intersect(box) is not None:
                raise ValueError(f"boxes at {earlier.start} and {box.start} overlap")
        active.append(box)
    covered = sum(box.size for box in boxes)
    if covered != prod(shape):
        raise ValueError(f"boxes cover {covered:,} of {prod(shape):,} elements of {list(shape)}")


@dataclass(frozen=True)
class TileRun:
    """Equal tiles that follow each other along one axis."""

    first: Box
    axis: int  # along which they follow each other
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
    shape: tuple[int, ...], region: Box, groups: Groups, limit: int, uncounted: Sequence[Box] = ()
) -> Iterator[TileRun]:
    """Yield tiles that cover `region`, in row-major order, each of bounded cost.

    `shape` is the tensor's; `region` and the shards in `groups` are boxes of it, in elements. The
    cost of a tile to a group is the number of elements that all its shards hold of it, summed; it
    stays within `limit` for each group, unless the tile is a single element of the tensor. Along
    the axis of its range a tile keeps to `region` and never crosses the start or stop of a shard,
    so each shard holds all of its rows or none. That is so of the boxes `uncounted` too, which cost
    nothing. Adjacent tiles that differ only in their start are yielded as one `TileRun`.

    >>> list(split_into_tiles((4, 4), Box((0, 0), (4, 2)), [[Box((0, 0), (4, 4))]], limit=8))
    [TileRun(first=Box(start=(0, 0), stop=(2, 4)), axis=0, count=2)]
    """
    if region.size:
        yield from _along(Box.whole(shape), region, groups, limit, 0, uncounted)


def _along(
    tile: Box, region: Box, groups: Groups, limit: int, axis: int, uncounted: Sequence[Box]
) -> Iterator[TileRun]:
    if axis == region.ndim:
        yield TileRun(tile, max(0, axis - 1), 1)
        return
    low, high = region.start[axis], region.stop[axis]
    shards = [*uncounted, *(shard for shards in groups for shard in shards)]
    ends = {edge for shard in shards for edge in (shard.start[axis], shard.stop[axis])}
    edges = [low, *sorted(e for e in ends if low < e < high), high]
    for a, b, active in zip(edges, edges[1:], _active(edges, groups, axis)):
        row = max((sum(prod(s.shape[axis + 1 :]) for s in shards) for shards in active), default=0)
        step = limit // row if row else b - a
        if step >= 1:
            count, remainder = divmod(b - a, step)
            if count:
                yield TileRun(_replace(tile, axis, a, a + step), axis, count)
            if remainder:
                yield TileRun(_replace(tile, axis, b - remainder, b), axis, 1)
        else:
            for index in range(a, b):
                single = _replace(tile, axis, index, index + 1)
                crossing = [box for box in uncounted if box.start[axis] <= a < box.stop[axis]]
                yield from _along(single, region, active, limit, axis + 1, crossing)


def _active(edges: Sequence[int], groups: Groups, axis: int) -> Sequence[Groups]:
    """Return for each interval between `edges` the shards that cover it, by group.

    A group none of whose shards cover the interval is left out.
    """
    shards_by_interval: list[dict[int, list[Box]]] = [{} for _ in edges[1:]]
    for group, shards in enumerate(groups):
        for shard in shards:
            first = bisect_left(edges, shard.start[axis])
            for interval in range(first, bisect_left(edges, shard.stop[axis], first)):
                if interval < len(shards_by_interval):
                    shards_by_interval[interval].setdefault(group, []).append(shard)
    return [list(shards_by_group.values()) for shards_by_group in shards_by_interval]


class RowIndex(Generic[T]):
    """Keys of boxes, looked up by the rows of a tile.

    A tile never crosses an edge of these boxes. On the first axis it is therefore either inside the
    range of a box or outside of it.
    """

    def __init__(self, keyed_boxes: Iterable[tuple[T, Box]]) -> None:
        self._entries = list(keyed_boxes)
        boxes = [box for _, box in self._entries if box.ndim]
        self._edges = sorted({edge for box in boxes for edge in (box.start[0], box.stop[0])})
        # By interval between two edges the entries that cover its rows.
        self._by_interval: list[list[tuple[T, Box]]] = [[] for _ in self._edges]
        for entry in self._entries if boxes else ():
            first = bisect_left(self._edges, entry[1].start[0])
            for interval in range(first, bisect_left(self._edges, entry[1].stop[0], first)):
                self._by_interval[interval].append(entry)

    def near(self, tile: Box) -> Sequence[tuple[T, Box]]:
        """Return the entries whose rows contain those of `tile`, in the order they were given."""
        if not tile.ndim:
            return self._entries
        interval = bisect_right(self._edges, tile.start[0]) - 1
        return self._by_interval[interval] if interval >= 0 else ()

    def touching(self, box: Box) -> list[T]:
        """Return the keys of boxes that share rows with `box`, in the order they were given."""
        if not box.ndim:
            return [key for key, _ in self._entries]
        first = max(0, bisect_right(self._edges, box.start[0]) - 1)
        last = bisect_left(self._edges, box.stop[0])
        near = {id(e): e[0] for entries in self._by_interval[first:last] for e in entries}
        if last - first <= 1:
            return list(near.values())
        return [entry[0] for entry in self._entries if id(entry) in near]

    def over(self, tile: Box) -> Iterator[tuple[T, Box]]:
        """Yield the keys of boxes that overlap `tile`, each with the common region."""
        for key, box in self.near(tile):
            common = box.intersect(tile)
            if common is not None:
                yield key, common


def _replace(box: Box, axis: int, start: int, stop: int) -> Box:
    if not box.ndim:
        return box
    return Box(
        (*box.start[:axis], start, *box.start[axis + 1 :]),
        (*box.stop[:axis], stop, *box.stop[axis + 1 :]),
    )
