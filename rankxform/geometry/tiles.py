"""Tiles: pieces of a tensor small enough to move at once, contiguous in every shard.

A tile has one index on each leading axis, a range on one axis, and everything on the axes
behind it. What a shard holds of such a piece is one contiguous byte range of its file, so a
tile needs one read from each source and one write to each destination, however the two sides
are sharded; what lies between is a strided copy in memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Generic, TypeVar

from rankxform.values import dataclass

from .box import Box


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
